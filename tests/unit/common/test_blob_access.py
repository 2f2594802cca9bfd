"""A worker's blobs are what their names say, also on a disk that others write to, and are read for that once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from common import blob_access
from common.blob_access import BlobAccess
from common.blobs import BlobStore, digest_file
from common.progress import Progress
from joynexus.wire import Buffer, ErrorCode, JoyNexusError, Message, Packet, decode, encode
from joynexus.wire.front import BlobData, BlobRead

DATA = bytes(range(256)) * 20


class Master:
    """Gives out what is in its store."""

    def __init__(self, folder: Path) -> None:
        self.store = BlobStore(folder)
        self.asked = 0

    def ask(self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Future[Packet]:
        assert isinstance(message, BlobRead)
        self.asked += 1
        data = self.store.read(message.digest, message.offset, message.length)
        answer = BlobData(digest=message.digest, offset=message.offset, nbytes=self.store.size(message.digest))
        future: Future[Packet] = Future()
        future.set_result(decode(encode(answer, id="a", buffers=(data,))))
        return future


@pytest.fixture
def master(tmp_path: Path) -> Master:
    return Master(tmp_path / "master")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    monkeypatch.setattr(blob_access, "digest_file", lambda path, moved: (hashed.append(path), digest_file(path))[1])
    return hashed


def access(master: Master, folder: Path, *, shared: bool) -> BlobAccess:
    return BlobAccess(
        master.ask,
        Progress(),
        shared=master.store._root if shared else None,
        cache=folder / "cache",
        cache_budget_bytes=1 << 30,
    )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_blob_on_the_shared_disk_is_read_for_its_hash_once(
    master: Master, tmp_path: Path, hashed: list[Path]
) -> None:
    digest = master.store.put_bytes(DATA)
    blobs = access(master, tmp_path, shared=True)
    for _ in range(3):
        assert blobs.read(digest) == DATA
    assert hashed == [master.store.path(digest)]
    os.utime(master.store.path(digest), (1, 1))  # somebody did something to it
    assert blobs.read(digest) == DATA
    assert len(hashed) == 2


def test_a_flipped_bit_on_the_shared_disk_is_never_handed_out(master: Master, tmp_path: Path) -> None:
    digest = master.store.put_bytes(DATA)
    blobs = access(master, tmp_path, shared=True)
    assert blobs.read(digest) == DATA
    flip_a_bit(master.store.path(digest))
    os.utime(master.store.path(digest), (1, 1))
    for _ in range(2):
        with pytest.raises(JoyNexusError, match="is damaged on the shared disk") as refused:
            blobs.fetch(digest)
        assert refused.value.code is ErrorCode.BAD_DATA
        assert str(tmp_path) not in str(refused.value)
    master.store.path(digest).write_bytes(DATA)
    assert blobs.read(digest) == DATA


def test_a_damaged_blob_in_the_cache_is_fetched_again(master: Master, tmp_path: Path, hashed: list[Path]) -> None:
    digest = master.store.put_bytes(DATA)
    blobs = access(master, tmp_path, shared=False)
    for _ in range(3):
        path = blobs.fetch(digest)
    assert master.asked == 1
    assert not hashed  # it was verified as it came
    flip_a_bit(path)
    later = access(master, tmp_path, shared=False)  # after a restart
    for _ in range(3):
        assert later.read(digest) == DATA
    assert master.asked == 2
    assert len(hashed) == 1
