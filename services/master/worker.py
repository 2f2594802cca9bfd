"""A worker as the master knows it.

In: nothing but what the roster notes. Out: its state. Never: a decision.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from joynexus.wire import Buffer, Message
from joynexus.wire.back import Register
from services.master.events import Peer


class Given(msgspec.Struct):
    """A piece of work that a worker has, since when."""

    attempt: int
    message: Message
    buffers: tuple[Buffer, ...]
    since: float
    sent_as: str = ""


class Worker(msgspec.Struct, eq=False):
    """One incarnation of a worker process.

    Attributes:
        since: when its process began, as it says; when it registered, until it has said so.
        phase: as it said last.
        leaving: it finishes what it has and gets nothing new.
        told_to_leave: an operator wants it to end; it hears so with each beat.
        ring: set for one that asks for its work (`hosted.py`): called when what it is `given` has changed.
        quarantine: why it gets no more work, until it is restarted; empty if it does.
    """

    name: str
    key_name: str
    peer: Peer
    register: Register
    since: float
    heard: float
    progress: int = 0
    phase: str = "starting"
    busy_s: float = 0.0
    detail: dict[str, str] = {}
    leaving: bool = False
    told_to_leave: bool = False
    alive: bool = True
    quarantine: str = ""
    given: dict[str, Given] = {}
    cancelled: list[str] = []
    ring: Callable[[], object] | None = None

    @property
    def role(self) -> str:
        """Its role."""
        return self.register.role

    @property
    def state(self) -> str:
        """Its phase as others see it."""
        if not self.alive:
            return "lost"
        if self.quarantine:
            return "quarantined"
        return "draining" if self.leaving else self.phase
