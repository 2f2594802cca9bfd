"""Promises of the trainer's blobs: what the disk holds is what is seen, and what it says names no path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.blobs import BlobStore
from joynexus.wire.errors import JoyNexusError
from services.trainer.blobs import Blobs, Unreachable


def forbidden(*_: object) -> Path:
    raise PermissionError(13, "Permission denied", "/srv/blobs/secret")


def full(*_: object) -> tuple[str, int]:
    raise OSError(28, "No space left on device", "/srv/blobs/secret")


@pytest.mark.parametrize("look", [Blobs.path, Blobs.read, Blobs.view], ids=["path", "read", "view"])
def test_a_blob_that_cannot_be_had_is_told_without_the_services_paths(
    tmp_path: Path, look: Callable[[Blobs, str], object]
) -> None:
    blobs = Blobs(forbidden, full, tmp_path / "scratch")
    with pytest.raises(Unreachable, match=r"blob abc cannot be had: Permission denied$"):
        look(blobs, "abc")
    gone = Blobs(lambda digest: tmp_path / digest, full, tmp_path / "scratch")
    if look is not Blobs.path:
        with pytest.raises(Unreachable, match=r"blob abc cannot be read: No such file or directory$"):
            look(gone, "abc")


def test_a_full_disk_is_told_without_the_services_paths_and_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    blobs = Blobs(forbidden, full, scratch)
    with pytest.raises(JoyNexusError, match=r"takes no file now \(No space left on device\)"):
        blobs.put(lambda path: path.write_bytes(b"x"))
    assert not [path for path in scratch.rglob("*") if path.is_file() and path.read_bytes() == b"x"]


@pytest.mark.parametrize("content", [b"", b"some bytes"])
def test_a_view_shows_the_blob_also_when_its_file_is_gone(tmp_path: Path, content: bytes) -> None:
    store = BlobStore(tmp_path / "blobs")
    digest = store.put_bytes(content)
    view = Blobs(store.path, full, tmp_path / "scratch").view(digest)
    store.path(digest).unlink()
    assert bytes(view) == content
