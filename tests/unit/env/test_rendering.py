"""Promises of the choice of renderer: by what is there, on the GPU that CUDA sees, never against the operator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.env.simulators import rendering


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def test_the_renderer_is_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for present, expected in (("libEGL libOSMesa", "egl"), ("libOSMesa", "osmesa"), ("", "disabled")):
        monkeypatch.setattr(rendering, "_loads", lambda name, present=present: name.split(".")[0] in present)
        monkeypatch.delenv("MUJOCO_GL", raising=False)
        assert rendering.choose_renderer() == expected
        assert bool(rendering.missing_opengl()) == (expected == "disabled")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert rendering.choose_renderer() == "osmesa"


@pytest.mark.parametrize(
    ("cuda", "device"),
    [([2, 1, 0, 3], 2), ([None, 0], 1), ([None, None, 1, 0], 3), ([None], None), ([1], None), ([], None)],
)
def test_pictures_are_drawn_on_the_first_gpu_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, cuda: list[int | None], device: int | None
) -> None:
    monkeypatch.setattr(rendering, "_loads", lambda name: True)
    monkeypatch.setattr(rendering, "_NVIDIA", Path("/"))
    monkeypatch.setattr(rendering, "_cuda_numbers", lambda: cuda)
    rendering.choose_renderer()
    assert os.environ.get("MUJOCO_EGL_DEVICE_ID") == (None if device is None else str(device))


def test_the_operators_device_stands_and_nothing_is_asked_without_a_gpu_or_egl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_loads", lambda name: True)
    monkeypatch.setattr(rendering, "_cuda_numbers", lambda: pytest.fail("nobody needs to know"))
    monkeypatch.setattr(rendering, "_NVIDIA", Path("/nowhere"))
    rendering.choose_renderer()
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ
    monkeypatch.setattr(rendering, "_NVIDIA", Path("/"))
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "3")
    rendering.choose_renderer()
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "3"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID")
    rendering.choose_renderer()
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


def test_this_machines_egl_can_be_asked() -> None:
    numbers = rendering._cuda_numbers()
    assert all(number is None or number >= 0 for number in numbers)
    if not rendering._NVIDIA.exists():
        assert rendering.egl_device(numbers) is None
