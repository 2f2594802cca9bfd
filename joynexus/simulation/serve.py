"""Serve a tenant's own environment to the cluster, from the tenant's machine: `joynexus env serve`.

In: pieces of work that the master gives to whoever asks. Out: their results; trajectories as blobs of the tenant.
Never: a connection that somebody else opens, work of another tenant, or torch: this runs on the wheel alone.

The main thread asks for work again and again, which also says that this host lives. Each lane does one piece at a time,
in a worker process of its own: a page of episodes, or a description.
"""

from __future__ import annotations

import logging
import platform
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import joynexus
from joynexus.client import _blobs
from joynexus.client._flow import run
from joynexus.client._io import Connection, answer_of
from joynexus.simulation.asking import Asker
from joynexus.simulation.interface import Picture, SimulatorError, SimulatorOptions
from joynexus.simulation.own import make_own
from joynexus.simulation.pool import Deadlines, SimulatorPool
from joynexus.simulation.process import Recycling
from joynexus.simulation.work import describe_simulator, options_of, run_rollout
from joynexus.wire import Buffer, ErrorCode, Failure, JoyNexusError, Packet, failure
from joynexus.wire.back import DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.front import Done
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

log = logging.getLogger(__name__)

PULL_S = 8.0
"""Silence after which a pull is sent again; the master answers within about half of it."""
PATIENCE_S = 60.0
PAUSE_S = 1.0
"""Between two pulls of which the first went wrong."""
RESULT_S = 600.0
"""How long a result waits for a master that is away."""
GOODBYE_S = 3.0
RECYCLING = Recycling(episodes=1000, memory_mib=1024, handles=64)
"""When a worker process is replaced, while no episode runs in it; one that does not leak is replaced now and then."""
_GONE = frozenset({ErrorCode.STALE, ErrorCode.NOT_REGISTERED})

Work = Rollout | DescribeSimulator
Answer = RolloutDone | SimulatorDescribed
Key = tuple[str, int]


class NoLongerWanted(Exception):  # noqa: N818 - not an error: the way out of work that was cancelled
    """The master does not want an answer any more."""


class Serving(NamedTuple):
    """What is served, and how.

    Attributes:
        target: `module:function`.
        name: the task is `own/<name>`.
        processes: worker processes; each does a page of episodes at a time.
        environments: in each process; they ask the policy together.
        instruction: task text in place of the environment's own.
        deadlines: for each call of an environment.
        recycling: when a worker process is replaced, while no episode runs in it.
    """

    target: str
    name: str
    processes: int = 1
    environments: int = 8
    instruction: str = ""
    deadlines: Deadlines = Deadlines()
    recycling: Recycling = RECYCLING

    @property
    def env(self) -> str:
        """Name of the task."""
        return f"{OWN}/{self.name}"

    def open_pool(self, options: SimulatorOptions, rows: int) -> SimulatorPool:
        """Open a pool of one worker process."""
        task = f"{self.target} {self.instruction}".strip()
        return SimulatorPool(
            task, rows, make=make_own, options=options, deadlines=self.deadlines, recycling=self.recycling
        )

    def offer(self, incarnation: str) -> OfferEnvironment:
        """Make one environment to see what it is.

        Raises:
            SimulatorError, ValueError: it cannot be made.
        """
        with self.open_pool(SimulatorOptions(), 1) as pool:
            contract, instruction = pool.contract, pool.instruction
        return OfferEnvironment(
            name=self.name,
            incarnation=incarnation,
            credit=self.processes,
            contract=contract,
            instruction=instruction,
            software=self.software(),
        )

    def software(self) -> dict[str, str]:
        """Return the versions that its numbers depend on, as far as they are known here."""
        return {
            "environment": self.target[:64],
            "joynexus": joynexus.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }


