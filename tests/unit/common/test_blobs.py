"""Promises of the blob store: complete or absent, verified, resumable, and no way out of its folder."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import blobs
from common.blobs import BlobStore, BlobStoreFullError, digest_file

DATA = bytes(range(256)) * 40
DIGEST = blake3.blake3(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def leftovers(store: BlobStore) -> list[str]:
    return sorted(path.name for path in (store._root / "partial").iterdir())


def test_bytes_come_back_under_their_own_hash(store: BlobStore) -> None:
    assert store.put_bytes(DATA) == DIGEST
    assert store.put_bytes(DATA) == DIGEST  # again: no change
    assert store.path(DIGEST) == store._root / DIGEST[:2] / DIGEST
    assert store.path(DIGEST).read_bytes() == DATA
    assert store.has(DIGEST)
    assert store.size(DIGEST) == len(DATA)
    assert store.read(DIGEST, 10, 5) == DATA[10:15]
    assert store.read(DIGEST, len(DATA) - 2, 100) == DATA[-2:]
    assert leftovers(store) == []


def test_an_empty_blob_is_a_blob(store: BlobStore) -> None:
    digest = store.put_bytes(b"")
    assert store.size(digest) == 0
    store.delete(digest)
    assert store.begin(digest, 0) == 0
    store.finish(digest)
    assert store.has(digest)


@pytest.mark.parametrize("move", [False, True])
def test_a_file_is_copied_or_given_away(store: BlobStore, tmp_path: Path, move: bool) -> None:
    for _ in range(2):  # the second time the blob is there already
        source = tmp_path / "source"
        source.write_bytes(DATA)
        assert store.put_file(source, move=move) == (DIGEST, len(DATA))
        assert source.exists() is not move
    assert store.path(DIGEST).read_bytes() == DATA
    assert leftovers(store) == []


def test_a_missing_blob_is_named(store: BlobStore) -> None:
    for ask in (store.path, store.size, lambda digest: store.read(digest, 0, 1)):
        with pytest.raises(KeyError, match=f"blob {DIGEST} is not in this store"):
            ask(DIGEST)
    assert not store.has(DIGEST)
    assert store.delete(DIGEST) is False


@pytest.mark.parametrize(
    "bad", ["", "../" + DIGEST[3:], DIGEST.upper(), DIGEST + "0", DIGEST[:-1] + "/", DIGEST + "\n"]
)
def test_only_a_digest_can_name_a_file(store: BlobStore, bad: str) -> None:
    for ask in (store.path, store.has, store.delete, lambda d: store.begin(d, 1), lambda d: store.append(d, 0, b"x")):
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            ask(bad)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(0, 7))
def test_an_upload_in_any_chunks_resumes_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], restart_after: int
) -> None:
    root = tmp_path_factory.mktemp("upload")
    data = DATA[: sum(sizes)]
    digest = blake3.blake3(data).hexdigest()
    store = BlobStore(root)
    offset = store.begin(digest, len(data))
    for number, size in enumerate(sizes):
        if number == restart_after:
            store = BlobStore(root)
            assert store.begin(digest, len(data)) == offset
        offset = store.append(digest, offset, data[offset : offset + size])
    store.finish(digest)
    assert store.path(digest).read_bytes() == data
    assert store.begin(digest, len(data)) == len(data)
    assert leftovers(store) == []


def test_a_repeated_chunk_changes_nothing(store: BlobStore) -> None:
    store.begin(DIGEST, len(DATA))
    assert store.append(DIGEST, 0, DATA[:100]) == 100
    assert store.append(DIGEST, 0, DATA[:100]) == 100
    assert store.append(DIGEST, 100, DATA[100:]) == len(DATA)
    assert store.append(DIGEST, 0, DATA[:100]) == len(DATA)
    store.finish(DIGEST)
    assert store.append(DIGEST, 0, DATA[:100]) == len(DATA)  # after the end too
    store.finish(DIGEST)
    assert store.path(DIGEST).read_bytes() == DATA


def test_chunks_leave_no_hole_and_stay_within_the_announced_length(store: BlobStore) -> None:
    with pytest.raises(ValueError, match="begin it again"):
        store.append(DIGEST, 0, DATA)
    store.begin(DIGEST, len(DATA))
    with pytest.raises(ValueError, match="next missing byte is 0"):
        store.append(DIGEST, 5, b"late")
    with pytest.raises(ValueError, match="past the announced"):
        store.append(DIGEST, 0, DATA + b"more")
    store.append(DIGEST, 0, DATA[:7])
    with pytest.raises(ValueError, match=f"7 of {len(DATA)} bytes"):
        store.finish(DIGEST)
    with pytest.raises(ValueError, match="-1 bytes"):
        store.begin(DIGEST, -1)


def test_wrong_bytes_never_get_the_name(store: BlobStore) -> None:
    store.begin(DIGEST, len(DATA))
    store.append(DIGEST, 0, b"\0" * len(DATA))
    with pytest.raises(ValueError, match=f"not {DIGEST}"):
        store.finish(DIGEST)
    assert not store.has(DIGEST)
    assert leftovers(store) == []
    assert store.begin(DIGEST, len(DATA)) == 0


def test_a_shorter_second_announcement_starts_anew(store: BlobStore) -> None:
    store.begin(DIGEST, len(DATA) + 10)
    store.append(DIGEST, 0, b"\0" * (len(DATA) + 10))
    assert store.begin(DIGEST, len(DATA)) == 0


def test_a_full_disk_leaves_nothing_half_there(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills while a chunk is written: the chunk is undone, the upload goes on later."""
    store.begin(DIGEST, len(DATA))
    store.append(DIGEST, 0, DATA[:100])
    real_open = Path.open

    class HalfWriter:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "HalfWriter":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, offset: int) -> None:
            self.file.seek(offset)

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r": HalfWriter(real_open(path, mode)))
        with pytest.raises(BlobStoreFullError, match="disk is full"):
            store.append(DIGEST, 100, DATA[100:])
        with pytest.raises(BlobStoreFullError, match="disk is full"):
            store.put_bytes(b"another")
    assert leftovers(store) == [DIGEST]
    assert store.begin(DIGEST, len(DATA)) == 100
    store.append(DIGEST, 100, DATA[100:])
    store.finish(DIGEST)
    assert store.has(DIGEST)


