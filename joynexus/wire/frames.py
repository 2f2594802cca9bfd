"""One way in, one way out: messages to frames and frames to messages.

    magic | header | body | buffer 0 | buffer 1 | ...

In: a typed message and its buffers, or the frames of one multipart. Out: the other. Never: I/O, or a decode of
anything whose sizes were not checked first. Decoding is typed (msgspec): a bomb of empty maps is refused while it is
read instead of being built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from joynexus.unreadable import UNREADABLE
from joynexus.wire import limits
from joynexus.wire.arrays import Buffer
from joynexus.wire.errors import WireError
from joynexus.wire.messages import KINDS, Message, kind_of


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Second frame of every message.

    Attributes:
        kind: name of the message type; picks the type of the body.
        id: id of this message, chosen by its sender (at most 64 characters).
        re: id of the message that this one answers; empty if it answers none.
        deadline_ms: milliseconds that remain for an answer, re-stamped at each hop; 0 means none.
        sizes: byte length of each buffer.
    """

    kind: str
    id: str
    re: str = ""
    deadline_ms: int = 0
    sizes: tuple[int, ...] = ()


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded message with its header and its undecoded buffers."""

    header: Header
    message: Message
    buffers: tuple[Buffer, ...] = ()


_SHOWN = 200
"""Characters of a decoder's complaint that are shown of its beginning, and of its end, where it says in which field."""

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(type_) for kind, type_ in KINDS.items()
}


def encode(
    message: Message, *, id: str, re: str = "", deadline_ms: int = 0, buffers: Sequence[Buffer] = ()
) -> list[Buffer]:
    """Turn a message into frames.

    Raises:
        ValueError: if a part exceeds the limits that the receiver enforces.
    """
    sizes = tuple(memoryview(buffer).nbytes for buffer in buffers)
    if len(sizes) > limits.MAX_BUFFERS:
        raise ValueError(f"a message carries at most {limits.MAX_BUFFERS} buffers, this one has {len(sizes)}")
    if (largest := max(sizes, default=0)) > limits.MAX_CONTROL_FRAME_BYTES:  # who receives more hangs up unasked
        raise ValueError(
            f"an array of a message has at most {limits.MAX_CONTROL_FRAME_BYTES} bytes, this one has {largest}: send "
            "fewer rows or smaller pictures at a time"
        )
    header = _encoder.encode(Header(kind=kind_of(message), id=id, re=re, deadline_ms=deadline_ms, sizes=sizes))
    body = _encoder.encode(message)
    if len(body) > limits.MAX_BODY_BYTES:
        raise ValueError(f"a message body has at most {limits.MAX_BODY_BYTES} bytes, this one has {len(body)}")
    if len(header) > limits.MAX_HEADER_BYTES:
        raise ValueError(f"a message header has at most {limits.MAX_HEADER_BYTES} bytes, this one has {len(header)}")
    return [limits.MAGIC, header, body, *buffers]


def decode_header(frames: Sequence[Buffer]) -> Header:
    """Check magic, sizes and counts of a multipart and decode its header, and nothing else.

    Raises:
        WireError: if the frames are not a message of this protocol.
    """
    if len(frames) < 3:
        raise WireError(f"a message has at least 3 frames, this one has {len(frames)}")
    if len(frames) > 3 + limits.MAX_BUFFERS:
        raise WireError(f"a message has at most {3 + limits.MAX_BUFFERS} frames, this one has {len(frames)}")
    if bytes(memoryview(frames[0])[:8]) != limits.MAGIC:
        raise WireError("the first frame is not the protocol's magic; is this a JoyNexus client of the same version?")
    if memoryview(frames[1]).nbytes > limits.MAX_HEADER_BYTES:
        raise WireError("the header frame is too large")
    if memoryview(frames[2]).nbytes > limits.MAX_BODY_BYTES:
        raise WireError("the body frame is too large")
    try:
        header = _header_decoder.decode(frames[1])
    except UNREADABLE as error:
        raise WireError(f"the header cannot be read: {_brief(error)}") from error
    if len(header.id) > 64 or len(header.re) > 64:
        raise WireError("message ids have at most 64 characters")
    if len(header.sizes) != len(frames) - 3:
        raise WireError(f"the header announces {len(header.sizes)} buffers, the message has {len(frames) - 3}")
    for size, frame in zip(header.sizes, frames[3:], strict=True):
        if memoryview(frame).nbytes != size:
            raise WireError(f"the header announces a buffer of {size} bytes, its frame has {memoryview(frame).nbytes}")
    return header


def decode_body(header: Header, body: Buffer) -> Message:
    """Decode the body of a message whose header was checked.

    Raises:
        WireError: if the kind is unknown or the body is not of its type.
    """
    decoder = _body_decoders.get(header.kind)
    if decoder is None:
        raise WireError(f"message kind {header.kind[:40]!r} is unknown")
    try:
        message: Message = decoder.decode(body)
    except UNREADABLE as error:
        raise WireError(f"the body of {header.kind!r} cannot be read: {_brief(error)}") from error
    return message


def _brief(error: Exception) -> str:
    """Say what is wrong without all of the value that is wrong, which may be as large as a message."""
    text = str(error)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}"


def decode(frames: Sequence[Buffer]) -> Packet:
    """Turn the frames of one multipart (without routing id) into a packet.

    Raises:
        WireError: if they are not a message of this protocol.
    """
    header = decode_header(frames)
    return Packet(header=header, message=decode_body(header, frames[2]), buffers=tuple(frames[3:]))


def join(parts: Sequence[Buffer]) -> bytes:
    """Concatenate byte strings so that `split` finds them again: how a message's payload becomes one blob or row."""
    sizes = [memoryview(part).nbytes for part in parts]
    head = _encoder.encode(sizes)
    return b"".join([len(head).to_bytes(4, "little"), head, *parts])


def split(data: Buffer) -> list[memoryview]:
    """Undo `join`, without a copy.

    Raises:
        WireError: if the bytes were not made by `join`.
    """
    view = memoryview(data)
    head_end = 4 + int.from_bytes(view[:4], "little") if view.nbytes >= 4 else 1 << 62
    if head_end > view.nbytes or head_end > limits.MAX_HEADER_BYTES:
        raise WireError("a joined payload is truncated")
    try:
        sizes = msgspec.msgpack.decode(view[4:head_end], type=list[int])
    except UNREADABLE as error:
        raise WireError(f"a joined payload cannot be read: {error}") from error
    if any(size < 0 for size in sizes) or head_end + sum(sizes) != view.nbytes:
        raise WireError("a joined payload is truncated")
    parts, start = [], head_end
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts
