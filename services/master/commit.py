"""The thread that writes the journal: what waits goes into one transaction, then all of it is acknowledged.

In: records under a token. Out: `Persisted` or `PersistFailed` for each token, in order. Never: an acknowledgement
before the fsync, or a batch that fails as a whole because of one of its parts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from common.failpoints import failpoint
from common.journal.journal import Journal
from common.journal.records import Record
from common.metrics import Figures
from common.telemetry import get_logger
from services.master.events import Persisted, PersistFailed

log = get_logger(__name__)

Outcome = Persisted | PersistFailed

DOUBT_S = 30.0
"""After so long without a failure the journal counts as writable again: perhaps nobody has tried."""


class Committer:
    """Group commit: while one transaction is on its way to the disk, the next one gathers.

    Args:
        journal: used in this thread only from now on (except for reading payloads).
        post: takes outcomes, in this thread.
        failed: called if this thread fails for another reason than a full or broken disk.
        figures: where times and failures are counted.
    """

    def __init__(
        self,
        journal: Journal,
        post: Callable[[Sequence[Outcome]], None],
        failed: Callable[[], object],
        figures: Figures,
    ) -> None:
        self._journal = journal
        self._post = post
        self._failed = failed
        self._figures = figures
        figures.add("joynexus_journal_failures_total", by=0.0)
        self._refused_at = float("-inf")
        self._waiting: deque[tuple[int, Sequence[Record]]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._guarded, name="journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, batches: Sequence[tuple[int, Sequence[Record]]]) -> None:
        """Have batches of records written, each under its token."""
        with self._changed:
            self._waiting.extend(batches)
            self._changed.notify()

    @property
    def writable(self) -> bool:
        """Return whether the journal took what was last written (or a while has passed)."""
        return time.monotonic() - self._refused_at > DOUBT_S

    def stop(self) -> None:
        """Write what waits, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            log.critical("thread_failed", thread="journal", exc_info=True)
            self._failed()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                batches = list(self._waiting)
                self._waiting.clear()
            outcomes = self._write(batches)
            failpoint("master.after_fsync_before_ack")
            self._post(outcomes)

    def _write(self, batches: Sequence[tuple[int, Sequence[Record]]]) -> list[Outcome]:
        started = time.monotonic()
        try:
            failpoint("master.append")
            self._journal.append([record for _, records in batches for record in records])
        except OSError as error:
            self._refused_at = time.monotonic()
            self._figures.add("joynexus_journal_failures_total")
            if len(batches) == 1:
                log.error("journal_refuses", why=str(error))
                return [PersistFailed(token=batches[0][0], reason=str(error))]
            return [outcome for batch in batches for outcome in self._write([batch])]
        self._refused_at = float("-inf")
        self._figures.observe("joynexus_journal_commit_seconds", value=time.monotonic() - started)
        return [Persisted(token=token) for token, _ in batches]
