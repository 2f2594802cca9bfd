"""The master's shell: one loop that moves frames between sockets and the core, and threads for what takes long.

In: settings. Out: a running master. Never: a decision about tenants' work (the core makes them), a decoded buffer, an
`await`, or a wait for anything but the next thing to happen.

    front, back  ──► gate ──► core ──► send at once
                               │  ▲
                     records   ▼  │  "on disk"        the journal's thread (commit.py)
                     questions ◄──►  blobs            the thread of the bulk sockets (bulk.py)
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import zmq

from common.blobs import BlobStore
from common.descriptors import Doorkeeper, bounds, raise_limit
from common.failpoints import failpoint
from common.journal.journal import Journal, journal_url
from common.journal.records import Record
from common.metrics import Figures
from common.progress import Progress, Watchdog
from common.refusals import Refusals, owner_of
from common.settings import MasterSettings
from common.telemetry import get_logger
from common.transport import Authenticator
from common.wakeup import Wakeup
from joynexus.keys import KeyRegistry
from joynexus.prices import Prices, parse_prices
from joynexus.tenants import TenantLimits, parse_limits
from joynexus.transport import Context, Socket
from joynexus.wire import ErrorCode, Failure, Message, encode, failure, kind_of
from joynexus.wire.back import ClusterView
from joynexus.wire.front import OpResult
from services.master.bulk import BulkService, Question
from services.master.clock import Clock
from services.master.commands import Command, DeleteBlobs, Log, Persist, Send, Waited
from services.master.commit import Committer
from services.master.doors import look_up, open_doors, receive, send
from services.master.events import (
    BlobStored,
    Door,
    Event,
    FrontMessage,
    LimitsChanged,
    Peer,
    PricesChanged,
    Tick,
    Undeliverable,
)
from services.master.gate import BlobMessage, Refused
from services.master.guard import Guard
from services.master.make_core import make_core
from services.master.metrics import MetricsPort
from services.master.operator_file import OperatorFile
from services.master.oplog import OpLog
from services.master.reception import Reception
from services.master.sources import ShellSources
from services.master.unread import Unread

log = get_logger(__name__)

EXIT_THREAD = 70
"""Exit code when a thread of the master failed."""

LOOK_S = 1.0
"""The operator's limits, and the thread that lets peers in, are looked at so often."""

VIEW_S = 3.0
"""The loop is asked for a picture of the cluster for so long; then there are no metrics this time."""

CLOSE_S = 30.0
"""An orderly end that takes longer hangs."""

AT_ONCE = 32
"""Messages taken from one socket before the other gets its turn, the journal its records, and inference its groups."""


