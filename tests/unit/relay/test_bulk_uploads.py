"""Uploads: few enough at once, counted whatever happens, and nobody waits for another's to be verified."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import blobs
from common.blobs import BlobStore, digest_file
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.front import BlobBegin, BlobChunk, BlobData, BlobOffset, BlobRead
from services.master import bulk, removal
from services.master.background import Background
from services.master.events import BlobStored
from services.master.uploads import Uploads
from tests.unit.relay.bulk_desk import Desk
from tests.waiting import until

MOST = 4  # of the desk
SMALL, LARGE, LARGER = b"small", bytes(1000), bytes(2000)


def name(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class Reading:
    """Large files take as long to hash as the test wants."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[Path] = []

    def digest_file(self, path: Path) -> str:
        if path.stat().st_size >= len(LARGE):
            self.begun.append(path)
            assert self.go_on.wait(60)
        return digest_file(path)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    reading = Reading()
    monkeypatch.setattr(bulk, "AT_ONCE_BYTES", len(LARGE) - 1)
    monkeypatch.setattr(blobs, "digest_file", reading.digest_file)
    yield reading
    reading.go_on.set()


# How many


def test_of_too_many_unfinished_uploads_one_that_was_left_alone_for_long_is_given_up(desk: Desk) -> None:
    def partial() -> set[str]:
        return {digest for digest, _ in uploads.area.partial()}

    sent = [bytes([number]) * 10 for number in range(MOST + 2)]
    uploads = desk.service._uploads.of("acme")
    for data in sent[:MOST]:
        desk.begin(data, tenant="acme")
        desk.ask(BlobChunk(digest=name(data), offset=0), data[:4], tenant="acme")
    desk.ask(BlobChunk(digest=name(sent[0]), offset=4), sent[0][4:6], tenant="acme")  # it goes on
    desk.begin(b"x" * 20, tenant="rival")
    desk.begin(sent[MOST], tenant="acme")
    lost = desk.ask(BlobChunk(digest=name(sent[1]), offset=4), sent[1][4:], tenant="acme")
    assert isinstance(lost, Failure)
    assert lost.code is ErrorCode.INVALID
    assert "begin it" in lost.message
    assert partial() == {name(sent[0]), name(sent[2]), name(sent[3])}
    desk.begin(sent[MOST + 1], tenant="acme")  # now it is the one of which nothing came
    assert partial() == {name(sent[0]), name(sent[2]), name(sent[3])}
    assert desk.begin(sent[0], tenant="acme") == 6
    assert uploads.nbytes == 10 * MOST
    assert len(desk.service._uploads.of("rival")) == 1


def test_a_set_of_more_files_than_may_be_unfinished_is_pushed_all_the_same(desk: Desk) -> None:
    sent = [bytes([number]) * 10 for number in range(3 * MOST)]
    for data in sent:  # a client asks first what is missing
        assert desk.begin(data, tenant="acme") == 0
    for data in sent:
        desk.upload(data, tenant="acme")
    assert [event.digest for event in desk.events if isinstance(event, BlobStored)] == [name(data) for data in sent]


def test_workers_may_have_any_number_of_uploads(desk: Desk) -> None:
    for number in range(3 * MOST):
        desk.begin(bytes([number]) * 10, tenant="")
    assert len(desk.service._uploads.of("")) == 3 * MOST


