"""A file of the operator's that the master heeds while it runs, and that a wrong line in it must not switch off.

In: a path, what reads its content, a folder for the last good copy. Out: `value`, and whether it is another one now.
Never: a value of a file that cannot be read whole: then what it said before goes on, also after a restart, by the copy.
A file that is not there means none, and the copy goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from common.telemetry import get_logger
from joynexus.keys import write_private
from joynexus.unreadable import UNREADABLE

log = get_logger(__name__)

T = TypeVar("T")


class OperatorFile(Generic[T]):
    """A file in the folder of keys.

    Args:
        path: of the file.
        copies: folder in which the last good copy is kept, under the file's name.
        parse: makes a value of the file's content; ValueError, or one of `UNREADABLE`, if it cannot.
        none: the value without a file.
        unreadable: called with a sentence when the file cannot be used, once for each state of it and each reason.

    Attributes:
        value: what holds.
    """

    def __init__(
        self, path: Path, copies: Path, parse: Callable[[bytes], T], *, none: T, unreadable: Callable[[str], object]
    ) -> None:
        self._path = path
        self._copy = copies / path.name
        self._parse = parse
        self._none = none
        self._unreadable = unreadable
        self._stamp: tuple[int, ...] | None = None  # None: not looked at yet
        self._why = ""  # it could not be opened, which may end without a trace in the file
        self.value = none

    def changed(self) -> bool:
        """Look at the file; return whether `value` may be another now. Costs one `stat` while nothing changes."""
        first, before, why = self._stamp is None, self._stamp, self._why
        try:
            status = os.stat(self._path)
            self._stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        except OSError:
            self._stamp = (0, 0, 0, 0)
        if self._stamp == before and not why:
            return False
        self._why = ""
        try:
            content = self._path.read_bytes()
            self.value = self._parse(content)
        except FileNotFoundError:
            self.value = self._none
            self._keep(None)
        except (OSError, ValueError, *UNREADABLE) as error:
            if isinstance(error, OSError):
                self._why = str(error)
            if self._stamp == before and self._why == why:
                return False
            holds = self._recall() if first else "what held before goes on"
            self._unreadable(f"{self._path} cannot be used ({error}): mend or remove it; until then {holds}")
            return first
        else:
            self._keep(content)
        return True

    def _recall(self) -> str:
        """Take the copy's value; return, for people, what holds now."""
        try:
            self.value = self._parse(self._copy.read_bytes())
        except FileNotFoundError:
            return "it is as if it were not there, for no copy of it was ever kept"
        except (OSError, ValueError, *UNREADABLE) as error:
            return f"it is as if it were not there, for its copy {self._copy} cannot be used either ({error})"
        return f"the last good copy of it holds, {self._copy}"

    def _keep(self, content: bytes | None) -> None:
        """Have the copy be this; None: there is none."""
        try:
            if content is None:
                self._copy.unlink(missing_ok=True)
            elif not self._copy.exists() or self._copy.read_bytes() != content:
                write_private(self._copy, content)
        except OSError as error:  # what the file says holds now; it is the next start that may lack it
            log.warning("copy_not_kept", file=str(self._path), why=str(error))
