"""The master's core, told whatever messages: well-formed ones of any kind, by anybody, in any order.

In: messages. Out: what it answered. Never: an exception of the core, which a real master would have to outlive.

Each play has a world of its own: a tenant with a policy, a lease, a data set and a job, another tenant, and three
workers that never say anything by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from joynexus.wire import Failure, Header, WireError, decode_body, kind_of
from joynexus.wire.front import SubmitJob
from joynexus.wire.messages import BACK_REQUESTS, FRONT_REQUESTS, KINDS
from services.master.events import BackMessage, FrontMessage
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer
from tests.unit.master.jobs import sft
from tests.unit.master.test_datasets import FILE, ONE
from tests.unit.master.world import World

_MOST = 12
"""Messages of a play."""


class Told(msgspec.Struct, array_like=True):
    """One message: who says it (0, 1: a tenant; 2 to 4: a worker; 5: a worker that has not registered), and what."""

    sender: int
    kind: str
    body: msgspec.Raw
    buffers: tuple[bytes, ...] = ()


_read = msgspec.msgpack.Decoder(Told).decode


def play(parts: Sequence[bytes]) -> str:
    """Tell a new core these messages, let time pass, and begin anew from its journal; return what it answered."""
    messages = []
    for part in parts[:_MOST]:
        try:
            told = _read(part)
            messages.append((told, decode_body(Header(kind=told.kind, id=""), bytes(told.body))))
        except (msgspec.MsgspecError, WireError, RecursionError):
            continue
    if not messages:
        return ""
    world = World()
    world.upload(FILE)
    world.create()
    world.lease()
    world.tell(ONE)
    peers = [kind(world, f"i-{kind.role}", key=kind.role).peer for kind in (FakeTrainer, FakeInference, FakeEnv)]
    peers.append(world.new_peer("back"))
    world.tell(SubmitJob(key="job", spec=sft(steps=3)))
    for number, (told, message) in enumerate(messages):
        header, body = Header(kind=told.kind, id=f"m{number}"), bytes(told.body)
        kind, sender = KINDS[told.kind], told.sender % 6
        if sender < 2 and kind in FRONT_REQUESTS:
            tenant = "ab"[sender]
            world.event(
                FrontMessage(
                    peer=world.client(tenant),
                    tenant=tenant,
                    scope="all",
                    operator=False,
                    header=header,
                    message=message,
                    body=body,
                    buffers=told.buffers,
                )
            )
        elif sender >= 2 and kind in BACK_REQUESTS:
            world.event(
                BackMessage(
                    peer=peers[sender - 2],
                    key_name=f"key-{sender}",
                    roles=tuple(sorted(BACK_REQUESTS[kind])),
                    header=header,
                    message=message,
                    body=body,
                    buffers=told.buffers,
                )
            )
    world.wait(1.0)
    answers = [send.message for sends in world.sent.values() for send in sends if send.re.startswith("m")]
    world.crash()
    return "; ".join(each.message if isinstance(each, Failure) else kind_of(each) for each in answers)
