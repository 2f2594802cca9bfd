"""The Vulkan driver that ManiSkill draws with, and that it needs even where it draws nothing.

In: what is installed on this machine. Out: environment variables that the Vulkan loader reads, and where ManiSkill
draws: `gpu` or `cpu`. Never: another choice than the operator's, where one was made; an import of ManiSkill.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # the second is what loaders before 1.3.207 read
PRIVATE = Path(sys.prefix, "share", "joynexus", "vulkan", "lvp_icd.json")
"""Where `scripts/system_packages.sh` unpacks a driver if the system's own is too old."""
MANIFESTS = (Path("/etc/vulkan/icd.d"), Path("/usr/share/vulkan/icd.d"))
NVIDIA_DEVICE = Path("/dev/nvidiactl")
_OLD_HEADERS = 230  # Mesa 22.3 (Debian 12) says 1.1.230, and ManiSkill refuses it: no descriptor indexing
_MISSING = "ManiSkill needs a Vulkan driver, also for states: run `make system-packages` as root"


def choose_driver() -> str:
    """Choose the driver before ManiSkill is imported; returns `gpu`, `cpu`, or an empty string if there is none.

    A choice in the environment variables VK_DRIVER_FILES or VK_ICD_FILENAMES stands; else an NVIDIA driver is taken if
    its device is there, else Mesa's software driver: the one in this virtual environment, else the system's.
    """
    chosen = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if chosen:
        return "gpu" if "nvidia" in chosen.lower() else "cpu"
    if NVIDIA_DEVICE.exists():  # SAPIEN brings a manifest of its own where the vendor's is not installed
        return "gpu"
    manifest = _software()
    if manifest is None:
        return ""
    os.environ.update(dict.fromkeys(VARIABLES, str(manifest)))
    return "cpu"


def missing_driver() -> str:
    """Return what to install so that ManiSkill finds a driver; empty if there is one."""
    if any(os.environ.get(name) for name in VARIABLES) or NVIDIA_DEVICE.exists() or _software() is not None:
        return ""
    if any(path for folder in MANIFESTS for path in folder.glob("lvp_icd*.json")):
        return f"the Vulkan driver of this system is too old (Mesa 22.3 or before): {_MISSING}"
    return _MISSING


def _software() -> Path | None:
    """Return the manifest of a software driver that ManiSkill accepts."""
    if PRIVATE.exists():
        return PRIVATE
    found = (path for folder in MANIFESTS for path in sorted(folder.glob("lvp_icd*.json")))
    return next((path for path in found if _headers(path) > _OLD_HEADERS), None)


def _headers(manifest: Path) -> int:
    """Return the version of the Vulkan headers that a driver was built with, the last number of its API version."""
    match = re.search(r'"api_version"\s*:\s*"\d+\.\d+\.(\d+)"', manifest.read_text())
    return int(match[1]) if match else 0
