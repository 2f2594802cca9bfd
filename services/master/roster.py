"""The workers: who is there, what each was given, and who is dead.

In: registrations, beats, time. Out: `Registered`, acknowledged beats, and calls to the parts that give work. Never: a
choice of work (the queues decide that), or a result from a worker that was declared dead.

A worker is one incarnation of a process. Its connection may change (the master or the network went away and came back):
then it registers again as the same incarnation, keeps its work, and everything that it has not answered is sent again,
because either direction may have been lost. Doing a piece twice is harmless everywhere: the trainer remembers results,
inference and simulators have no state, and only one answer counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from joynexus.wire import Buffer, ErrorCode, JoyNexusError, Message
from joynexus.wire.back import Beat, BeatAck, Gone, InstanceRow, Leaving, Register, Registered
from joynexus.wire.front import RoleStatus
from services.master.config import CoreConfig
from services.master.events import BackMessage, Peer, Undeliverable
from services.master.instances import Instances, same_instance
from services.master.outbox import Outbox, refuse
from services.master.protocol import agree
from services.master.worker import Given, Worker

_FALLEN_REMEMBERED = 1000
_OFFERED = frozenset({"backbone", "device", "dtype", "numerics", "grouping", "simulators"})
"""What a tenant needs to know of a worker: what it runs, and whether numbers stay the same in groups."""


class Staff(Protocol):
    """A part of the core that gives work to one role."""

    def joined(self, worker: Worker) -> None:
        """A worker is there; one that is `leaving`, or in quarantine, gets nothing, and `leaving` follows."""
        ...

    def lost(self, worker: Worker) -> None:
        """A worker is dead; what it was `given` is not done."""
        ...

    def leaving(self, worker: Worker) -> None:
        """A worker finishes what it has and takes nothing new."""
        ...


class Roster:
    """All workers.

    Attributes:
        beaten: called with a worker that has said how busy it was.
    """

    def __init__(self, outbox: Outbox, config: CoreConfig) -> None:
        self._outbox = outbox
        self._config = config
        self._staff: defaultdict[str, list[Staff]] = defaultdict(list)
        self._by_peer: dict[Peer, Worker] = {}
        self._by_incarnation: dict[str, Worker] = {}
        self._by_name: dict[str, Worker] = {}  # also the dead ones, until a new one takes the name
        self._lives: Counter[str] = Counter()
        # By incarnation, and the tasks that each had.
        self._fallen: OrderedDict[str, tuple[Worker, tuple[str, ...]]] = OrderedDict()
        self._watching = False
        self._instances = Instances(outbox, config.beat_ms / 1000, self._lose)
        self.beaten: Callable[[Worker], None] = lambda worker: None

    def add_staff(self, role: str, staff: Staff) -> None:
        """Have a part of the core told about workers of this role."""
        self._staff[role].append(staff)

    def living(self, role: str) -> Iterable[Worker]:
        """Return the workers of a role that are not dead."""
        return (worker for worker in self._by_incarnation.values() if worker.role == role)

    def of(self, said: BackMessage) -> Worker:
        """Return the worker behind a message.

        Raises:
            JoyNexusError: `NOT_REGISTERED`.
        """
        worker = self._by_peer.get(said.peer)
        if worker is None:
            raise refuse(ErrorCode.NOT_REGISTERED, "the master does not know this connection: register again")
        worker.heard = self._outbox.now
        return worker

    # Messages

    def on_register(self, said: BackMessage, message: Register) -> None:
        """Welcome a worker, or welcome it back."""
        self._agree(said, message)
        if message.role not in said.roles:
            raise refuse(ErrorCode.FORBIDDEN, f"this key is not for a worker of role '{message.role}'")
        if not message.incarnation or len(message.incarnation) > 64:
            raise refuse(ErrorCode.INVALID, "incarnation must be an id of 1 to 64 characters")
        previous = self._by_peer.get(said.peer)
        if previous is not None and previous.register.incarnation != message.incarnation:
            self._lose(previous, "its connection has another incarnation now")
        worker = self._by_incarnation.get(message.incarnation)
        if worker is not None and worker.key_name == said.key_name and worker.role == message.role:
            self._resume(worker, said, message)
        elif worker is not None:
            raise refuse(ErrorCode.CONFLICT, "another worker registered with this incarnation")
        else:
            self._join(said, message)
        self._watch()

    def on_beat(self, said: BackMessage, message: Beat) -> None:
        """Note that a worker lives and what it does."""
        worker = self.of(said)
        worker.progress = message.progress
        worker.phase = message.phase
        worker.busy_s = message.busy_s
        worker.since = min(worker.since, self._outbox.now - message.uptime_s)
        if message.detail:  # beside what it registered with: its backbone, its verdict on numerics
            worker.detail = {**worker.register.detail, **message.detail}
        self.beaten(worker)
        self._outbox.answer(said, BeatAck(cancelled=tuple(worker.cancelled), leave=worker.told_to_leave))
        worker.cancelled = []

    def on_leaving(self, said: BackMessage, message: Leaving) -> None:
        """Give a worker nothing new."""
        self._spare(self.of(said))
        # Last, because it may go once it has heard this and has nothing to do.
        self._outbox.answer(said, BeatAck())

    def on_gone(self, said: BackMessage, message: Gone) -> None:
        """Forget a worker that has ended in order."""
        worker = self.of(said)
        worker.leaving = True
        self._instances.ended(worker, said=True)
        self._lose(worker, "it has ended")
        self._outbox.answer(said, BeatAck())

    # Work

    def give(self, worker: Worker, task: str, attempt: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a worker a piece of work."""
        given = Given(attempt, message, tuple(buffers), self._outbox.now)
        worker.given[task] = given
        if worker.ring is not None:
            worker.ring()
        else:
            given.sent_as = self._outbox.send(worker.peer, message, buffers=buffers)

    def check(self, said: BackMessage, task: str, attempt: int) -> Worker:
        """Return the worker behind an answer, if that answer counts.

        Raises:
            JoyNexusError: `NOT_REGISTERED`; `STALE` if the task is not this worker's in this attempt.
        """
        worker = self.of(said)
        given = worker.given.get(task)
        if given is None or given.attempt != attempt:
            raise refuse(
                ErrorCode.STALE, f"attempt {attempt} of task '{task[:64]}' is not this worker's any more: drop it"
            )
        return worker

    def take(self, worker: Worker, task: str) -> None:
        """A piece of work was answered."""
        worker.given.pop(task, None)

    def cancel(self, worker: Worker, task: str) -> None:
        """Nobody wants a piece of work any more; the worker hears it with its next beat."""
        if worker.given.pop(task, None) is None:
            return
        if worker.ring is not None:
            worker.ring()
        else:
            worker.cancelled.append(task)

    def on_undeliverable(self, event: Undeliverable) -> None:
        """Send work again a little later if its worker's connection still stands; else it will register again."""
        worker = self._by_peer.get(event.peer)
        if worker is None:
            return
        task = next((task for task, given in worker.given.items() if given.sent_as == event.id), None)
        if task is not None:
            self._outbox.after(self._config.retry_s, lambda: self._send_again(worker, task, event.id))

    def status(self, instances: Mapping[str, InstanceRow] | None = None) -> tuple[RoleStatus, ...]:
        """Describe all workers to operators, the dead ones too until they are replaced.

        Args:
            instances: what health knows of their processes, by instance.
        """
        known = instances or {}
        return tuple(
            RoleStatus(
                role=worker.role,
                worker=name,
                phase=worker.state,
                progress=worker.progress,
                busy_s=worker.busy_s,
                uptime_s=self._outbox.now - worker.since,
                restarts=row.restarts if (row := known.get(worker.register.instance)) else self._lives[name] - 1,
                pid=worker.register.pid,
                instance=worker.register.instance,
                reason=row.reason if row else "",
                detail=worker.detail | ({"quarantined": worker.quarantine} if worker.quarantine else {}),
            )
            for name, worker in sorted(self._by_name.items())
        )

    def offers(self) -> tuple[RoleStatus, ...]:
        """Describe all workers to a tenant: what it may use, and nothing that others' work changes but the phase."""
        return tuple(
            RoleStatus(
                role=worker.role,
                worker=name,
                phase=worker.state,
                progress=0,
                busy_s=0.0,
                uptime_s=0.0,
                detail={what: text for what, text in worker.register.detail.items() if what in _OFFERED},
            )
            for name, worker in sorted(self._by_name.items())
        )

    def drain(self, worker: Worker, by: str) -> None:
        """Have a worker finish what it has, and end, because an operator says so; a master started anew forgets it."""
        if not worker.told_to_leave:
            worker.told_to_leave = True
            self._outbox.log("info", "worker_drained", worker=worker.name, by=by)
            self._spare(worker)

    def dismiss(self, said: BackMessage, why: str) -> None:
        """Take a worker for dead; it hears of it when it next says something, and registers anew."""
        worker = self._by_peer.get(said.peer)
        if worker is not None:
            self._lose(worker, why)

    # Inside

    def _join(self, said: BackMessage, message: Register) -> None:
        worker = Worker(
            name="",
            key_name=said.key_name,
            peer=said.peer,
            register=message,
            since=self._outbox.now,
            heard=self._outbox.now,
            detail=message.detail,
        )
        others = list(self.living(message.role))
        self._instances.check(worker, others)
        self._check_batch_key(worker)
        self._instances.make_room(worker, others)
        worker.name = name = self._free_name(message.role)
        self._lives[name] += 1
        self._by_peer[said.peer] = self._by_incarnation[message.incarnation] = self._by_name[name] = worker
        before, lost = self._fallen.pop(message.incarnation, (worker, ()))
        # It was taken for dead and is not: what it was told then, the same process still does.
        worker.leaving, worker.told_to_leave = before.leaving, before.told_to_leave
        worker.quarantine = before.quarantine
        self._welcome(said, worker, lost)
        self._outbox.log("info", "worker_joined", worker=name, pid=message.pid, lives=self._lives[name])
        for staff in self._staff[worker.role]:
            staff.joined(worker)
            if worker.leaving or worker.quarantine:
                staff.leaving(worker)

    def _spare(self, worker: Worker) -> None:
        """Give a worker nothing new."""
        worker.leaving = True
        worker.phase = "draining"
        for staff in self._staff[worker.role]:
            staff.leaving(worker)

    def _agree(self, said: BackMessage, message: Register) -> int:
        try:
            return agree("worker", message.protocol_min, message.protocol_max)
        except JoyNexusError as error:
            why = error.failure.message
            self._outbox.log("warning", "worker_refused", key=said.key_name, worker_role=message.role, why=why)
            raise

    def _welcome(self, said: BackMessage, worker: Worker, lost: tuple[str, ...] = ()) -> None:
        protocol = self._agree(said, worker.register)
        registered = Registered(worker=worker.name, beat_ms=self._config.beat_ms, lost=lost, protocol=protocol)
        self._outbox.answer(said, registered)

    def _check_batch_key(self, worker: Worker) -> None:
        """Refuse a worker that computes other numbers than those who do the same work."""
        message = worker.register
        for other in self.living(worker.role):
            theirs = other.register
            if same_instance(worker, other):
                continue  # it gives way
            if theirs.backbone_name == message.backbone_name and theirs.batch_key != message.batch_key:
                raise refuse(
                    ErrorCode.CONFLICT,
                    f"{other.name} serves backbone '{message.backbone_name}' with batch key {theirs.batch_key}, this "
                    f"worker has {message.batch_key}: both would give tenants different numbers, so start it with the "
                    "same revision, dtype and image side, or stop the others of its role first",
                )

    def _resume(self, worker: Worker, said: BackMessage, message: Register) -> None:
        self._welcome(said, worker)
        worker.heard = self._outbox.now
        if worker.peer == said.peer:
            return
        self._by_peer.pop(worker.peer, None)
        self._by_peer[said.peer] = worker
        worker.peer = said.peer
        self._outbox.log("info", "worker_reconnected", worker=worker.name, tasks=len(worker.given))
        for given in worker.given.values():
            given.sent_as = self._outbox.send(worker.peer, given.message, buffers=given.buffers)

    def _send_again(self, worker: Worker, task: str, sent_as: str) -> None:
        given = worker.given.get(task)
        if worker.alive and given is not None and given.sent_as == sent_as:
            given.sent_as = self._outbox.send(worker.peer, given.message, buffers=given.buffers)

    def _lose(self, worker: Worker, why: str) -> None:
        worker.alive = False
        self._instances.ended(worker)
        self._by_incarnation.pop(worker.register.incarnation, None)
        self._by_peer.pop(worker.peer, None)
        self._fallen[worker.register.incarnation] = worker, tuple(worker.given)
        if len(self._fallen) > _FALLEN_REMEMBERED:
            self._fallen.popitem(last=False)
        if worker.leaving and not worker.given:  # it said so and had finished: its end is no failure, its name is free
            self._by_name.pop(worker.name, None)
            self._lives.pop(worker.name, None)
            self._outbox.log("info", "worker_left", worker=worker.name, why=why)
        else:
            self._outbox.log("warning", "worker_lost", worker=worker.name, why=why, tasks=len(worker.given))
        for staff in self._staff[worker.role]:
            staff.lost(worker)
        worker.given = {}

    def _free_name(self, role: str) -> str:
        number = 1
        while (holder := self._by_name.get(f"{role}-{number}")) is not None and holder.alive:
            number += 1
        return f"{role}-{number}"

    def _watch(self) -> None:
        """Look for silent workers, again and again while there are workers."""
        if not self._watching and self._by_incarnation:
            self._watching = True
            self._outbox.after(self._config.beat_ms / 1000, self._look)

    def _look(self) -> None:
        self._watching = False
        for worker in list(self._by_incarnation.values()):
            silence = self._outbox.now - worker.heard
            if silence > self._config.silent_s:
                self._lose(worker, f"silent for {silence:.1f} s")
        self._watch()