class EnvironmentHost:
    """One host.

    Args:
        connection: to the cluster, with the tenant's key.
        serving: what to serve.
        say: told what happens, in sentences.
    """

    def __init__(self, connection: Connection, serving: Serving, say: Callable[[str], None]) -> None:
        self._connection, self._serving, self._say = connection, serving, say
        self._incarnation = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._have: set[Key] = set()
        self._unwanted: set[Key] = set()
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._stopping = False
        self._away = False
        self._lanes = [threading.Thread(target=self._lane, daemon=True) for _ in range(serving.processes)]

    def serve(self) -> None:
        """Serve until interrupted.

        Raises:
            SimulatorError, ValueError: the environment cannot be made.
            JoyNexusError: the cluster refuses it.
        """
        offer = self._serving.offer(self._incarnation)
        for lane in self._lanes:
            lane.start()
        try:
            self._offer(offer)
            self._say(f"{offer.instruction!r} is served as {self._serving.env}: name it as `env` in a job's spec")
            while True:
                self._turn(offer)
        finally:
            self._leave()

    # The master

    def _offer(self, offer: OfferEnvironment) -> None:
        asked = self._connection.ask(offer, answer_of(EnvironmentOffered), patience_s=PATIENCE_S)
        asked.result()

    def _turn(self, offer: OfferEnvironment) -> None:
        """Ask for work once, and take it."""
        try:
            pulled = self._pull(offer)
        except JoyNexusError as error:
            if error.failure.category == "user":
                raise
            if not self._away:
                self._say(f"{error}; this host goes on asking")
            self._away = True
            time.sleep(PAUSE_S)
            return
        if self._away:
            self._say("the cluster answers again")
        self._away = False
        self._take(pulled)

    def _pull(self, offer: OfferEnvironment) -> PulledWork:
        """Ask for work, or offer the environment again to a master that has restarted."""
        with self._lock:  # as if work that nobody wants had ended: else the master would say so again and again
            have = tuple(sorted(self._have - self._unwanted))
        pull = PullWork(incarnation=self._incarnation, have=have)
        try:
            asked = self._connection.ask(pull, answer_of(PulledWork), patience_s=PATIENCE_S, resend_s=PULL_S)
            return asked.result()
        except JoyNexusError as error:
            if error.code is not ErrorCode.NOT_REGISTERED:
                raise
        self._offer(offer)
        return PulledWork()

    def _take(self, pulled: PulledWork) -> None:
        with self._lock:
            self._unwanted |= {key for key in self._have if key[0] in pulled.cancelled}
            for work in (pulled.rollout, pulled.describe):
                if work is not None and (work.task, work.attempt) not in self._have:
                    self._have.add((work.task, work.attempt))
                    self._todo.put(work)

    def _leave(self) -> None:
        self._stopping = True
        for _ in self._lanes:
            self._todo.put(None)
        try:
            goodbye = WithdrawEnvironment(incarnation=self._incarnation)
            self._connection.ask(goodbye, answer_of(Done), patience_s=GOODBYE_S).result()
        except JoyNexusError as error:
            self._say(f"the cluster did not hear that this host ends, it will notice: {error}")
        until = time.monotonic() + GOODBYE_S
        for lane in self._lanes:  # one that hangs in an environment ends with this process, and takes that along
            lane.join(max(0.0, until - time.monotonic()))

    # Work, in a lane's thread

    def _lane(self) -> None:
        pools = _LanePool(self._serving)
        while (work := self._todo.get()) is not None and not self._stopping:
            key = (work.task, work.attempt)
            started = time.monotonic()
            answer = self._answer(work, pools)
            if answer is not None and not self._stopping:
                self._deliver(answer)
                of = f" (job {work.trace})" if work.trace else ""  # in the logs of the service under the same name
                self._say(f"{_line(work, answer)} in {time.monotonic() - started:.1f} s{of}")
            with self._lock:
                self._have.discard(key)
                self._unwanted.discard(key)
        pools.close()

    def _answer(self, work: Work, pools: _LanePool) -> Answer | None:
        """Do a piece of work and return its answer, also if it failed; None if nobody waits for it any more."""
        try:
            return self._do(work, pools)
        except NoLongerWanted:
            return None
        except JoyNexusError as error:
            return None if error.code in _GONE else _failed(work, error.failure)
        except SimulatorError as error:
            return _failed(work, failure(ErrorCode.UNAVAILABLE, str(error)))
        except ValueError as error:
            return _failed(work, failure(ErrorCode.INVALID, str(error)))
        except Exception as error:  # one piece of work must not end the host
            log.exception("a piece of work failed")
            return _failed(work, failure(ErrorCode.BAD_DATA, f"the host failed with {type(error).__name__}: {error}"))

    def _do(self, work: Work, pools: _LanePool) -> Answer:
        def alive() -> None:
            if self._stopping or (work.task, work.attempt) in self._unwanted:
                raise NoLongerWanted

        def request(act: bytes, buffers: Sequence[Buffer], *, timeout_s: float) -> Packet:
            message = HostAct(incarnation=self._incarnation, task=work.task, attempt=work.attempt, act=act)
            return self._connection.ask(message, _packet, buffers=buffers, patience_s=timeout_s).result()

        pool = pools.get(options_of(work))
        try:
            if isinstance(work, DescribeSimulator):
                return describe_simulator(work, pool, software=self._serving.software(), alive=alive)
            ask = Asker(request, alive, work.policy, explore=work.collect is not None)
            done = run_rollout(work, pool, ask, self, software=self._serving.software(), alive=alive)
        except BaseException:
            pools.close()  # an episode may be under way in it
            raise
        return _unless_broken(work, done)

    def _deliver(self, answer: Answer) -> None:
        rollout = answer if isinstance(answer, RolloutDone) else None
        described = answer if isinstance(answer, SimulatorDescribed) else None
        message = HostDone(incarnation=self._incarnation, rollout=rollout, described=described)
        try:
            self._connection.ask(message, answer_of(Done), patience_s=RESULT_S).result()
        except JoyNexusError as error:
            if error.code not in _GONE and not self._stopping:
                self._say(f"a result was not taken: {error}")

    # What `run_rollout` stores

    def put_bytes(self, data: bytes) -> str:
        """Upload a blob of the tenant's; returns its digest."""
        blob = _blobs.LocalBlob.of(data)
        run(_blobs.upload(self._connection, blob))
        return blob.digest

    def put_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        """Hosts record no videos: that takes an encoder, and jobs that want some are refused."""
        return "", 0


