"""A disk that fails, or a stranger who holds all descriptors, costs requests and never the thread that serves blobs."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest

from common import blobs
from common.blobs import BlobStore
from joynexus.keys import KeyRegistry
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from services.master import removal
from services.master.bulk import BulkService
from tests.unit.relay.bulk_desk import Core, Desk
from tests.waiting import until

DATA = bytes(range(256)) * 8
DIGEST = blake3.blake3(DATA).hexdigest()
FAULTS = (errno.EIO, errno.EMFILE, errno.EACCES, errno.EROFS)


def failing(code: int) -> Callable[..., Any]:
    def fail(*args: object, **named: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_request_that_the_disk_fails_is_refused_with_a_sentence_and_served_once_it_is_mended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: int, tenant: str
) -> None:
    kept = desk.store.put_bytes(b"kept")
    desk.core.readable.add((tenant, kept))
    desk.ask(BlobBegin(digest=DIGEST, nbytes=len(DATA)), tenant=tenant)
    with monkeypatch.context() as broken:
        broken.setattr(io, "open", failing(code))
        broken.setattr(builtins, "open", failing(code))
        broken.setattr(os, "open", failing(code))
        broken.setattr(os, "stat", failing(code))
        broken.setattr(os, "utime", failing(code))
        for answer in (
            desk.ask(BlobRead(digest=kept, offset=0, length=4), tenant=tenant),
            desk.ask(BlobBegin(digest=kept, nbytes=4), tenant=tenant),
            desk.ask(BlobBegin(digest=DIGEST, nbytes=len(DATA)), tenant=tenant),
            desk.ask(BlobChunk(digest=DIGEST, offset=0), DATA, tenant=tenant),
        ):
            assert isinstance(answer, Failure)
            assert answer.code is ErrorCode.UNAVAILABLE
            assert answer.retry_after_ms
            assert os.strerror(code) in answer.message
            assert str(desk.store._root) not in answer.message
    assert isinstance(desk.ask(BlobRead(digest=kept, offset=0, length=4), tenant=tenant), BlobData)
    answer = desk.upload(DATA, tenant=tenant)
    assert desk.store.has(DIGEST)
    assert answer is None if tenant else answer == BlobOffset(digest=DIGEST, offset=len(DATA), complete=True)


def test_an_upload_whose_bytes_may_not_have_reached_the_disk_is_sent_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(errno.EIO))
        answer = desk.upload(DATA)
        assert isinstance(answer, Failure)
        assert answer.code is ErrorCode.UNAVAILABLE
        assert not desk.store.has(DIGEST)
    assert desk.ask(BlobBegin(digest=DIGEST, nbytes=len(DATA))) == BlobOffset(digest=DIGEST, offset=0)
    assert desk.upload(DATA) == BlobOffset(digest=DIGEST, offset=len(DATA), complete=True)


def test_an_upload_that_could_not_be_finished_for_want_of_descriptors_is_not_sent_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(blobs, "_sync", failing(errno.EMFILE))
        assert isinstance(desk.upload(DATA), Failure)
    complete = BlobOffset(digest=DIGEST, offset=len(DATA), complete=True)
    assert desk.ask(BlobBegin(digest=DIGEST, nbytes=len(DATA))) == complete


def test_a_blob_that_goes_between_the_look_and_the_read_is_absent(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.store, "has", lambda digest: True)
    answer = desk.ask(BlobRead(digest=DIGEST, offset=0, length=1))
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("code", FAULTS)
def test_housekeeping_outlives_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(removal, "LINGER_S", 0.0)
    monkeypatch.setattr(removal, "SWEEP_S", 0.0)
    failed: list[bool] = []
    core, store = Core(), BlobStore(tmp_path / "blobs")
    digest = store.put_bytes(DATA)
    service = BulkService(
        {},
        KeyRegistry(tmp_path / "registry.json"),
        store,
        tmp_path / "uploads",
        max_uploads=4,
        ask=lambda question: question(core),
        post=lambda event: None,
        heard=lambda door, frames: None,
        failed=lambda: failed.append(True),
    )
    with monkeypatch.context() as broken:
        for name in ("untouched", "sweep", "delete"):
            broken.setattr(store, name, failing(code))
        service.start()
        for count in (3, 6, 9):
            service.delete((digest,))
            until(lambda count=count: service.counts["disk"] >= count)  # type: ignore[misc]  # bound at once
    service.delete((digest,))
    try:
        until(lambda: not store.has(digest))
    finally:
        service.stop()
    assert not failed
