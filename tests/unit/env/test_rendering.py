"""Promises of the choice of renderer: by what is there, on the GPU that CUDA sees, never against the operator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
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


EGL_CUDA_DEVICE_NV = 0x323A


class FakeEgl:
    """A libEGL with these devices: CUDA's number of each, None where the driver does not know one."""

    def __init__(self, cuda: Sequence[int | None], extensions: bool = True) -> None:
        def devices(most: int, handles: int, count: int) -> int:
            found = min(most, len(cuda))
            (ctypes.c_void_p * found).from_address(handles)[:] = range(1, found + 1)
            ctypes.c_int.from_address(count).value = found
            return 1

        def attribute(handle: int, name: int, value: int) -> int:
            number = cuda[handle - 1]
            if name != EGL_CUDA_DEVICE_NV or number is None:
                return 0
            ctypes.c_ssize_t.from_address(value).value = number
            return 1

        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._functions = {  # kept: C holds no reference
            b"eglQueryDevicesEXT": ctypes.CFUNCTYPE(number, ctypes.c_int, pointer, pointer)(devices),
            b"eglQueryDeviceAttribEXT": ctypes.CFUNCTYPE(number, pointer, ctypes.c_int, pointer)(attribute),
        }
        known = self._functions if extensions else {}

        def address(name: bytes) -> int | None:
            return ctypes.cast(known[name], pointer).value if name in known else None

        self.eglGetProcAddress = address


@pytest.mark.parametrize(
    ("cuda", "device"),
    [
        pytest.param((3, 2, 0, 1, None), "2", id="four GPUs in another order, and one that draws in software"),
        pytest.param((None, None, 0, 1), "2", id="CUDA_VISIBLE_DEVICES leaves two of four"),
        pytest.param((None,), None, id="only software"),
        pytest.param((), None, id="no device"),
    ],
)
def test_cudas_numbers_are_read_from_egl(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int | None, ...], device: str | None
) -> None:
    fake = FakeEgl(cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(rendering, "_NVIDIA", Path("/"))
    assert rendering._cuda_numbers() == list(cuda)
    assert rendering.choose_renderer() == "egl"
    assert os.environ.get("MUJOCO_EGL_DEVICE_ID") == device


def test_an_egl_that_cannot_be_asked_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeEgl((0,), extensions=False))
    assert rendering._cuda_numbers() == []

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert rendering._cuda_numbers() == []


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
