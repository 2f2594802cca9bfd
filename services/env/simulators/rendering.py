"""How MuJoCo draws off screen: with which OpenGL library, on which GPU.

In: what this machine has. Out: the environment variables that MuJoCo reads, set before it is imported. Never: an import
of MuJoCo, a graphics context, or a choice against one that the operator made.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_NVIDIA = Path("/dev/nvidiactl")
_EGL_CUDA_DEVICE_NV = 0x323A  # https://registry.khronos.org/EGL/extensions/NV/EGL_NV_device_cuda.txt
_MAX_DEVICES = 64
PACKAGES = "libegl1 libgl1 (or libosmesa6)"


def choose_renderer() -> str:
    """Choose MuJoCo's OpenGL backend before MuJoCo is imported: EGL, else OSMesa, else none; returns its name.

    A choice in the environment variable MUJOCO_GL stands. With EGL on a machine with NVIDIA GPUs, pictures are drawn on
    the first that CUDA sees here, unless MUJOCO_EGL_DEVICE_ID names one.
    """
    if "MUJOCO_GL" not in os.environ:
        available = [
            name for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")) if _loads(library)
        ]
        os.environ["MUJOCO_GL"] = available[0] if available else "disabled"
    if os.environ["MUJOCO_GL"] == "egl" and "MUJOCO_EGL_DEVICE_ID" not in os.environ and _NVIDIA.exists():
        device = egl_device(_cuda_numbers())
        if device is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
    return os.environ["MUJOCO_GL"]


def egl_device(cuda: Sequence[int | None]) -> int | None:
    """Return which EGL device is the first GPU that CUDA sees, None if none is.

    EGL counts the devices of a machine in an order of its own, and also those that draw in software; CUDA counts those
    that CUDA_VISIBLE_DEVICES leaves, from 0, and the driver tells their numbers in that count.

    Args:
        cuda: CUDA's number of each EGL device in EGL's order, None where there is none.
    """
    return cuda.index(0) if 0 in cuda else None


def _cuda_numbers() -> list[int | None]:
    """Ask EGL for its devices and for CUDA's number of each; empty if it cannot be asked."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    address = egl.eglGetProcAddress
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    devices_at, attribute_at = address(b"eglQueryDevicesEXT"), address(b"eglQueryDeviceAttribEXT")
    if not devices_at or not attribute_at:
        return []
    handles, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int()
    ask_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(devices_at)
    if not ask_devices(_MAX_DEVICES, handles, ctypes.byref(count)):
        return []
    ask = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(attribute_at)
    numbers: list[int | None] = []
    for handle in handles[: count.value]:
        number = ctypes.c_ssize_t(-1)
        known = ask(handle, _EGL_CUDA_DEVICE_NV, ctypes.byref(number))
        numbers.append(number.value if known and number.value >= 0 else None)
    return numbers


def missing_opengl() -> str:
    """Say what to install so that pictures can be drawn, or nothing."""
    if choose_renderer() == "disabled":
        return f"no OpenGL library is installed to draw pictures with: install {PACKAGES}"
    return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
