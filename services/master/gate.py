"""May this message come in? The checks between a socket and the core, in the order that costs an attacker most.

In: the frames of one multipart, the door it came through, what its authenticated key stands for. Out: an event for the
core, a request for blobs, or the failure to answer with. Never: a body that is decoded before sizes, kind and rights
were checked, or an identity taken from a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from joynexus.keys import KeyEntry
from joynexus.wire import (
    Buffer,
    ErrorCode,
    Failure,
    Header,
    Message,
    WireError,
    decode_body,
    decode_header,
    failure,
)
from joynexus.wire.front import BlobBegin, BlobChunk, BlobRead
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS, KINDS, scope_allows
from services.master.events import BackMessage, Door, FrontMessage, Peer

MAX_MESSAGE_BYTES = 64 * 1024**2
"""All frames of one message together: 64 rows with two pictures of 384 x 384 fit."""

BlobRequest = BlobBegin | BlobChunk | BlobRead


class BlobMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants to read or write a blob; `tenant` is empty for a worker."""

    peer: Peer
    tenant: str
    header: Header
    message: BlobRequest
    buffers: tuple[Buffer, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The message is refused.

    Attributes:
        re: id of the refused message, if it could be read.
        reason: short word, for counting.
    """

    re: str
    reason: str
    failure: Failure


def admit(
    peer: Peer, frames: Sequence[Buffer], entry: KeyEntry | None, *, over: Failure | None = None
) -> FrontMessage | BackMessage | BlobMessage | Refused:
    """Check one multipart (without routing id) and say what it is.

    Args:
        over: its sender asks too often: refuse it with this, under its id, and look no further.
    """
    try:
        header = decode_header(frames)
        if sum(header.sizes) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message has at most {MAX_MESSAGE_BYTES} bytes in all; send large data as blobs")
    except WireError as error:
        return Refused(re="", reason="malformed", failure=failure(ErrorCode.INVALID, str(error)))
    if over is not None:
        return Refused(re=header.id, reason="rate", failure=over)
    objection = _NO_KEY if entry is None else _objection(peer.door, header.kind, entry.domain, entry.scope, entry.roles)
    if objection is not None:
        reason, code, sentence = objection
        return Refused(re=header.id, reason=reason, failure=failure(code, sentence))
    try:
        message = decode_body(header, frames[2])
    except WireError as error:
        return Refused(re=header.id, reason="malformed", failure=failure(ErrorCode.INVALID, str(error)))
    assert entry is not None  # nobody else comes so far
    return _sort(peer, header, message, frames, entry)


Objection = tuple[str, ErrorCode, str]

_NO_KEY: Objection = (
    "key",
    ErrorCode.FORBIDDEN,
    "this key is not valid any more: ask the operator for a new one",
)


@lru_cache(maxsize=1024)
def _objection(door: Door, kind: str, domain: str, scope: str, roles: tuple[str, ...]) -> Objection | None:
    """Say why such a key may not send this kind of message through this door; None if it may."""
    front = door.startswith("front")
    if domain != ("tenant" if front else "worker"):
        return _NO_KEY
    type_ = KINDS.get(kind)
    if type_ is None:
        sentence = f"message kind {kind[:40]!r} is unknown here: is the client newer than the service?"
        return "unknown", ErrorCode.INVALID, sentence
    if front:
        needed = FRONT_REQUESTS.get(type_)
        if needed is None:
            return "scope", ErrorCode.FORBIDDEN, f"'{kind}' is not for tenants"
        if not scope_allows(scope, needed):
            sentence = f"'{kind}' needs a key of scope '{needed}', this one has '{scope}'"
            return "scope", ErrorCode.FORBIDDEN, sentence
    elif not BACK_REQUESTS.get(type_, frozenset()) & frozenset(roles):
        return "role", ErrorCode.FORBIDDEN, f"'{kind}' is not for a worker of role {', '.join(roles)}"
    if issubclass(type_, BlobRequest) is not door.endswith("_bulk"):
        return "door", ErrorCode.INVALID, "blobs travel on the bulk socket, all else on the control one"
    return None


def _sort(
    peer: Peer, header: Header, message: Message, frames: Sequence[Buffer], entry: KeyEntry
) -> FrontMessage | BackMessage | BlobMessage:
    buffers = tuple(frames[3:])
    if isinstance(message, BlobRequest):
        return BlobMessage(peer=peer, tenant=entry.tenant, header=header, message=message, buffers=buffers)
    body = bytes(frames[2])
    if entry.domain == "worker":
        return BackMessage(
            peer=peer,
            key_name=entry.bearer,
            roles=entry.roles,
            header=header,
            message=message,
            body=body,
            buffers=buffers,
        )
    return FrontMessage(
        peer=peer,
        tenant=entry.tenant,
        scope=entry.scope,
        operator=entry.operator,
        key=entry.public,
        header=header,
        message=message,
        body=body,
        buffers=buffers,
    )
