"""The master's four sockets, and the three things that are done with them: open, receive, send.

In: settings and keys; frames. Out: sockets, by door; frames with their sender. Never: a wait: what a peer does not take
now is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import zmq

from common.refusals import Refusals
from common.settings import MasterSettings
from common.telemetry import get_logger
from common.transport import bind_router, bound_address, peer_key
from joynexus.keyring import Keyring
from joynexus.keys import Domain, KeyEntry, KeyRegistry
from joynexus.transport import Context, Socket, receive_frames, send_frames
from joynexus.wire import Buffer
from services.master.events import Door, Peer
from services.master.unread import Unread

log = get_logger(__name__)

_damage = Refusals("registry_unreadable")  # each message of each peer meets it


def open_doors(context: Context, settings: MasterSettings) -> dict[Door, Socket]:
    """Bind the four ROUTERs.

    Raises:
        ValueError: if a key is missing or an address cannot be bound.
    """
    keyring = Keyring(settings.keys_dir)
    front, back = keyring.server_keys("front"), keyring.server_keys("back")
    doors: dict[Door, Socket] = {}
    plan: tuple[tuple[Door, str, Domain, bool], ...] = (
        ("front", settings.front_control, "tenant", False),
        ("front_bulk", settings.front_bulk, "tenant", True),
        ("back", settings.back_control, "worker", False),
        ("back_bulk", settings.back_bulk, "worker", True),
    )
    try:
        for door, address, domain, bulk in plan:
            doors[door] = bind_router(context, address, front if domain == "tenant" else back, domain, bulk=bulk)
    except ValueError:
        for opened in doors.values():
            opened.close(0)
        raise
    log.info("listening", **{door: bound_address(opened) for door, opened in doors.items()})
    return doors


def receive(
    door_socket: Socket, door: Door, *, at_once: int, heard: Callable[[Door, Sequence[zmq.Frame]], None]
) -> Iterator[tuple[Peer, list[Buffer], str]]:
    """Take messages that have come, at most `at_once`: the sender, its frames, its authenticated key.

    `heard` is told of each.

    Buffers are views of the received frames, without a copy.
    """
    for _ in range(at_once):
        try:
            frames = receive_frames(door_socket)
        except zmq.Again:
            return
        heard(door, frames)
        yield Peer(door, frames[0].bytes), [frame.buffer for frame in frames[1:]], peer_key(frames[-1])


def send(door_socket: Socket, peer: Peer, frames: Sequence[Buffer], unread: Unread | None = None) -> bool:
    """Send frames to a peer; return False if it is gone, takes nothing now, or has too much unread."""
    if unread is not None and not unread.may_send(peer):
        return False
    nbytes = sum(memoryview(frame).nbytes for frame in frames)
    marked = unread is not None and unread.wants_mark(peer, nbytes)
    try:
        mark = send_frames(door_socket, [peer.routing_id, *frames], mark=marked)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    if unread is not None:
        unread.sent(peer, nbytes, mark)
    return True


def look_up(registry: KeyRegistry, key: str) -> KeyEntry | None:
    """Return what a key stands for now; nobody, while the registry is damaged."""
    try:
        return registry.lookup(key)
    except ValueError as error:
        _damage.note("damaged", "all", str(error))
        return None
