"""Blobs, chunk by chunk (bulk socket, both domains)."""

from __future__ import annotations

from joynexus.bounds import Short
from joynexus.wire.base import Wire


class BlobBegin(Wire, frozen=True, kw_only=True):
    """Start or resume an upload (bulk socket). Answer: `BlobOffset`: how much the service has already."""

    digest: Short
    nbytes: int


class BlobChunk(Wire, frozen=True, kw_only=True):
    """One chunk in buffer 0. Answer: `BlobOffset`; at the end the digest is verified."""

    digest: Short
    offset: int


class BlobOffset(Wire, frozen=True, kw_only=True):
    """The service has the first `offset` bytes; `complete` once the digest was verified."""

    digest: str
    offset: int
    complete: bool = False


class BlobRead(Wire, frozen=True, kw_only=True):
    """Read part of a blob (bulk socket). Answer: `BlobData` with the bytes in buffer 0."""

    digest: Short
    offset: int
    length: int


class BlobData(Wire, frozen=True, kw_only=True):
    """Bytes of a blob in buffer 0; `nbytes` is the blob's full size."""

    digest: str
    offset: int
    nbytes: int
