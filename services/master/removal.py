"""Removing blobs that nobody needs: those to which nothing refers any more, and what lost work left behind.

In: digests that may go, the passing of time. Out: blobs removed. Never: one that somebody stored or touched since it
was doomed, one to which something refers when its time has come, or a removal because the clock on the wall jumped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from common.blobs import BlobStore
from common.telemetry import get_logger

log = get_logger(__name__)

ABANDONED_S = 86_400.0
"""What nobody stored or touched for so long, and nothing refers to, is removed; so are unfinished uploads."""
SWEEP_S = 3600.0
FOLDERS = 256
"""The store is looked through folder by folder, all of it in the time between two sweeps."""
LINGER_S = 60.0
"""A blob to which nothing refers any more is deleted after this, unless somebody stores an equal one meanwhile: between
a worker that finds it there and the report that refers to it lies less."""


class DiskFaults:
    """Errors of the disk or of the limit of open files: noted, and outlived where they may pass.

    Args:
        counts: where `disk` counts them.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    @contextmanager
    def outlived(self, what: str) -> Iterator[None]:
        """Note an error, and go on."""
        try:
            yield
        except OSError as error:
            self.note(what, error)

    def note(self, what: str, error: OSError) -> None:
        """Log an error."""
        self._counts["disk"] += 1
        count = self._counts["disk"]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: it may last
            log.error("disk_failed", what=what, why=error.strerror, count=count)


class Removal:
    """Removes blobs, for the thread that serves them. `now` is in seconds that never jump.

    Args:
        store: the common blob store.
        unreferenced: has the core asked to which of some blobs nothing refers, and tells the answer.
        spared: says whether a blob must stay for now.
        faults: what the disk's errors are noted with.
    """

    def __init__(
        self,
        store: BlobStore,
        unreferenced: Callable[[Iterable[str], Callable[[list[str]], None]], None],
        spared: Callable[[str], bool],
        faults: DiskFaults,
    ) -> None:
        self._store = store
        self._unreferenced = unreferenced
        self._spared = spared
        self._faults = faults
        self._doomed: deque[tuple[float, dict[str, int]]] = deque()  # when to delete what, if its stamp is still this
        self._folder, self._folder_at = 0, 0.0

    def doom(self, digests: Sequence[str], now: float) -> None:
        """Remove these blobs a while later, if nothing refers to them then and nobody stored or touched them."""
        stamps = {}
        for digest in digests:
            with self._faults.outlived("a blob is not removed"):
                stamp = self._store.stamp(digest)
                if stamp is not None:
                    stamps[digest] = stamp
        if stamps:
            self._doomed.append((now + LINGER_S, stamps))

    def look(self, now: float) -> None:
        """Do what is due."""
        if now >= self._folder_at:
            with self._faults.outlived("blobs that nothing refers to are not looked for"):
                self.doom(self._store.untouched(f"{self._folder:02x}", ABANDONED_S), now)
            self._folder, self._folder_at = (self._folder + 1) % FOLDERS, now + SWEEP_S / FOLDERS
        while self._doomed and self._doomed[0][0] <= now:
            self._remove(self._doomed.popleft()[1])

    def _remove(self, stamps: dict[str, int]) -> None:
        def go_on(unreferenced: list[str]) -> None:
            for digest in unreferenced:
                with self._faults.outlived("a blob is not removed"):
                    if not self._spared(digest):
                        self._store.delete(digest, stamp=stamps[digest])

        self._unreferenced(stamps, go_on)
