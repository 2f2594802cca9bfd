"""What nothing refers to is removed: a while later, and not if somebody stores an equal blob meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import blobs
from common.blobs import BlobStore
from joynexus.keys import KeyRegistry
from services.master import removal
from services.master.bulk import BulkService
from tests.unit.relay.bulk_desk import Core, Desk
from tests.waiting import until


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def serve(core: Core, store: BlobStore, folder: Path) -> BulkService:
    return BulkService(
        {},
        KeyRegistry(folder / "registry.json"),
        store,
        folder / "uploads",
        max_uploads=4,
        ask=lambda question: question(core),
        post=lambda event: None,
        heard=lambda door, frames: None,
        failed=lambda: None,
    )


@pytest.fixture
def service(core: Core, store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkService]:
    monkeypatch.setattr(removal, "LINGER_S", 0.2)
    service = serve(core, store, tmp_path)
    service.start()
    yield service
    service.stop()


def age(store: BlobStore, digest: str, seconds: float) -> None:
    os.utime(store.path(digest), (time.time() - seconds,) * 2)


def test_a_blob_that_nothing_refers_to_is_deleted_and_one_that_is_referred_to_again_is_not(
    core: Core, store: BlobStore, service: BulkService
) -> None:
    lost, kept = store.put_bytes(b"lost"), store.put_bytes(b"kept")
    age(store, lost, 10)
    age(store, kept, 10)
    core.referenced.add(kept)
    service.delete((lost, kept))
    until(lambda: not store.has(lost))
    assert store.has(kept)
    assert not service.counts, "what is removed is neither refused nor failed"


def test_a_blob_that_a_worker_found_there_and_has_not_reported_yet_survives(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    wanted, marker = desk.store.put_bytes(b"wanted"), desk.store.put_bytes(b"marker")
    desk.service.delete((wanted, marker))
    desk.work()
    age(desk.store, wanted, 10)  # another time than before, whichever way the clock went
    desk.pass_time(removal.LINGER_S)
    assert not desk.store.has(marker)
    assert desk.store.has(wanted)


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_clock_that_jumps_removes_nothing_that_a_worker_has_just_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    desk = Desk(tmp_path)
    reported, found, lost = (desk.store.put_bytes(name) for name in (b"reported", b"found", b"lost"))
    jumped = time.time() + 3600 * hours
    monkeypatch.setattr(blobs.time, "time", lambda: jumped)
    for _ in range(removal.FOLDERS):  # all of the store
        desk.pass_time(removal.SWEEP_S / removal.FOLDERS, steps=1)
        desk.core.referenced.add(reported)
        if desk.store.has(found):
            age(desk.store, found, 0)  # somebody finds it there now
    desk.pass_time(removal.LINGER_S)
    assert desk.store.has(reported)
    assert desk.store.has(found)
    assert desk.store.has(lost) is (hours < 0)


def test_what_stale_or_cancelled_work_left_is_swept_after_a_day_in_every_folder(
    core: Core, store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "SWEEP_S", 0.0)
    monkeypatch.setattr(removal, "LINGER_S", 0.0)
    digests = [store.put_bytes(bytes([index])) for index in range(20)]
    for digest in digests[:-1]:
        age(store, digest, removal.ABANDONED_S + 60)
    core.referenced.add(digests[0])
    service = serve(core, store, tmp_path)
    service.start()
    try:

        def swept() -> bool:
            service.delete(())  # wakes it, for the next folder
            return not any(map(store.has, digests[1:-1]))

        until(swept)
    finally:
        service.stop()
    assert store.has(digests[0])
    assert store.has(digests[-1])
