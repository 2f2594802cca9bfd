"""Unfinished uploads: how far each came, and what all of a tenant's take.

In: announcements, chunks. Out: offsets. Never: one tenant's upload in another's folder, more of a tenant's than there
may be, or a search through them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from common.blobs import BlobStore
from joynexus.wire import Buffer


class Upload(msgspec.Struct):
    """An upload that is under way.

    Attributes:
        offset: bytes that are here.
        nbytes: bytes in all, as announced.
        touched: when it was last gone on with, in seconds that never jump.
        begun: announced since the start of this process; else `nbytes` is what was found.
    """

    offset: int
    nbytes: int
    touched: float
    begun: bool = True


class AllUploads:
    """Everybody's uploads: a tenant's grow in a folder of its own, workers' in the common store.

    Args:
        store: the common store.
        folder: of the tenants' folders.
        most: how many one tenant may have.
    """

    def __init__(self, store: BlobStore, folder: Path, *, most: int) -> None:
        self._store = store
        self._folder = folder
        self._most = most
        self._uploads: dict[str, Uploads] = {}

    def of(self, tenant: str) -> Uploads:
        """Return a tenant's uploads; workers have no name."""
        uploads = self._uploads.get(tenant)
        if uploads is None:
            area = BlobStore(self._folder / tenant) if tenant else self._store
            most = self._most if tenant else 0
            uploads = self._uploads[tenant] = Uploads(area, most=most, now=time.monotonic())
        return uploads

    def sweep(self, older_than_s: float) -> None:
        """Remove what nobody has gone on with for so long, also from before a restart."""
        tenants = [folder.name for folder in self._folder.iterdir()] if self._folder.is_dir() else []
        for tenant in ("", *tenants):
            uploads = self.of(tenant)
            uploads.give_up_before(time.monotonic() - older_than_s)
            uploads.area.sweep(older_than_s)


class Uploads:
    """One tenant's uploads, or all workers'.

    Args:
        area: where they grow; what is there already counts too.
        most: how many there may be; with one more, the one left alone for longest is given up, first of those of which
            nothing came yet. 0: any number.
        now: seconds that never jump.

    Attributes:
        area: where they grow.
        nbytes: what all of them will take.
    """

    def __init__(self, area: BlobStore, *, most: int, now: float) -> None:
        self.area = area
        self.nbytes = 0
        self._most = most
        self._uploads: OrderedDict[str, Upload] = OrderedDict()  # the one that was gone on with longest ago first
        self._empty: OrderedDict[str, None] = OrderedDict()  # those of which nothing came yet, likewise
        for digest, nbytes in area.partial():
            self._put(digest, Upload(nbytes, nbytes, now, begun=False))

    def __len__(self) -> int:
        return len(self._uploads)

    def others(self, digest: str) -> int:
        """Return what all but this one will take."""
        mine = self._uploads.get(digest)
        return self.nbytes - (mine.nbytes if mine is not None else 0)

    def begin(self, digest: str, nbytes: int, now: float) -> int:
        """Announce an upload; returns and raises like `BlobStore.begin`."""
        offset = self.area.begin(digest, nbytes)
        self._put(digest, Upload(offset, nbytes, now))
        if self._most and len(self._uploads) > self._most:
            self._give_up(next(iter(self._empty if len(self._empty) > 1 else self._uploads)))
        return offset

    def append(self, digest: str, offset: int, data: Buffer, now: float) -> Upload:
        """Take a chunk; one behind a hole is left out, and the upload returned says where to go on.

        Raises:
            ValueError: if the upload was not begun here, or as `BlobStore.append`.
            BlobStoreFullError: as `BlobStore.append`.
        """
        upload = self._uploads.get(digest)
        if upload is None or not upload.begun:
            raise ValueError(f"the upload of blob {digest} was not begun here: begin it to learn how far it came")
        if offset <= upload.offset:
            upload.offset = self.area.append(digest, offset, data)
            upload.touched = now
            self._uploads.move_to_end(digest)
            self._empty.pop(digest, None)
        return upload

    def end(self, digest: str) -> None:
        """An upload is complete; its file goes on without this account."""
        upload = self._uploads.pop(digest, None)
        self._empty.pop(digest, None)
        if upload is not None:
            self.nbytes -= upload.nbytes

    def give_up_before(self, then: float) -> None:
        """Give up the uploads that were not gone on with since then."""
        while self._uploads:
            digest, upload = next(iter(self._uploads.items()))
            if upload.touched >= then:
                return
            self._give_up(digest)

    def _put(self, digest: str, upload: Upload) -> None:
        self.end(digest)
        self._uploads[digest] = upload
        if not upload.offset:
            self._empty[digest] = None
        self.nbytes += upload.nbytes

    def _give_up(self, digest: str) -> None:
        self.end(digest)
        self.area.abandon(digest)
