"""What trainer, inference, env and health have in common: one connection to the master, work in, results out.

In: settings and a `Register`. Out: work, answers, blobs; any thread may ask. Never: a result lost while the master is
away, a wait in the thread that reads the sockets, or a wedged process that goes on looking alive.

    with WorkerRuntime(settings) as runtime:
        with runtime.progress.phase("loading", deadline_s=300):
            model = load()
        runtime.register(Register(role="inference", incarnation=runtime.incarnation, pid=os.getpid(), credit=…))
        runtime.serve(lambda packet: answer(packet.message))
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

import msgspec

from common.blob_access import BlobAccess
from common.exits import EXIT_CONFIG, cannot_start
from common.http_port import probe_port
from common.metrics import Figures, Page, say_role
from common.progress import Progress, Watchdog
from common.session import Answer, Drop, Event, Leave, Misfit, Said, Work, WorkerSession
from common.settings import WorkerSettings
from common.telemetry import Logger, get_logger, log_op
from common.worker_io import WorkerIO
from joynexus.keys import ClusterFile
from joynexus.wire import Buffer, JoyNexusError, Message, Packet, encode
from joynexus.wire.back import Beat, Gone, Register

log = get_logger(__name__)

EXIT_INTERRUPTED = 130
"""Exit code when Ctrl-C cuts the orderly end short."""

_REMEMBERED = 4096
"""Answered pieces of work that are recognised if they are given again; likewise cancelled ones."""

CLOSE_S = 5.0
"""How long an orderly end waits until the master has confirmed the last results."""
GONE_S = 1.0
"""And until it has heard that this worker is gone."""


class WorkerRuntime:
    """A worker's connection to the master, its progress, its watchdog and its blobs.

    Args:
        settings: where the master is, and where blobs lie.
        progress: takes another CPU clock than the thread's (`Progress(cpu=…)`).
        exit: ends the process when it is wedged or its I/O thread fails; tests pass something milder.
        signals: leave on SIGTERM and SIGINT; needs the main thread.

    Attributes:
        incarnation: random id of this process's life, for `Register`.
        progress: report what the work loop does here.
        blobs: read and write blobs.
        detail: more for status; goes with each beat.
        figures: what the role counts, for `/metrics`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        progress: Progress | None = None,
        exit: Callable[[int], object] = os._exit,
        signals: bool = True,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._instance = settings.instance_name
        self.detail: dict[str, str] = {}
        self.figures = Figures()
        self.progress = progress or Progress()
        try:
            self._cluster = ClusterFile.load(settings.cluster_file)
            self._cluster.keys()  # read where they are used, and looked at here, where a sentence can still be said
        except ValueError as error:
            raise cannot_start("this role", error) from error
        self._role = settings.role
        self._started = time.monotonic()
        page = Page(self._gather, self.figures, time.monotonic)
        try:
            self._port = (
                probe_port(settings.metrics, alive=self.progress.overdue, ready=self.unready, metrics=page.text)
                if settings.metrics
                else None
            )
        except ValueError as error:  # the address is taken, say: the next start may find it free
            raise SystemExit(f"this role cannot start: {error}") from error
        self._signals = signals
        self._exit = exit
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._work: deque[Packet] = deque()
        self._taken: OrderedDict[tuple[str, int], bool] = OrderedDict()  # (task, attempt) -> answered
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # the newest of them
        self._answers: dict[str, Future[Packet]] = {}
        self._leaving = False
        self._session = WorkerSession(beat=self._beat)
        self._io = WorkerIO(self._cluster, self._session, self._happened, exit=exit)
        self._watchdog = Watchdog(self.progress, exit=exit, native=exit is os._exit)
        self.blobs = BlobAccess(
            self.ask,
            self.progress,
            shared=settings.blobs_dir,
            cache=settings.cache_dir / "blobs",
            cache_budget_bytes=settings.cache_budget_bytes,
        )

    # Life

    def __enter__(self) -> WorkerRuntime:
        if self._signals:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)
        self._watchdog.start()
        self._io.start()
        if self._port is not None:
            self._port.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait a little until the master has the last results, and that it may forget this worker; then hang up."""
        if self.worker:
            self._io.flush(CLOSE_S)
            if self._session.left:
                with suppress(JoyNexusError):  # else it is silent after a while
                    self.request(Gone(), timeout_s=GONE_S)
        self._io.stop()
        self._watchdog.stop()
        if self._port is not None:
            self._port.stop()

    def register(self, register: Register) -> None:
        """Offer this worker to the master, now and again whenever the master has forgotten it."""
        register = msgspec.structs.replace(register, instance=self._instance)
        self._io.do(lambda now: self._session.register(register))

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the master has accepted the registration; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._session.registered, timeout_s)

    @property
    def worker(self) -> str:
        """Name that the master gave this worker; empty before it did."""
        return self._session.worker

    def unready(self) -> str:
        """Return why this worker is given no work; empty if it is."""
        if self._leaving:
            return "told to end: it gets no more work"
        if not self._session.registered:
            return "not registered with the master: it loads, or the master is away or refuses it"
        return ""

    @property
    def metrics_port(self) -> int:
        """Return on which port `/metrics` and the like are answered; 0 without one."""
        return 0 if self._port is None else self._port.port

    # Work and results

    def next_work(self, timeout_s: float) -> Packet | None:
        """Return the next piece of work; None if none came in time. Work nobody wants any more is left out."""
        with self._changed:
            if not self._work:
                self._changed.wait_for(lambda: self._work or self.finished, timeout_s)
            return self._work.popleft() if self._work else None

    def cancelled(self, task: str) -> bool:
        """Return whether nobody wants the result of a task any more; long tasks ask now and then."""
        return task in self._cancelled

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Have a result delivered, also if the master is away just now.

        Raises:
            ValueError: if it exceeds a limit of the wire.
        """
        frames = encode(message, id=f"r{next(self._ids)}", buffers=buffers)
        key = _key(message)
        if key is not None and getattr(message, "last", True):
            with self._changed:
                self._taken[key] = True
        self._io.do(lambda now: self._session.say(frames))

    def request(self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Packet:
        """Ask the master and wait for the answer; it is asked again as often as it takes.

        Raises:
            JoyNexusError: what the master answered; `DEADLINE` if it did not answer in time.
        """
        return self.ask(message, buffers, timeout_s=timeout_s).result()

    def ask(self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float = 30.0) -> Future[Packet]:
        """Like `request`, without waiting."""
        id = f"q{next(self._ids)}"
        encode(message, id=id, buffers=buffers)  # so that a message over the limits is refused here and now
        answer: Future[Packet] = Future()
        self._answers[id] = answer
        self._io.do(
            lambda now: self._session.ask(id, message, buffers, deadline=now + timeout_s, now=now),
        )
        return answer

    def note(self, logger: Logger, kind: str, *, outcome: str, seconds: float, trace: str, **values: object) -> None:
        """Write the canonical line of a piece of work that was answered, and count it.

        Args:
            logger: whose line it is.
            kind: of work, as on the wire.
            outcome: `ok`, an error code, or `dropped`.
            seconds: what it took this worker.
            trace: of the request or job that it is for.
            values: what else the line says.
        """
        log_op(logger, kind, outcome=outcome, ms=1000.0 * seconds, trace=trace, level=logging.INFO, **values)
        self.figures.add("joynexus_work_total", self._role, kind, outcome)
        self.figures.observe("joynexus_work_seconds", self._role, kind, value=seconds)

    def count_group(self, policies: Sequence[tuple[str, str]]) -> None:
        """Count a group, given tenant and policy of each of its items."""
        self.figures.observe("joynexus_group_policies", self._role, value=len(set(policies)))
        self.figures.observe("joynexus_group_items", self._role, value=len(policies))

    def count_forwards(self, samples: int) -> None:
        """Count samples that went through the backbone."""
        self.figures.add("joynexus_backbone_forwards_total", self._role, by=samples)

    def count_features(self, hits: int, misses: int) -> None:
        """Say how many features the store had, and had not, since it was opened."""
        self.figures.put("joynexus_features_total", self._role, "hit", value=hits)
        self.figures.put("joynexus_features_total", self._role, "miss", value=misses)

    # The end

    @property
    def leaving(self) -> bool:
        """Return whether this worker was told to end."""
        return self._leaving

    @property
    def finished(self) -> bool:
        """Return whether it may end: it was told to, nothing waits, and the master (if there) gives nothing new."""
        return self._leaving and not self._work and (self._session.left or not self._session.registered)

    def leave(self) -> None:
        """Take nothing new, finish what is there; `serve` returns then."""
        self._leaving = True
        self._io.do(lambda now: self._session.leave())

    def serve(self, work: Callable[[Packet], None], *, drain: Callable[[], None] | None = None) -> None:
        """Do work as it comes, until told to leave; then what is left, then `drain`."""
        while not self.finished:
            packet = self.next_work(1.0)
            if packet is not None:
                work(packet)
        log.info("leaving")
        if drain is not None:
            drain()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._leaving and number == signal.SIGINT:  # somebody at a keyboard does not want to wait
            os._exit(EXIT_INTERRUPTED)
        self.leave()  # several may say so: a drain, scaling, an engine

    # Called in the I/O thread

    def _beat(self) -> Beat:
        progress, phase, busy_s = self.progress.report()
        return Beat(
            progress=progress,
            phase="draining" if self._leaving else phase,
            busy_s=busy_s,
            uptime_s=time.monotonic() - self._started,
            detail=dict(self.detail),
        )

    def _gather(self, figures: Figures) -> None:
        """Put what changes by itself (in the port's thread)."""
        progress, _, busy_s = self.progress.report()
        say_role(figures, self._role, ready=not self.unready(), uptime_s=time.monotonic() - self._started)
        figures.put("joynexus_progress_total", self._role, value=progress)
        figures.put("joynexus_busy_seconds_total", self._role, value=busy_s)

    def _happened(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                match event:
                    case Work(packet):
                        self._take(packet)
                    case Drop(tasks):
                        self._drop(set(tasks))
                    case Answer(id, packet, failure):
                        answer = self._answers.pop(id, None)
                        if answer is None:
                            continue
                        if failure is not None:
                            answer.set_exception(JoyNexusError(failure, request_id=id))
                        elif packet is not None:
                            answer.set_result(packet)
                    case Said(level, what, values):
                        getattr(log, level)(what, **values)
                    case Leave():
                        log.info("told_to_leave")
                        self.leave()
                    case Misfit(why):
                        log.critical("registration_refused", why=why)
                        self._exit(EXIT_CONFIG)  # it speaks no protocol that the master does
            self._changed.notify_all()

    def _take(self, packet: Packet) -> None:
        """Queue work, unless it is here already: after a reconnection the master gives everything again."""
        key = _key(packet.message)
        if key is not None:
            if key in self._taken:
                return
            self._taken[key] = False
            self._cancelled.pop(key[0], None)
            while len(self._taken) > _REMEMBERED and self._taken[next(iter(self._taken))]:
                self._taken.popitem(last=False)
        self._work.append(packet)

    def _drop(self, tasks: set[str]) -> None:
        kept = [packet for packet in self._work if getattr(packet.message, "task", "") not in tasks]
        self._work.clear()
        self._work.extend(kept)
        self._cancelled.update(dict.fromkeys(tasks))
        while len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)
        for key in [key for key in self._taken if key[0] in tasks]:
            del self._taken[key]


def _key(message: Message) -> tuple[str, int] | None:
    task: str = getattr(message, "task", "")
    return (task, getattr(message, "attempt", 0)) if task else None