class MasterService:
    """A master on its sockets.

    Args:
        settings: of this master.

    Raises:
        ValueError: if keys are missing, an address is taken, or the journal is of a newer release.
        JournalDamagedError: if the journal does not hold what was written to it.
    """

    def __init__(self, settings: MasterSettings) -> None:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(settings.journal_url or journal_url(settings.state_dir / "journal.db"))
        blobs = settings.blobs_dir or settings.state_dir / "blobs"
        self._store = BlobStore(blobs)
        self._now = Clock()
        self._registry = KeyRegistry(settings.keys_dir / "registry.json")
        self._core = make_core(
            settings,
            ShellSources(self._journal, self._store),
            self._now(),
            self._all_counts,
            lambda key: look_up(self._registry, key) is not None,
        )
        keys, copies = settings.keys_dir, settings.state_dir / "last_good"
        self._limits = OperatorFile[dict[str, TenantLimits]](
            keys / "limits.json", copies, parse_limits, none={},
            unreadable=lambda why: log.error("limits_unreadable", why=why),
        )  # fmt: skip
        self._prices = OperatorFile[Prices | None](
            keys / "prices.toml", copies, parse_prices, none=None,
            unreadable=lambda why: log.error("prices_unreadable", why=why),
        )  # fmt: skip
        if self._prices.changed():
            self._core.handle(PricesChanged(prices=self._prices.value), self._now())
        if self._limits.changed():
            self._core.handle(LimitsChanged(limits=self._limits.value), self._now())
        # Before any door opens: nobody is answered by a master that cannot read its own memory.
        self._restored = self._core.restore(self._journal.load())
        self._guard = Guard(self._core)
        self._look_at = 0.0
        self._progress = Progress()
        self._watchdog = Watchdog(self._progress)
        self._stall_s = settings.stall_s
        self._context: Context = zmq.Context()
        self._authenticator = Authenticator(self._context, self._registry)
        self._wakeup = Wakeup()
        self._inbox: deque[Event] = deque()
        self._questions: deque[Question] = deque()
        self._unwritten: list[tuple[int, Sequence[Record]]] = []
        self._figures = Figures()
        self._serving = False
        self._oplog = OpLog(self._figures)
        self._stopping = False
        self.counts: Counter[str] = Counter()
        refusals = Refusals("message_refused", self.counts)
        self._reception = Reception(self._registry, settings.max_requests_per_s, refusals)
        disks = {"journal": settings.state_dir, "blobs": blobs}
        try:
            self._port = MetricsPort(settings.metrics, self._progress, self._figures, self, disks)
            sockets = open_doors(self._context, settings)
        except ValueError:
            self._authenticator.stop()
            self._context.term()
            raise
        self._unread: dict[Door, Unread] = {"front": Unread()}  # workers get no more than they have credit for
        self._sockets: dict[Door, Socket] = {door: sockets[door] for door in ("back", "front")}
        self._doorkeeper = Doorkeeper(
            self._context,
            sockets.values(),
            bounds=bounds(raise_limit(), of_one=settings.max_connections),
            owner_of=lambda key: owner_of(look_up(self._registry, key), key),
            failed=_give_up,
        )
        self._committer = Committer(self._journal, self._post_all, _give_up, self._figures)
        self._bulk = BulkService(
            {door: sockets[door] for door in ("back_bulk", "front_bulk")},
            self._registry,
            self._store,
            blobs / "uploads",
            max_uploads=settings.max_uploads,
            max_requests_per_s=settings.max_blob_requests_per_s,
            ask=self._ask,
            post=lambda event: self._post_all([event]),
            heard=self._doorkeeper.heard,
            failed=_give_up,
        )
        self._bound_rates()

    def run(self) -> None:
        """Serve until `stop`; then write what waits, answer it, and return. A loop that hangs ends the process."""
        self._watchdog.start()
        self._port.start()
        with self._progress.phase("serving", deadline_s=self._stall_s):
            self._serve()
        with self._progress.phase("closing", deadline_s=CLOSE_S):
            self._close()
        self._port.stop()
        self._watchdog.stop()

    def stop(self) -> None:
        """End `run`; safe from signal handlers and other threads."""
        self._stopping = True
        self._wakeup.set()

    def _serve(self) -> None:
        # The default of 5 ms would let the journal's thread hold up every message for so long.
        sys.setswitchinterval(0.0005)
        self._committer.start()
        self._bulk.start()
        self._run_commands(self._restored)
        self._restored = []
        # What the core keeps, it keeps long, and it has few cycles: searching all of it often is a waste.
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for opened in self._sockets.values():
            poller.register(opened, zmq.POLLIN)
        self._serving = True
        while not self._stopping:
            self._progress.advance()
            self._look_around()
            self._tell(Tick())
            self._flush()
            ready = dict(poller.poll(self._timeout_ms()))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            self._turn()

    def _turn(self) -> None:
        self._take_inbox()
        for door, opened in self._sockets.items():
            for peer, frames, key in receive(opened, door, at_once=AT_ONCE, heard=self._doorkeeper.heard):
                event = self._reception.take(peer, frames, key, self._now())
                if isinstance(event, Refused):
                    self._refuse(peer, event)
                elif event is not None and not isinstance(event, BlobMessage):  # those come through other doors
                    if isinstance(event, FrontMessage):
                        self._oplog.came(event, time.monotonic())
                    self._tell(event)

    def _look_around(self) -> None:
        """See whether peers are still let in, and tell the core of changed limits and prices (damaged change none)."""
        if self._now() < self._look_at:
            return
        self._look_at = self._now() + LOOK_S
        failpoint("master.look_around")
        if not self._authenticator.alive:
            log.critical("thread_failed", thread="authentication")
            _give_up()
        if self._prices.changed():
            self._tell(PricesChanged(prices=self._prices.value))
        if self._limits.changed():
            self._bound_rates()
            self._tell(LimitsChanged(limits=self._limits.value))

    def _bound_rates(self) -> None:
        """Have the doors count by the operator's limits."""
        limits = self._limits.value
        self._reception.change({tenant: limit.max_requests_per_s for tenant, limit in limits.items()})
        self._bulk.change({tenant: limit.max_blob_requests_per_s for tenant, limit in limits.items()})

    def _take_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            self._tell(event)
            if isinstance(event, BlobStored):
                self._bulk.taken(event.digest)
        while self._questions:
            self._questions.popleft()(self._core)

    def _tell(self, event: Event) -> None:
        """Have the core handle an event, and run what it commands; what cannot be sent is an event again."""
        for undeliverable in self._run_commands(self._guard.handle(event, self._now())):
            self._tell(undeliverable)

    def _run_commands(self, commands: Iterable[Command]) -> list[Undeliverable]:
        undeliverable = []
        for command in commands:
            outcome = self._run_command(command)
            if outcome is not None:
                undeliverable.append(outcome)
        return undeliverable

    def _run_command(self, command: Command) -> Undeliverable | None:
        match command:
            case Send():
                return self._send(command)
            case Persist():
                self._unwritten.append((command.token, command.records))
            case DeleteBlobs():
                self._bulk.delete(command.digests)
            case Waited():
                self._figures.observe("joynexus_queue_seconds", command.queue, value=command.seconds)
            case Log():
                getattr(log, command.level)(command.event, **command.fields)
        return None

    def _send(self, command: Send) -> Undeliverable | None:
        peer = command.peer
        if peer.door.endswith("_bulk"):
            self._bulk.reply(peer, command.message, id=command.id, re=command.re)
            return None
        try:
            frames = encode(
                command.message, id=command.id, re=command.re, deadline_ms=command.deadline_ms, buffers=command.buffers
            )
        except ValueError as error:  # one tenant's message that is too large must not take everybody down
            log.error("message_unsendable", kind=kind_of(command.message), re=command.re, why=str(error))
            if not command.re or isinstance(command.message, Failure):
                return None
            sentence = f"the answer does not fit into a message ({error}): ask for less at once"
            return self._send(
                Send(peer=peer, message=failure(ErrorCode.TOO_LARGE, sentence), id=command.id, re=command.re)
            )
        if command.re and peer.door == "front":
            self._oplog.goes(peer, command.re, command.message, time.monotonic())
        if type(command.message) is OpResult:
            failpoint("master.applied_before_reply")
        if send(self._sockets[peer.door], peer, frames, self._unread.get(peer.door)):
            return None
        self.counts["undeliverable"] += 1
        return Undeliverable(peer=peer, id=command.id)

    def _refuse(self, peer: Peer, refused: Refused) -> None:
        answer: Message = refused.failure
        frames = encode(answer, id=f"x{self.counts.total()}", re=refused.re)
        send(self._sockets[peer.door], peer, frames, self._unread.get(peer.door))

    def _all_counts(self) -> Counter[str]:
        """Return what all threads refused or failed at since the start, by kind."""
        # Each of them goes on counting; a copy is made at one moment.
        others = {"handshake": self._authenticator.refused, "bug": self._guard.faults.total()}
        return self.counts + Counter(self._bulk.counts) + Counter(self._doorkeeper.counts) + Counter(others)

    def _flush(self) -> None:
        if self._unwritten:
            self._committer.submit(self._unwritten)
            self._unwritten = []

    def _timeout_ms(self) -> int:
        if self._inbox or self._questions:
            return 0
        deadline = self._core.next_deadline()
        if deadline is None:
            return 1000
        return max(0, min(1000, int(1000 * (deadline - self._now())) + 1))

    def _close(self) -> None:
        log.info("stopping")
        self._flush()
        self._committer.stop()
        self._take_inbox()  # the last acknowledgements
        self._bulk.stop()
        for opened in self._sockets.values():
            opened.close(500)
        self._doorkeeper.stop()
        self._authenticator.stop()
        self._context.term()
        self._journal.close()

    # Called from other threads

    @property
    def writable(self) -> bool:
        """Return whether the journal takes records."""
        return self._committer.writable

    def unready(self) -> str:
        """Return why nothing can be acknowledged; empty if it can."""
        if self._stopping or not self._serving:
            return "stopping" if self._stopping else "starting"
        if not self.writable:
            return "the journal does not take records (see its log): nothing new is acknowledged"
        return ""

    def view(self) -> ClusterView:
        """Return the core's picture of the cluster; TimeoutError if the loop has no time for it."""
        view: Future[ClusterView] = Future()

        def look(_: object) -> None:
            try:
                view.set_result(self._core.views.measured())
            except Exception as error:  # whoever looks must not end what is looked at
                view.set_exception(error)

        self._ask(look)
        return view.result(VIEW_S)

    def _post_all(self, events: Sequence[Event]) -> None:
        self._inbox.extend(events)
        self._wakeup.set()

    def _ask(self, question: Question) -> None:
        self._questions.append(question)
        self._wakeup.set()


def _give_up() -> None:
    """End the process: a master without one of its threads is better started anew."""
    os._exit(EXIT_THREAD)
