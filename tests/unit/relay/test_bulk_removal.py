"""What nothing refers to is removed: a while later, and not if somebody stores an equal blob meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from common.blobs import BlobStore
from joynexus.keys import KeyRegistry
from joynexus.wire import Failure
from services.master import bulk
from services.master.bulk import BulkService
from tests.waiting import until

DEADLINE_S = 10.0


class Core:
    """What the core says: which blobs something refers to."""

    def __init__(self) -> None:
        self.referenced: set[str] = set()

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if digest not in self.referenced]

    def may_read(self, tenant: str, digest: str) -> bool:
        return False

    def refuse_upload(self, tenant: str, digest: str, nbytes: int) -> Failure | None:
        return None


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
        ask=lambda question: question(core),
        post=lambda event: None,
        heard=lambda frame: None,
        failed=lambda: None,
    )


@pytest.fixture
def service(core: Core, store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkService]:
    monkeypatch.setattr(bulk, "LINGER_S", 0.2)
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


def test_a_blob_that_a_worker_found_there_and_has_not_reported_yet_survives(
    store: BlobStore, service: BulkService
) -> None:
    wanted, marker = store.put_bytes(b"wanted"), store.put_bytes(b"marker")
    age(store, wanted, 10)
    age(store, marker, 10)
    service.delete((wanted, marker))
    store.put_bytes(b"wanted")
    age(store, wanted, -DEADLINE_S)  # just now, however slow this machine is
    until(lambda: not store.has(marker))
    assert store.has(wanted)


def test_what_stale_or_cancelled_work_left_is_swept_after_a_day_in_every_folder(
    core: Core, store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SWEEP_S", 0.0)
    digests = [store.put_bytes(bytes([index])) for index in range(20)]
    for digest in digests[:-1]:
        age(store, digest, bulk.ABANDONED_S + 60)
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