class _LanePool:
    """The pool of one lane, made anew when other options are asked for."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._options: SimulatorOptions | None = None
        self._pool: SimulatorPool | None = None

    def get(self, options: SimulatorOptions) -> SimulatorPool:
        """Return a pool with these options."""
        if self._pool is None or options != self._options:
            self.close()
            self._pool, self._options = self._serving.open_pool(options, self._serving.environments), options
        return self._pool

    def close(self) -> None:
        """End it."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _packet(packet: Packet) -> Packet:
    return packet


def _unless_broken(work: Rollout, done: RolloutDone) -> RolloutDone:
    """An environment that let no episode of a page come to its end is broken: say so, rather than count failures."""
    reasons = [episode.failure for episode in done.episodes if "lost" in episode.failure]
    if not reasons or len(reasons) < len(done.episodes):
        return done
    sentence = f"none of {len(reasons)} episodes could be run: {reasons[0]}"
    return RolloutDone(task=work.task, attempt=work.attempt, error=failure(ErrorCode.BAD_DATA, sentence))


def _failed(work: Work, error: Failure) -> Answer:
    kind = RolloutDone if isinstance(work, Rollout) else SimulatorDescribed
    return kind(task=work.task, attempt=work.attempt, error=error)


def _line(work: Work, answer: Answer) -> str:
    what = f"{len(work.seeds)} episodes of policy '{work.policy}'" if isinstance(work, Rollout) else "a description"
    if answer.error is not None:
        return f"{what} failed ({answer.error.message})"
    if isinstance(answer, RolloutDone):
        return f"{what}, {sum(episode.success for episode in answer.episodes)} solved,"
    return what
