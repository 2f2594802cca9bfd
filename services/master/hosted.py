"""Hosts: processes on tenants' own machines that run a tenant's own environment, as workers for that tenant alone.

In: offers, pulls, requests to act and results, all through the tenants' door. Out: workers of the env queue that serve
the need `own:<tenant>:<name>`, and work for whoever pulls. Never: work of another tenant, a message to a host that did
not ask, or trust: whatever a host says is held against what it was asked, and may cost its own tenant's job, nothing
else.

A host is known by its incarnation, whatever connection it asks through. What it has and what it was given are compared
at each pull, so that a lost, late or repeated message changes nothing. A host that was silent is lost: its work waits
until another one is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec

from joynexus.wire import ErrorCode
from joynexus.wire.back import DescribeSimulator, Register, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import Done, RoleStatus
from joynexus.wire.hosted import (
    OWN,
    EnvironmentOffered,
    HostAct,
    HostDone,
    OfferEnvironment,
    PulledWork,
    PullWork,
    WithdrawEnvironment,
)
from services.master.config import CoreConfig
from services.master.env_queue import EnvQueue
from services.master.events import FrontMessage
from services.master.host_answers import MAX_CREDIT, check_offer, checked_description, checked_rollout
from services.master.outbox import Outbox, refuse
from services.master.tasks import Task, simulator_need
from services.master.worker import Worker

_PULLS = 2.5
"""A host that has not pulled for so many times `pull_s` gives way to one that offers something else."""


class Host(msgspec.Struct, eq=False):
    """One incarnation of a host.

    Attributes:
        worker: what the env queue knows of it.
        pull: the request for work that waits for an answer.
        idle: numbers the times at which it is told that there is nothing to do.
    """

    tenant: str
    offer: OfferEnvironment
    worker: Worker
    pull: FrontMessage | None = None
    idle: int = 0

    @property
    def env(self) -> str:
        """Name of its task in specs."""
        return f"{OWN}/{self.offer.name}"


class Hosts:
    """All hosts.

    Args:
        env: gives them work.
        act: has a policy act for a task.
        stored: bytes of a blob that a tenant may read, 0 if there is none.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        env: EnvQueue,
        act: Callable[[FrontMessage, Task, bytes], None],
        stored: Callable[[str, str], int],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._env = env
        self._act = act
        self._stored = stored
        self._hosts: defaultdict[str, dict[str, Host]] = defaultdict(dict)  # tenant -> incarnation -> host
        self._joined = 0

    # Messages

    def on_offer(self, asked: FrontMessage, message: OfferEnvironment) -> None:
        """Welcome a host, or welcome it back."""
        check_offer(message)
        known = self._hosts[asked.tenant].get(message.incarnation)
        if known is None:
            self._make_room(asked.tenant, message)
            known = self._join(asked, message)
        elif known.offer != message:
            raise refuse(ErrorCode.CONFLICT, "this incarnation has offered something else: take a new one")
        known.worker.heard = self._outbox.now
        self._outbox.answer(asked, EnvironmentOffered(env=known.env))

    def on_pull(self, asked: FrontMessage, message: PullWork) -> None:
        """Tell a host what to do, as soon as there is something."""
        host = self._of(asked, message.incarnation)
        if len(message.have) > 2 * MAX_CREDIT:
            raise refuse(ErrorCode.INVALID, f"a host has at most {2 * MAX_CREDIT} pieces of work")
        if host.pull is not None and (host.pull.peer, host.pull.header.id) != (asked.peer, asked.header.id):
            self._answer(host, PulledWork())  # it asks anew, maybe through another connection
        host.pull = msgspec.structs.replace(asked, body=b"", buffers=())  # it waits long, and may have been made large
        host.idle += 1
        if not self._tell(host):
            idle = host.idle
            self._outbox.after(self._config.pull_s, lambda: self._tell_idle(host, idle))

    def on_act(self, asked: FrontMessage, message: HostAct) -> None:
        """A host asks for actions; its task says with which policy and version."""
        host = self._of(asked, message.incarnation)
        self._act(asked, self._task(host, message.task, message.attempt), message.act)

    def on_done(self, asked: FrontMessage, message: HostDone) -> None:
        """A host has done a piece of work, or could not."""
        host = self._of(asked, message.incarnation)
        said = message.rollout or message.described
        if said is None:
            raise refuse(ErrorCode.INVALID, "a result must be given: `rollout` or `described`")
        task = self._task(host, said.task, said.attempt)
        given = host.worker.given[task.id].message
        if isinstance(said, RolloutDone) and isinstance(given, Rollout):
            nbytes = self._stored(host.tenant, said.trajectories) if said.trajectories else 0
            answer: RolloutDone | SimulatorDescribed = checked_rollout(host.env, given, said, nbytes)
        elif isinstance(said, SimulatorDescribed) and isinstance(given, DescribeSimulator):
            answer = checked_description(host.env, said)
        else:
            raise refuse(ErrorCode.INVALID, f"task '{said.task[:64]}' has another kind of answer")
        host.worker.progress += 1
        self._env.answered(host.worker, task, answer)
        self._outbox.answer(asked, Done())

    def on_withdraw(self, asked: FrontMessage, message: WithdrawEnvironment) -> None:
        """A host goes; one that is unknown is gone already."""
        host = self._hosts[asked.tenant].get(message.incarnation)
        if host is not None:
            self._lose(host, "it was ended by its tenant")
        self._outbox.answer(asked, Done())

    def status(self, tenant: str | None) -> tuple[RoleStatus, ...]:
        """Describe the hosts of a tenant, or all."""
        hosts = [host for name, mine in self._hosts.items() if tenant in (None, name) for host in mine.values()]
        return tuple(
            RoleStatus(
                role="host",
                worker=host.worker.name,
                phase="working" if host.worker.given else "idle",
                progress=host.worker.progress,
                busy_s=0.0,
                uptime_s=self._outbox.now - host.worker.since,
                # What a host says has names of its own: those of the cluster's roles mean something to operators.
                detail={
                    **{f"software.{name}": version for name, version in host.offer.software.items()},
                    "simulators": host.env,
                    "tenant": host.tenant,
                },
            )
            for host in hosts
        )

    # Hosts

    def _of(self, asked: FrontMessage, incarnation: str) -> Host:
        host = self._hosts[asked.tenant].get(incarnation)
        if host is None:
            raise refuse(ErrorCode.NOT_REGISTERED, "the master does not know this host: offer the environment again")
        host.worker.heard = self._outbox.now
        return host

    def _task(self, host: Host, task: str, attempt: int) -> Task:
        given = host.worker.given.get(task)
        if given is None or given.attempt != attempt:
            sentence = f"attempt {attempt} of task '{task[:64]}' is not this host's (any more): drop it"
            raise refuse(ErrorCode.STALE, sentence)
        return self._env.running_task(task)

    def _make_room(self, tenant: str, offer: OfferEnvironment) -> None:
        """Refuse a host that does not fit beside the others of its tenant."""
        for other in list(self._hosts[tenant].values()):
            differs = (other.offer.contract, other.offer.instruction) != (offer.contract, offer.instruction)
            if other.offer.name != offer.name or not differs:
                continue
            if self._outbox.now - other.worker.heard > _PULLS * self._config.pull_s:
                self._lose(other, "it was silent when another one came with its name and another environment")
                continue
            raise refuse(
                ErrorCode.CONFLICT,
                f"another host serves {other.env} with another contract or instruction: end it first (one that was "
                f"killed is forgotten after {self._config.host_silent_s:g} s), or give this one another name",
            )
        if len(self._hosts[tenant]) >= self._config.max_hosts:
            sentence = f"a tenant has at most {self._config.max_hosts} hosts: end some, or have one run more processes"
            raise refuse(ErrorCode.OVERLOADED, sentence, retry_after_ms=5000)

    def _join(self, asked: FrontMessage, offer: OfferEnvironment) -> Host:
        self._joined += 1
        register = Register(
            role="env",
            incarnation=offer.incarnation,
            pid=0,
            credit={"simulator": offer.credit},
            serves=(simulator_need(asked.tenant, f"{OWN}/{offer.name}"),),
        )
        worker = Worker(
            name=f"{OWN}/{offer.name}-{self._joined}",
            key_name="",
            peer=asked.peer,
            register=register,
            since=self._outbox.now,
            heard=self._outbox.now,
            ring=lambda: self._tell(host),
        )
        host = self._hosts[asked.tenant][offer.incarnation] = Host(asked.tenant, offer, worker)
        self._outbox.log("info", "host_joined", tenant=host.tenant, host=worker.name, credit=offer.credit)
        self._env.joined(worker)
        self._outbox.after(self._config.pull_s, lambda: self._watch(host))
        return host

    def _watch(self, host: Host) -> None:
        silence = self._outbox.now - host.worker.heard
        if not host.worker.alive:
            return
        if silence > self._config.host_silent_s:
            self._lose(host, f"silent for {silence:.1f} s")
        else:
            self._outbox.after(self._config.pull_s, lambda: self._watch(host))

    def _lose(self, host: Host, why: str) -> None:
        worker = host.worker
        worker.alive = False
        del self._hosts[host.tenant][host.offer.incarnation]
        self._outbox.log("info", "host_lost", tenant=host.tenant, host=worker.name, why=why, tasks=len(worker.given))
        self._env.lost(worker)
        worker.given = {}

    # Work

    def _tell(self, host: Host) -> bool:
        """Answer the pull that waits if there is something to say; return whether there was."""
        if host.pull is None:
            return False
        pull = host.pull.message
        assert isinstance(pull, PullWork), "nothing else is kept"
        have = dict(pull.have)
        given = host.worker.given.items()
        news = next((piece.message for task, piece in given if have.get(task) != piece.attempt), None)
        gone = tuple(task for task in have if task not in host.worker.given)
        if news is None and not gone:
            return False
        rollout = news if isinstance(news, Rollout) else None
        describe = news if isinstance(news, DescribeSimulator) else None
        self._answer(host, PulledWork(rollout=rollout, describe=describe, cancelled=gone))
        return True

    def _tell_idle(self, host: Host, idle: int) -> None:
        if host.pull is not None and host.idle == idle:
            self._answer(host, PulledWork())

    def _answer(self, host: Host, work: PulledWork) -> None:
        assert host.pull is not None, "whoever calls has looked"
        self._outbox.answer(host.pull, work)
        host.pull = None
