"""Takes from a process what it does not need, before it reads what strangers made.

In: folders that it goes on reading, one that it writes to, a bound of its memory. Out: the same process, for which all
other files, all network and all other processes are out of reach, for good. Never: a limit for any other process.

The means is Landlock, which needs no privilege and works inside containers. Where the kernel has none, the bounds of
memory and of open files hold all the same; `missing` says so.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

FILES = 1024
"""Open files at once: a reader has a few."""

# https://docs.kernel.org/userspace-api/landlock.html; the numbers are those of linux/landlock.h, alike on all machines.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ, _LIST = 1 << 0 | 1 << 2, 1 << 3  # a library is mapped to be executed
_WRITE = 1 << 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 14  # regular files: no link that leads elsewhere, no device or pipe
_FILES_BY_ABI = {1: 13, 2: 14, 3: 15, 5: 16}  # how many kinds of access to files a version knows, from the lowest bit
_NETWORK_ABI, _NETWORK = 4, 0b11  # to listen and to connect, by TCP
_SCOPES_ABI, _SCOPES = 6, 0b11  # abstract sockets and signals
_PR_SET_NO_NEW_PRIVS = 38


class _Rules(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def missing() -> str:
    """Say why processes cannot be confined to their files here; empty if they can."""
    return "" if _abi() else "this kernel has no Landlock (Linux 5.13), or it is switched off"


def confine(readable: Iterable[Path], writable: Path, *, memory_bytes: int) -> None:
    """Confine this process, which must have one thread: others would stay as they are.

    Args:
        readable: folders and files; what does not exist is left out.
        writable: a folder.
        memory_bytes: of its own memory; more is refused it, as MemoryError in Python.

    Raises:
        OSError: if the kernel refuses.
    """
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_DATA: memory_bytes}
    for what, most in bounds.items():
        allowed = resource.getrlimit(what)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(what, (most, most))
    abi = _abi()
    if not abi:
        return
    everything = (1 << next(bits for since, bits in reversed(_FILES_BY_ABI.items()) if abi >= since)) - 1
    rules = _Rules(everything, _NETWORK if abi >= _NETWORK_ABI else 0, _SCOPES if abi >= _SCOPES_ABI else 0)
    known = 8 * (1 + (abi >= _NETWORK_ABI) + (abi >= _SCOPES_ABI))
    ruleset = _call(_CREATE, ctypes.byref(rules), ctypes.c_size_t(known), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ | (_LIST if path.is_dir() else 0))
        _allow(ruleset, writable, (_WRITE | _LIST) & everything)
        if ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError("the kernel does not let this process give up privileges")
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _call(_ADD, ruleset, 1, ctypes.byref(_Beneath(access, place)), 0)
    finally:
        os.close(place)


def _abi() -> int:
    """Return the version of Landlock, 0 if there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return _call(_CREATE, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def _call(number: int, *words: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
