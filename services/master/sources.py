"""What the core may look up while it decides: inline payloads in the journal, manifests among the blobs.

In: names and digests. Out: bytes and decoded manifests. Never: anything that changes once it is written.
"""

from __future__ import annotations

from functools import lru_cache

import blake3
import msgspec

from common.blobs import BlobStore
from common.journal.journal import Journal
from joynexus.datasets import DatasetManifest
from joynexus.unreadable import UNREADABLE


class ShellSources:
    """The core's `Sources`, from disk."""

    def __init__(self, journal: Journal, store: BlobStore) -> None:
        self._journal = journal
        self._store = store
        self._manifest = lru_cache(maxsize=64)(self._read_manifest)

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        """Return the inline payload of a journaled op; KeyError if there is none, OSError if it cannot be read."""
        return self._journal.payload(tenant, policy, seq)

    def manifest(self, digest: str) -> DatasetManifest:
        """Return the manifest in a blob.

        Raises:
            KeyError: if there is no such blob.
            ValueError: if it is no manifest, or damaged.
            OSError: if it cannot be read.
        """
        return self._manifest(digest)

    def _read_manifest(self, digest: str) -> DatasetManifest:
        data = self._store.path(digest).read_bytes()
        if blake3.blake3(data).hexdigest() != digest:
            raise ValueError(f"blob {digest} is damaged: its bytes are not those that were stored")
        try:
            return msgspec.msgpack.decode(data, type=DatasetManifest)
        except UNREADABLE as error:
            raise ValueError(f"blob {digest} is no data set manifest: {error}") from error
