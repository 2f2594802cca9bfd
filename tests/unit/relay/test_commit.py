"""Nothing is acknowledged before it is written, and one bad batch does not take others with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from common.journal.errors import JournalError
from common.journal.records import BlobRecord, Record
from common.metrics import Figures
from services.master.commit import Committer, Outcome
from services.master.events import Persisted, PersistFailed


class SlowJournal:
    """Writes when the test lets it; refuses digests that start with `bad`."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.writing = threading.Event()
        self.gate = threading.Semaphore(0)
        self.broken = False

    def append(self, records: Sequence[Record]) -> None:
        self.writing.set()
        assert self.gate.acquire(timeout=10)
        if self.broken:
            raise RuntimeError("a bug")
        digests = [record.digest for record in records if isinstance(record, BlobRecord)]
        if any(digest.startswith("bad") for digest in digests):
            raise JournalError("the disk is full")
        self.written.append(digests)


class Setup:
    def __init__(self) -> None:
        self.journal = SlowJournal()
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self.failed = threading.Event()
        self.figures = Figures()
        self.committer = Committer(
            self.journal,  # type: ignore[arg-type]  # all that it needs of a journal
            lambda outcomes: [self.outcomes.put(outcome) for outcome in outcomes],  # type: ignore[func-returns-value]
            self.failed.set,
            self.figures,
        )
        self.committer.start()

    def submit(self, token: int, digest: str) -> None:
        self.committer.submit([(token, [BlobRecord(tenant="a", digest=digest)])])


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    for _ in range(10):
        setup.journal.gate.release()
    setup.committer.stop()


def test_acknowledgement_follows_the_write(setup: Setup) -> None:
    setup.submit(1, "a")
    assert setup.journal.writing.wait(10)
    assert setup.outcomes.empty()
    setup.journal.gate.release()
    assert setup.outcomes.get(timeout=10) == Persisted(token=1)


def test_what_waits_for_the_disk_shares_one_transaction(setup: Setup) -> None:
    setup.submit(1, "a")
    assert setup.journal.writing.wait(10)
    for token in (2, 3, 4):
        setup.submit(token, f"d{token}")
    for _ in range(2):
        setup.journal.gate.release()
    tokens = [setup.outcomes.get(timeout=10).token for _ in range(4)]
    assert tokens == [1, 2, 3, 4]
    assert setup.journal.written == [["a"], ["d2", "d3", "d4"]]


def test_batch_that_cannot_be_written_does_not_take_others_with_it(setup: Setup) -> None:
    setup.submit(1, "a")
    assert setup.journal.writing.wait(10)
    for token, digest in ((2, "b"), (3, "bad"), (4, "d")):
        setup.submit(token, digest)
    for _ in range(5):
        setup.journal.gate.release()
    outcomes = [setup.outcomes.get(timeout=10) for _ in range(4)]
    assert outcomes == [
        Persisted(token=1),
        Persisted(token=2),
        PersistFailed(token=3, reason="the disk is full"),
        Persisted(token=4),
    ]


def test_stop_writes_what_waits(setup: Setup) -> None:
    for _ in range(2):
        setup.journal.gate.release()
    setup.submit(1, "a")
    setup.submit(2, "b")
    setup.committer.stop()
    assert [digest for batch in setup.journal.written for digest in batch] == ["a", "b"]


def test_thread_that_fails_is_reported(setup: Setup) -> None:
    setup.journal.broken = True
    setup.submit(1, "a")
    setup.journal.gate.release()
    assert setup.failed.wait(10)
    assert setup.outcomes.empty()


def test_refused_commit_is_counted_and_the_journal_counts_as_full_until_one_goes_well(setup: Setup) -> None:
    for _ in range(3):
        setup.journal.gate.release()
    assert setup.committer.writable
    setup.submit(1, "bad")
    setup.outcomes.get(timeout=10)
    assert not setup.committer.writable
    assert setup.figures.values("joynexus_journal_failures_total") == {(): 1}
    setup.submit(2, "good")
    setup.outcomes.get(timeout=10)
    assert setup.committer.writable
    assert sum(setup.figures.distributions("joynexus_journal_commit_seconds")[()].counts) == 1
