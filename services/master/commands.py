"""What the master's core wants done, as data; and the two things that it may read while it decides.

In: `MasterCore.handle` returns a list of commands. Out: the shell runs them in order. Never: a command that waits:
its outcome comes back as an event, if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from common.journal.records import Record
from joynexus.datasets import DatasetManifest
from joynexus.wire import Buffer, Message
from services.master.events import Peer


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Encode and send a message, without ever blocking. Outcome: none, or `Undeliverable`.

    Attributes:
        id: id of this message.
        re: id of the message that it answers; empty if it answers none.
        buffers: passed through as they came.
        deadline_ms: milliseconds that remain for an answer; 0 means none.
    """

    peer: Peer
    message: Message
    id: str
    re: str = ""
    buffers: tuple[Buffer, ...] = ()
    deadline_ms: int = 0


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Write records to the journal, all or none, after those of earlier commands.

    Outcome: `Persisted` or `PersistFailed`. The shell may put several commands into one transaction (group commit).
    """

    token: int
    records: tuple[Record, ...]


class DeleteBlobs(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody refers to these blobs any more. Outcome: none; one that is missing already is fine."""

    digests: tuple[str, ...]


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Write one log line.

    Attributes:
        event: short name of what happened, e.g. `trainer_lost`.
        fields: details; never payloads or secrets.
    """

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: Mapping[str, str | int | float | bool]


class Waited(msgspec.Struct, frozen=True):
    """A piece of work, that nobody had before, was given to a worker: how long it had waited, for the shell to count.

    Attributes:
        queue: `training`, `inference` or `env`.
    """

    queue: str
    seconds: float


Command = Send | Persist | DeleteBlobs | Log | Waited


class Sources(Protocol):
    """What the core may read, synchronously: things that never change once written. The shell gives it."""

    def payload(self, tenant: str, policy: str, seq: int) -> bytes:
        """Return the inline payload of a journaled op (made by `frames.join`).

        Raises:
            KeyError: if the journal has none.
            OSError: if it cannot be read now.
        """
        ...

    def manifest(self, digest: str) -> DatasetManifest:
        """Return the decoded manifest in this blob; the shell may cache it.

        Raises:
            KeyError: if there is no such blob.
            ValueError: if it is not a manifest, or damaged.
            OSError: if it cannot be read now.
        """
        ...
