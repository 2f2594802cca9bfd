"""How MuJoCo draws off screen: which OpenGL library.

In: what is installed. Out: the environment variables that MuJoCo reads, set before it is imported. Never: an import of
MuJoCo, or a choice against one that the operator made.
"""

from __future__ import annotations

import ctypes
import os

PACKAGES = "libegl1 libgl1 (or libosmesa6)"


def choose_renderer() -> str:
    """Choose MuJoCo's OpenGL backend before MuJoCo is imported: EGL, else OSMesa, else none; returns its name.

    A choice in the environment variable MUJOCO_GL stands.
    """
    if "MUJOCO_GL" not in os.environ:
        available = [
            name for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")) if _loads(library)
        ]
        os.environ["MUJOCO_GL"] = available[0] if available else "disabled"
    return os.environ["MUJOCO_GL"]


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
