"""Named places where a test makes a real process fail: between the fsync and the answer, inside a file, before a reply.

In: `JOYNEXUS_FAILPOINTS`, and calls of `failpoint` at the places in `NAMES`. Out: the fault that was asked for there.
Never: a fault that nobody asked for, or a cost that can be measured while none is: one look into an empty dictionary.

The variable holds either faults, `master.append=enospc;trainer.optim_step=2*kill` (`2*`: the second time that this
process comes by), or the path of a folder. Then a file named as the place holds the fault, and whoever is struck takes
it away (to `<name>.struck`): it strikes once, in whichever process, and not again in the one that is started after it.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "JOYNEXUS_FAILPOINTS"

NAMES = (
    "master.let_in",
    "master.look_around",
    "master.append",
    "master.after_fsync_before_ack",
    "master.applied_before_reply",
    "master.serve_blob",
    "trainer.forward_backward",
    "trainer.optim_step",
    "trainer.write_checkpoint",
    "trainer.before_answer",
    "inference.load_version",
    "inference.before_answer",
    "env.before_blob",
    "env.between_blob_and_answer",
    "worker.push_blob",
)
"""Every place. Its call says where it is; what has happened by then stands in the name."""

_FAULT = re.compile(r"(?:([1-9][0-9]*)\*)?(kill|error|enospc|eio|hang|delay:[0-9.]+|raise:\w+\.\w+)")


class FailpointError(RuntimeError):
    """The fault `error`: something that no code expects."""


class _Armed:
    """A fault that waits for a process to come by the n-th time."""

    def __init__(self, name: str, text: str) -> None:
        found = _FAULT.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"'{text}' is no fault for {name} in {VARIABLE}: it is kill, error, enospc, eio, hang, "
                "delay:SECONDS or raise:MODULE.EXCEPTION, with 2* before it for the second time"
            )
        self._name = name
        self._left = int(found[1] or 1)
        self._fault = found[2]
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Count a process that comes by; return whether this is the time."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def strike(self) -> None:
        """Do the fault."""
        match self._fault.partition(":"):
            case "kill", *_:
                os.kill(os.getpid(), signal.SIGKILL)
            case "error", *_:
                raise FailpointError(f"failpoint {self._name}")
            case "enospc", *_:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "eio", *_:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "hang", *_:
                threading.Event().wait()
            case "raise", _, named:  # of a module that the process has already: `torch.AcceleratorError`
                module, _, exception = named.partition(".")
                raise getattr(sys.modules[module], exception)(f"failpoint {self._name}")
            case _, _, seconds:
                time.sleep(float(seconds))

    def __call__(self) -> None:
        if self.due():
            self.strike()


class _InFolder:
    """A fault that stands in a file, as soon as there is one."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / name
        self._text = ""
        self._armed: _Armed | None = None

    def __call__(self) -> None:
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            self._armed = None
            return
        armed = self._armed
        if armed is None or text != self._text:
            self._text = text
            self._armed = armed = _Armed(self._file.name, text)
        if not armed.due():
            return
        self._armed = None
        try:
            self._file.rename(self._file.with_name(f"{self._file.name}.struck"))
        except FileNotFoundError:  # another process was first
            return
        armed.strike()


_places: dict[str, Callable[[], None]] = {}


def failpoint(name: str) -> None:
    """Fail here if that was asked for.

    Raises:
        OSError: `enospc`, `eio`.
        FailpointError: `error`.
        Exception: the one that `raise` names.
    """
    place = _places.get(name)
    if place is not None:
        place()


def arm(environment: Mapping[str, str]) -> None:
    """Take what the environment asks for, in place of what was asked for before.

    Raises:
        ValueError: one sentence on a name or a fault that is none.
    """
    value = environment.get(VARIABLE, "").strip()
    _places.clear()
    if value and "=" not in value:
        _places.update({name: _InFolder(Path(value), name) for name in NAMES})
        return
    for part in filter(None, value.split(";")):
        name, _, text = (word.strip() for word in part.partition("="))
        if name not in NAMES:
            raise ValueError(f"{VARIABLE} names a place '{name}', which is none: they are {', '.join(NAMES)}")
        _places[name] = _Armed(name, text)
