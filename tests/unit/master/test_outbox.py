"""What has to become durable does, in the order in which it was said, however the disk behaves."""

from __future__ import annotations

from common.journal.records import CheckpointRecord
from services.master.commands import DeleteBlobs, Persist
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


def deleted(outbox: Outbox) -> list[str]:
    return [digest for command in outbox.take() if isinstance(command, DeleteBlobs) for digest in command.digests]


def test_blobs_are_deleted_once_what_was_said_before_is_durable_and_not_a_moment_earlier() -> None:
    outbox = Outbox(lambda: "id", retry_s=1.0)
    outbox.delete_blobs(["nothing to wait for"])
    assert deleted(outbox) == ["nothing to wait for"]
    outbox.save([record(1)])
    outbox.save([record(2)], lost=lambda reason: None)
    (first, second) = persists(outbox)
    outbox.delete_blobs(["x"])
    outbox.save([record(3)])
    (third,) = persists(outbox)
    outbox.persist_failed(second.token, "the disk is full")  # it was undone, so there is nothing to wait for
    outbox.persisted(third.token)
    assert deleted(outbox) == []
    outbox.persist_failed(first.token, "the disk is full")
    assert deleted(outbox) == []
    outbox.now = 2.0
    outbox.run_timers()
    (again,) = persists(outbox)
    assert deleted(outbox) == []
    outbox.persisted(again.token)
    assert deleted(outbox) == ["x"]
