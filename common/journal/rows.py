"""What stands in a row: a record in MessagePack, and behind it a checksum, so that no changed bit passes for a fact.

In: records; the bytes of a row. Out: bytes; records. Never: a record that is not exactly the one that was written.
"""

from __future__ import annotations

import zlib

import msgspec

from common.journal import records as r
from joynexus.unreadable import UNREADABLE

_CHECKSUM_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


def write(record: r.Base) -> bytes:
    """Return a record as it stands in its row."""
    return seal(_encode(record))


class Reader(msgspec.Struct, frozen=True):
    """Reads the rows of one kind of record."""

    decoder: msgspec.msgpack.Decoder[r.Base]
    key: tuple[str, ...]

    @staticmethod
    def of(kind: type[r.Base]) -> Reader:
        """Return the reader of a kind."""
        return Reader(msgspec.msgpack.Decoder(kind), r.KEYS[kind])

    def read(self, key: tuple[object, ...], data: object) -> r.Base:
        """Return the record in the row with this key.

        Raises:
            ValueError: why it is not the one that was written there, in a clause.
        """
        record = self.decode(data)
        if key != tuple(getattr(record, field) for field in self.key):
            raise ValueError("it belongs to another row")
        return record

    def decode(self, data: object) -> r.Base:
        """Return the record in a row, whatever its key says.

        Raises:
            ValueError: why it is none that was written, in a clause.
        """
        try:
            return self.decoder.decode(unseal(data))
        except UNREADABLE as error:
            raise ValueError(f"it is not what this release writes: {error}") from error


def seal(data: bytes) -> bytes:
    """Return bytes with their checksum (CRC-32, little-endian) behind them."""
    return data + zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little")


def unseal(sealed: object) -> bytes:
    """Return the bytes without their checksum.

    Raises:
        ValueError: if they are not those that were sealed, in a clause.
    """
    if not isinstance(sealed, bytes):
        raise ValueError("there are no bytes in its place")
    data = sealed[:-_CHECKSUM_BYTES]
    if seal(data) != sealed:
        raise ValueError("its checksum does not fit")
    return data
