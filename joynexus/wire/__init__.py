"""The wire: what crosses a socket, as types and as bytes. No sockets here."""

from joynexus.wire.arrays import Array, ArrayPacker, Buffer, rebuild
from joynexus.wire.errors import ErrorCode, Failure, JoyNexusError, WireError, failure
from joynexus.wire.frames import Header, Packet, decode, decode_body, decode_header, encode, join, split
from joynexus.wire.messages import Message, kind_of

__all__ = [
    "Array",
    "ArrayPacker",
    "Buffer",
    "ErrorCode",
    "Failure",
    "Header",
    "JoyNexusError",
    "Message",
    "Packet",
    "WireError",
    "decode",
    "decode_body",
    "decode_header",
    "encode",
    "failure",
    "join",
    "kind_of",
    "rebuild",
    "split",
]
