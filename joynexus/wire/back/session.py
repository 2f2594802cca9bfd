"""A worker's life: it registers, beats, and leaves."""

from __future__ import annotations

from typing import Literal

from joynexus.bounds import Few, Many, Short, Table, Text
from joynexus.wire.base import Wire

Role = Literal["trainer", "inference", "env", "health", "dashboard"]


class Register(Wire, frozen=True, kw_only=True):
    """First message of a worker, and again after `NOT_REGISTERED`.

    Answer: `Registered`, `FORBIDDEN`, or `UPGRADE_REQUIRED`.

    Attributes:
        incarnation: random id of this process's life; a restarted process has another.
        instance: what stays the same when this process is started anew: the one before is taken for dead at once. Empty
            if nobody knows: then the longest silent worker of the key makes room, once it has been silent for a while.
        credit: pieces of work it takes at once, by lane: trainer `{"train": n}`, inference `{"predict": n}`,
            env `{"simulator": n, "data": n}`. 0: it is leaving, and says so next.
        backbone, batch_key: digest and hard batch key of its backbone (trainer, inference).
        serves: simulator families (`metaworld`) and `datasets`, `sampler` (env).
        mounted: data sets found in the operator's folder (env).
        heads: action modules that it knows (trainer, inference).
        max_slots, slot_bytes: policies that a trainer holds in memory, and bytes that they may take; 0 means no limit.
        detail: for status: device, numerics verdict, software versions.
        protocol_min, protocol_max: protocol versions that it speaks.
    """

    role: Role
    incarnation: Short
    pid: int
    credit: Table[int]
    backbone: Short = ""
    backbone_name: Short = ""
    batch_key: Short = ""
    serves: Few[Short] = ()
    mounted: Many[Short] = ()
    heads: Few[Short] = ()
    max_slots: int = 0
    slot_bytes: int = 0
    detail: Table[Text] = {}
    instance: Short = ""
    protocol_min: int = 1
    protocol_max: int = 1


class Registered(Wire, frozen=True, kw_only=True):
    """Welcome.

    Attributes:
        worker: name given by the master, e.g. `trainer-1`.
        beat_ms: send a `Beat` this often.
        lost: tasks of this incarnation that were given to others meanwhile: drop them.
        protocol: protocol version both sides use from here.
    """

    worker: str
    beat_ms: int
    lost: tuple[str, ...] = ()
    protocol: int = 1


class Beat(Wire, frozen=True, kw_only=True):
    """I live, and the work loop has advanced to `progress`. Answer: `BeatAck`.

    Attributes:
        phase: as in `RoleStatus`.
        busy_s, uptime_s: CPU time (or CUDA time) of the work loop, and time, since the process started.
    """

    progress: int
    phase: Short
    busy_s: float
    uptime_s: float = 0.0
    detail: Table[Text] = {}


class BeatAck(Wire, frozen=True, kw_only=True):
    """Heard.

    Attributes:
        cancelled: tasks that nobody wants any more.
        leave: finish what you have, then say `Leaving` and end.
    """

    cancelled: tuple[str, ...] = ()
    leave: bool = False


class Leaving(Wire, frozen=True, kw_only=True):
    """I finish what I have and go; give me nothing new. Answer: `BeatAck`."""


class Gone(Wire, frozen=True, kw_only=True):
    """I have finished and end now: forget me; the last message of a worker that was told to end. Answer: `BeatAck`."""
