"""What has to become durable does, in the order in which it was said, however the disk behaves."""

from __future__ import annotations

from common.journal.records import CheckpointRecord
from services.master.commands import Persist
from services.master.outbox import Outbox


def record(seq: int) -> CheckpointRecord:
    return CheckpointRecord(tenant="a", policy="p", digest=f"d{seq}", nbytes=1, seq=seq, step=seq)


def persists(outbox: Outbox) -> list[Persist]:
    return [command for command in outbox.take() if isinstance(command, Persist)]


def test_a_write_that_fails_late_does_not_overwrite_what_was_said_after_it() -> None:
    outbox = Outbox(lambda: "id", retry_s=1.0)
    for seq in (1, 2):
        outbox.save([record(seq)])
    first, second = persists(outbox)
    outbox.persist_failed(first.token, "the disk is full")
    outbox.save([record(3)])  # waits behind the first one
    outbox.persist_failed(second.token, "the disk is full")
    outbox.now = 2.0
    outbox.run_timers()
    written = [written.seq for command in persists(outbox) for written in command.records]  # type: ignore[union-attr]
    assert written[-1] == 3
    assert written == sorted(written)
