"""Every kind of every protocol version that is still spoken is read without losing anything."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from joynexus.wire import decode_body, limits
from joynexus.wire.frames import Header
from joynexus.wire.messages import KINDS
from tests.wire.conversation import differences, kinds

SPOKEN = range(limits.PROTOCOL_MIN, limits.PROTOCOL + 1)


def read(kind: str, body: bytes) -> list[str]:
    """Read a body with today's code; return what is lost of it."""
    message = decode_body(Header(kind=kind, id="x"), body)
    again: Any = msgpack.unpackb(msgspec.msgpack.encode(message))
    return list(differences(msgpack.unpackb(body), again, {}))


@pytest.mark.parametrize("protocol", SPOKEN)
def test_every_kind_that_was_released_is_read_without_losing_anything(protocol: int) -> None:
    recorded = kinds(protocol)
    assert recorded.keys() <= KINDS.keys(), "a kind that is still spoken is gone"
    lost = {kind: lost for kind, body in recorded.items() if (lost := read(kind, body))}
    assert not lost, f"released sides say more than is read, see CONTRIBUTING.md: {lost}"


def test_every_kind_of_today_is_recorded() -> None:
    missing = KINDS.keys() - kinds(limits.PROTOCOL).keys()
    assert not missing, (
        f"run `python -m tests.wire.record` (before the release of protocol {limits.PROTOCOL}): {missing}"
    )
