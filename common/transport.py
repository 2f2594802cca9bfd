"""The master's side of the transport: ROUTER sockets, and who may connect to them.

In: addresses, server key pairs, the key registry. Out: bound ROUTERs whose messages carry the authenticated public key
(`peer_key`). Never: an identity taken from a message, a send that waits, a routing id that a peer chose.
"""

from __future__ import annotations

import logging

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.failpoints import failpoint
from common.refusals import Refusals, name_of
from joynexus.keys import Domain, KeyPair, KeyRegistry
from joynexus.transport import Context, Socket, common_options


def bind_router(context: Context, address: str, server_keys: KeyPair, domain: Domain, *, bulk: bool) -> Socket:
    """Bind a ROUTER on which only keys of `domain` are let in.

    Start the `Authenticator` of the same context first: without it nobody is.

    Raises:
        ValueError: if the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    common_options(socket, bulk=bulk)
    # Without MANDATORY, messages to a peer that is gone or full would vanish silently. With HANDOVER, a second peer
    # could take over another's id and get its replies.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, server_keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"cannot listen at '{address}': {error}; is another master running there?") from error
    return socket


def bound_address(socket: Socket) -> str:
    """Return where a socket listens: the real port after binding to `tcp://127.0.0.1:*`."""
    address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return address


def peer_key(frame: zmq.Frame) -> str:
    """Return the public key (Z85) with which the sender of a received frame was authenticated."""
    return str(frame["User-Id"])


class _Door:
    """Says which keys one domain lets in. pyzmq calls it for every handshake."""

    def __init__(self, registry: KeyRegistry, domain: Domain, refusals: Refusals) -> None:
        self._registry = registry
        self._domain = domain
        self._refusals = refusals
        self._damage = Refusals("registry_unreadable")

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            failpoint("master.let_in")
            entry = self._registry.lookup(key.decode("ascii"))
        except (OSError, ValueError) as error:  # a damaged registry lets nobody in, and the next handshake tries again
            self._damage.note("damaged", "all", str(error))
            entry = None
        if entry is not None and entry.domain == self._domain:
            return True
        why = "nobody knows it" if entry is None else f"it is a {entry.domain}'s, and this is a {self._domain}s' door"
        self._refusals.note("handshake", name_of(entry, key.decode(errors="replace")), why)
        return False


class Authenticator:
    """Answer the handshakes of one context from the key registry, in a thread of its own."""

    def __init__(self, context: Context, registry: KeyRegistry) -> None:
        self._zap = ThreadAuthenticator(context, log=logging.getLogger("zmq.auth"))
        self._refusals = Refusals("key_refused")
        self._doors = [_Door(registry, "tenant", self._refusals), _Door(registry, "worker", self._refusals)]
        self._zap.start()
        for door in self._doors:
            self._zap.configure_curve_callback(domain=door._domain, credentials_provider=door)

    @property
    def refused(self) -> int:
        """Handshakes refused so far."""
        return self._refusals.counts.total()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; without it nobody new is let in, ever."""
        return self._zap.is_alive()

    def stop(self) -> None:
        """Stop the thread; nobody is let in any more."""
        self._zap.stop()
