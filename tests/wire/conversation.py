"""What a client and one worker of each role say to a master, and hear from it, in bytes: recorded, and said again.

In: peers of a master that runs. Out: steps (who, which socket, sent or received, frames), or the differences between
what was heard then and what is heard now. Never: a guess: what was sent goes out byte for byte, but for ids that the
master gave then and gives otherwise now.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from joynexus.wire import Buffer, Message, Packet, decode, encode
from tests.process.master_process import Peer

RECORDED = Path(__file__).parent / "recorded"
"""A folder for each protocol version: `kinds.bin`, a body of each kind, and `conversation.bin`."""

WAIT_S = 60.0
"""How long something is waited for."""

_ID = re.compile(r"[0-9a-f]{32}")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One message on one socket.

    Attributes:
        awaited: an answer for which the question before it was asked again and again.
    """

    who: str
    bulk: bool
    sent: bool
    frames: tuple[bytes, ...]
    awaited: bool = False


class Speaker:
    """A peer whose conversation is written down."""

    def __init__(self, who: str, peer: Peer, steps: list[Step]) -> None:
        self._who, self._peer, self._steps, self._count = who, peer, steps, 0

    def say(self, message: Message, buffers: Sequence[Buffer] = (), *, bulk: bool = False) -> str:
        """Send a message; return its id."""
        self._count += 1
        id = f"{self._who}{self._count}"
        frames = encode(message, id=id, deadline_ms=60_000, buffers=buffers)
        self._peer.send(frames, bulk=bulk, timeout_s=WAIT_S)
        self._note(bulk, True, frames)
        return id

    def hear(self, *, bulk: bool = False) -> Packet:
        """Take the next message."""
        frames = frames_of(self._peer, bulk=bulk)
        self._note(bulk, False, frames)
        return decode(frames)

    def ask(self, message: Message, buffers: Sequence[Buffer] = (), *, bulk: bool = False) -> Any:
        """Send a message and take its answer."""
        id = self.say(message, buffers, bulk=bulk)
        packet = self.hear(bulk=bulk)
        assert packet.header.re == id, packet
        return packet.message

    def ask_until(self, message: Message, done: Callable[[Any], bool]) -> Any:
        """Ask until the answer is what one waits for; the questions before count as not asked."""
        deadline = time.monotonic() + WAIT_S
        while True:
            written, answer = len(self._steps), self.ask(message)
            if done(answer):
                self._steps[-1] = msgspec.structs.replace(self._steps[-1], awaited=True)
                return answer
            assert time.monotonic() < deadline, answer
            del self._steps[written:]

    def _note(self, bulk: bool, sent: bool, frames: Sequence[Buffer]) -> None:
        kept = tuple(bytes(frame) for frame in frames)
        self._steps.append(Step(who=self._who, bulk=bulk, sent=sent, frames=kept))


def frames_of(peer: Peer, *, bulk: bool) -> list[bytes]:
    """Take the next message as it is."""
    source = peer.bulk if bulk else peer.control
    assert source.poll(int(1000 * WAIT_S)), "nothing came"
    return source.recv_multipart()


def replay(steps: Sequence[Step], peers: Mapping[str, Peer]) -> Iterator[str]:
    """Say again what was said, and tell in which ways what is heard is not what an old side understands."""
    now: dict[str, str] = {}  # ids: then, and now
    for number, step in enumerate(steps):
        peer = peers[step.who]
        if step.sent:
            peer.send([_renamed(frame, now) for frame in step.frames], bulk=step.bulk, timeout_s=WAIT_S)
            continue
        frames = frames_of(peer, bulk=step.bulk)
        then, new = _parts(step.frames), _parts(frames)
        deadline = time.monotonic() + WAIT_S
        while step.awaited and _state(new) != _state(then) and time.monotonic() < deadline:
            peer.send([_renamed(frame, now) for frame in steps[number - 1].frames])
            frames = frames_of(peer, bulk=False)
            new = _parts(frames)
        where = f"step {number}, {step.who} hears '{then[0]['kind']}'"
        if new[0]["kind"] != then[0]["kind"]:
            yield f"{where}: now it is '{new[0]['kind']}': {new[1]}"
            return  # what follows would be said to somebody else
        if frames[0] != step.frames[0] or len(frames) != len(step.frames):
            yield f"{where}: other frames"
        for part, before, after in zip(("header", "body"), then, new, strict=True):
            yield from (f"{where}: {part}{why}" for why in differences(before, after, now))


def differences(then: Any, now: Any, ids: dict[str, str], path: str = "") -> Iterator[str]:
    """Tell what an old side misses in a value: fields, types, and words that are no ids; note the ids.

    Fields that are new are skipped by an old side. A number may be left out: then it is the old side's default.
    """
    if isinstance(then, dict):
        for key, value in then.items():
            if not isinstance(now, dict):
                yield f"{path} is no map any more"
            elif key in now:
                yield from differences(value, now[key], ids, f"{path}.{key}")
            elif not isinstance(value, int | float):
                yield f"{path}.{key} is gone"
    elif isinstance(then, list):
        if not isinstance(now, list) or len(now) < len(then):
            yield f"{path} is no list of {len(then)} any more"
        else:
            for index, value in enumerate(then):
                yield from differences(value, now[index], ids, f"{path}.{index}")
    elif isinstance(then, str) and isinstance(now, str) and _ID.fullmatch(then) and _ID.fullmatch(now):
        ids[then] = now
    elif type(then) is not type(now) and not (isinstance(then, int | float) and isinstance(now, int | float)):
        yield f"{path} was {then!r} and is {now!r}"


def _parts(frames: Sequence[bytes]) -> tuple[Any, Any]:
    """Header and body as any MessagePack library reads them."""
    return msgpack.unpackb(frames[1]), msgpack.unpackb(frames[2])


def _state(parts: tuple[Any, Any]) -> object:
    return parts[1].get("state")


def _renamed(frame: bytes, ids: Mapping[str, str]) -> bytes:
    for then, now in ids.items():
        frame = frame.replace(then.encode(), now.encode())  # of one length, so the frame stays MessagePack
    return frame


def kinds(protocol: int) -> dict[str, bytes]:
    """Return the bodies that were recorded with a version of the protocol, by kind."""
    path = RECORDED / str(protocol) / "kinds.bin"
    return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, bytes]) if path.exists() else {}


def load(protocol: int) -> list[Step]:
    """Return the conversation that was recorded with a version of the protocol."""
    return msgspec.msgpack.decode((RECORDED / str(protocol) / "conversation.bin").read_bytes(), type=list[Step])