@given(st.lists(st.tuples(st.sampled_from("be"), st.integers(0, 5), st.integers(0, 9)), max_size=30))
def test_what_uploads_take_is_the_sum_over_them(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    uploads = Uploads(BlobStore(tmp_path_factory.mktemp("area")), most=3, now=0.0)
    there: dict[str, int] = {}
    for now, (step, number, nbytes) in enumerate(steps):
        digest = name(bytes([number]))
        if step == "b":
            uploads.begin(digest, nbytes, now)
            there.pop(digest, None)
            there[digest] = nbytes
            if len(there) > 3:
                del there[next(iter(there))]
        else:
            uploads.end(digest)
            there.pop(digest, None)
        assert uploads.nbytes == sum(there.values())
        assert uploads.others(digest) == sum(there.values()) - there.get(digest, 0)
        assert len(uploads) == len(there)


# A crash


def test_an_upload_that_a_crash_left_whole_counts_completes_unsent_and_is_swept_in_the_end(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    for data in (LARGE, LARGER):
        before.begin(data, tenant="acme")
        area = before.service._uploads.of("acme").area
        area.append(name(data), 0, data)  # all bytes came, and then the master died
    desk = Desk(tmp_path)
    desk.ask(BlobBegin(digest=name(SMALL), nbytes=len(SMALL)), tenant="acme")
    assert desk.core.asked_bytes == len(SMALL) + len(LARGE) + len(LARGER)
    lost = desk.ask(BlobChunk(digest=name(LARGE), offset=0), LARGE, tenant="acme")
    assert isinstance(lost, Failure)  # what comes without an announcement is not taken
    assert desk.ask(BlobBegin(digest=name(LARGE), nbytes=len(LARGE)), tenant="acme") is None
    (stored,) = desk.events
    assert isinstance(stored, BlobStored)
    assert (stored.digest, stored.nbytes) == (name(LARGE), len(LARGE))
    assert desk.store.has(name(LARGE))
    (file,) = (tmp_path / "blobs" / "uploads" / "acme" / "partial").glob(name(LARGER))
    os.utime(file, (1, 1))
    for _ in range(2):
        desk.service._uploads.sweep(removal.ABANDONED_S)
    assert not file.exists()


# A long verification


def test_while_a_large_upload_is_verified_all_else_is_served(desk: Desk, reading: Reading) -> None:
    kept = desk.store.put_bytes(b"kept")
    assert desk.upload(LARGE, tenant="acme") is None
    until(lambda: reading.begun)
    assert isinstance(desk.ask(BlobRead(digest=kept, offset=0, length=4)), BlobData)
    assert isinstance(desk.upload(SMALL), BlobOffset)
    assert desk.upload(SMALL, tenant="acme") is None
    assert [event.digest for event in desk.events if isinstance(event, BlobStored)] == [name(SMALL)]
    assert desk.service._uploads.of("acme").nbytes == len(LARGE)
    reading.go_on.set()
    desk.wait(lambda: len(desk.events) == 2)
    assert desk.store.has(name(LARGE))
    assert len(reading.begun) == 1  # hashed once
    assert desk.service._uploads.of("acme").nbytes == 0


def test_whoever_asks_again_meanwhile_is_answered_when_it_is_done(desk: Desk, reading: Reading) -> None:
    digest, half = name(LARGE), len(LARGE) // 2
    assert desk.upload(LARGE) is None
    until(lambda: reading.begun)
    assert desk.ask(BlobChunk(digest=digest, offset=half), LARGE[half:]) is None
    again = desk.ask(BlobChunk(digest=digest, offset=0), LARGE[:half])  # late, and answered before
    assert again == BlobOffset(digest=digest, offset=len(LARGE))
    assert desk.ask(BlobBegin(digest=digest, nbytes=len(LARGE))) is None
    reading.go_on.set()
    desk.wait(desk.answers)
    (answer,) = desk.answers()
    assert answer.message == BlobOffset(digest=digest, offset=len(LARGE), complete=True)


def test_a_tenants_large_uploads_are_verified_one_after_another_and_nobody_elses_wait(
    desk: Desk, reading: Reading
) -> None:
    for data in (LARGE, LARGER):
        desk.upload(data, tenant="acme")
    desk.upload(LARGE, tenant="rival")
    until(lambda: len(reading.begun) == 2)
    assert sorted(path.parents[1].name for path in reading.begun) == ["acme", "rival"]
    reading.go_on.set()
    desk.wait(lambda: len(desk.events) == 3)


def test_a_large_upload_with_wrong_bytes_is_refused(desk: Desk, reading: Reading) -> None:
    reading.go_on.set()
    desk.ask(BlobBegin(digest=name(LARGER), nbytes=len(LARGE)), tenant="acme")
    desk.ask(BlobChunk(digest=name(LARGER), offset=0), LARGE, tenant="acme")
    desk.wait(desk.answers)
    (answer,) = desk.answers()
    assert isinstance(answer.message, Failure)
    assert answer.message.code is ErrorCode.BAD_DATA
    assert not desk.events
    assert not desk.service._arriving
    assert desk.begin(LARGER, tenant="acme") == 0


def test_work_in_the_background_that_raises_ends_the_process_not_silently_the_work() -> None:
    failed = threading.Event()
    Background(failed.set).do("acme", lambda: 1 // 0)
    assert failed.wait(60)


def test_only_who_uploads_hears_that_there_is_no_room(desk: Desk) -> None:
    desk.core.full = failure(ErrorCode.TOO_LARGE, "full")
    begun = desk.ask(BlobBegin(digest=name(SMALL), nbytes=5), tenant="a")
    read = desk.ask(BlobRead(digest=name(SMALL), offset=0, length=5), tenant="a")
    assert isinstance(begun, Failure)
    assert isinstance(read, Failure)
    assert (begun.code, read.code) == (ErrorCode.TOO_LARGE, ErrorCode.NOT_FOUND)