def test_an_upload_larger_than_the_disk_is_refused_at_once(store: BlobStore) -> None:
    with pytest.raises(BlobStoreFullError, match="no room"):
        store.begin(DIGEST, 1 << 60)


def test_bytes_are_on_disk_before_the_name_exists(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(blobs.os, "fsync", lambda fd: (order.append("sync"), real_sync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (order.append("rename"), real_replace(a, b))[1])
    store.put_bytes(DATA)
    assert order == ["sync", "sync", "rename", "sync"], "the new folder, the bytes, the name, and that it is there"


def test_sweep_removes_only_stale_uploads(store: BlobStore) -> None:
    other = blake3.blake3(b"other").hexdigest()
    store.begin(DIGEST, len(DATA))
    store.append(DIGEST, 0, DATA[:10])
    store.begin(other, 5)
    store.append(other, 0, b"ot")
    os.utime(store._root / "partial" / DIGEST, (1, 1))
    assert store.sweep() == 0  # the clock may have jumped
    assert store.sweep() == 1
    assert leftovers(store) == [other]
    assert store.begin(DIGEST, len(DATA)) == 0


def test_an_upload_that_goes_on_is_not_swept_though_the_clock_jumps(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.begin(DIGEST, len(DATA))
    store.append(DIGEST, 0, DATA[:10])
    jumped = blobs.time.time() + 7 * 86_400
    monkeypatch.setattr(blobs.time, "time", lambda: jumped)
    assert store.sweep() == 0
    store.append(DIGEST, 10, DATA[10:20])
    os.utime(store._root / "partial" / DIGEST, (2, 2))  # another time, however coarse this file system's are
    assert store.sweep() == 0
    store.append(DIGEST, 20, DATA[20:])
    store.finish(DIGEST)


def test_an_upload_is_finished_into_another_store_hashed_once(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = BlobStore(tmp_path / "common")
    hashed: list[Path] = []
    monkeypatch.setattr(blobs, "digest_file", lambda path: (hashed.append(path), digest_file(path))[1])
    for _ in range(2):  # the second time it is there already
        store.begin(DIGEST, len(DATA))
        store.append(DIGEST, 0, DATA)
        assert list(store.partial()) == [(DIGEST, len(DATA))]
        store.finish(DIGEST, into=common)
        assert common.path(DIGEST).read_bytes() == DATA
        assert not store.has(DIGEST)
        assert leftovers(store) == leftovers(common) == []
    assert len(hashed) == 2


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    assert digest_file(tmp_path / "file") == DIGEST


def test_a_blob_that_was_stored_again_meanwhile_is_not_deleted(store: BlobStore) -> None:
    digest = store.put_bytes(b"same")
    ways: tuple[Callable[[str], object], ...] = (store.touch, lambda _: store.put_bytes(b"same"))
    for again in ways:
        os.utime(store.path(digest), (0, 0))
        stamp = store.stamp(digest)
        again(digest)
        assert store.delete(digest, stamp=stamp) is False
        assert store.has(digest)
    assert store.delete(digest, stamp=store.stamp(digest)) is True
    assert not store.touch(digest)
    assert store.stamp(digest) is None


def test_blobs_that_nobody_touched_are_found_by_folder(store: BlobStore) -> None:
    old, new = store.put_bytes(b"old"), store.put_bytes(b"new")
    os.utime(store.path(old), (0, 0))
    found = [digest for first in range(256) for digest in store.untouched(f"{first:02x}", 60.0)]
    assert found == [old]
    assert new not in found


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 1000])
def test_a_file_is_hashed_part_by_part_and_every_part_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(blobs, "_READ_BYTES", 100)
    path, moves = tmp_path / "file", list[None]()
    path.write_bytes(data := os.urandom(nbytes))
    assert digest_file(path, lambda: moves.append(None)) == blake3.blake3(data).hexdigest()
    assert len(moves) == -(-nbytes // 100)


def test_a_file_that_is_cut_while_it_is_hashed_is_another_file_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_READ_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    assert digest_file(path, lambda: os.truncate(path, 0)) == blake3.blake3(DATA[:1000]).hexdigest()
