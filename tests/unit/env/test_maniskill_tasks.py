"""Promises of ManiSkill's table and driver that need no ManiSkill: names, sentences, which driver is taken."""

import os
from pathlib import Path

import pytest

from services.env.simulators import maniskill_driver
from services.env.simulators.maniskill import ManiSkillFamily
from services.env.simulators.maniskill_tasks import NO_TASKS, TASKS
from services.env.simulators.registry import family_of


def test_every_task_has_a_text_and_a_limit() -> None:
    assert {"PickCube-v1", "PushCube-v1"} <= set(TASKS)
    assert all(task.instruction and task.limit > 0 for task in TASKS.values())
    assert not set(TASKS) & set(NO_TASKS)


def test_names_that_are_no_task_are_refused_with_what_to_ask_for() -> None:
    with pytest.raises(ValueError, match="did you mean maniskill/PickCube-v1"):
        family_of("maniskill/PickCub-v1")
    with pytest.raises(ValueError, match="maniskill/Empty-v1 is an empty scene: nothing can succeed in it"):
        family_of("maniskill/Empty-v1")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without drivers: `private.json`, `system/` and `nvidia` may be put into the folder."""
    for variable in maniskill_driver.VARIABLES:
        monkeypatch.setenv(variable, "")  # restores what the choice sets
        monkeypatch.delenv(variable)
    monkeypatch.setattr(maniskill_driver, "PRIVATE", tmp_path / "private.json")
    monkeypatch.setattr(maniskill_driver, "MANIFESTS", (tmp_path / "absent", tmp_path / "system"))
    monkeypatch.setattr(maniskill_driver, "NVIDIA_DEVICE", tmp_path / "nvidia")
    (tmp_path / "system").mkdir()
    return tmp_path


def manifest(path: Path, version: str) -> str:
    path.write_text(f'{{"ICD": {{"api_version": "{version}", "library_path": "./libvulkan_lvp.so"}}}}')
    return str(path)


def test_a_machine_without_a_driver_is_told_what_to_install(machine: Path) -> None:
    assert maniskill_driver.choose_driver() == ""
    assert maniskill_driver.missing_driver().startswith("ManiSkill needs a Vulkan driver")


def test_a_driver_that_is_too_old_is_not_taken_and_said_to_be_so(machine: Path) -> None:
    manifest(machine / "system" / "lvp_icd.x86_64.json", "1.1.230")
    assert maniskill_driver.choose_driver() == ""
    assert "too old" in maniskill_driver.missing_driver()


def test_the_private_driver_goes_before_the_systems(machine: Path) -> None:
    theirs = manifest(machine / "system" / "lvp_icd.x86_64.json", "1.4.305")
    assert maniskill_driver.choose_driver() == "cpu"
    assert {os.environ[variable] for variable in maniskill_driver.VARIABLES} == {theirs}
    for variable in maniskill_driver.VARIABLES:
        del os.environ[variable]
    ours = manifest(machine / "private.json", "1.4.305")
    assert maniskill_driver.choose_driver() == "cpu"
    assert {os.environ[variable] for variable in maniskill_driver.VARIABLES} == {ours}
    assert maniskill_driver.missing_driver() == ""


def test_an_nvidia_device_is_drawn_on(machine: Path) -> None:
    manifest(machine / "private.json", "1.4.305")
    (machine / "nvidia").touch()
    assert maniskill_driver.choose_driver() == "gpu"
    assert not any(variable in os.environ for variable in maniskill_driver.VARIABLES)


def test_the_operators_choice_stands(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest(machine / "private.json", "1.4.305")
    monkeypatch.setenv("VK_DRIVER_FILES", "/vendor/nvidia_icd.json")
    assert maniskill_driver.choose_driver() == "gpu"
    monkeypatch.setenv("VK_DRIVER_FILES", "/vendor/mesa.json")
    assert maniskill_driver.choose_driver() == "cpu"
    assert "VK_ICD_FILENAMES" not in os.environ


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.env.simulators.maniskill.find_spec", lambda name: None)
    assert ManiSkillFamily().missing().startswith("ManiSkill is not installed: run `make install-simulators`")
