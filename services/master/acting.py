"""The Inference queue: requests to act from robots, scripts and rollouts, in groups to the inference workers.

In: `Act` and `WorkerAct`, `PredictDone`. Out: `PredictGroup`, `Actions`. Never: a decoded picture: the request's body
and buffers go through as they came; or a group before everything that has come meanwhile is known, which is at the next
tick. `batching.py` decides when a group is sent, `act_groups.py` makes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

import msgspec

from common.journal.records import VersionRecord
from joynexus.wire import Buffer, ErrorCode, JoyNexusError, Message, failure, limits
from joynexus.wire.back import PredictDone, Predicted, WorkerAct
from joynexus.wire.front import Act
from services.master.act_groups import ActRequest, InferenceWorker, group_of, reply_to, rows_of
from services.master.batching import Batcher
from services.master.config import CoreConfig
from services.master.events import BackMessage, FrontMessage, Peer
from services.master.lanes import Counters
from services.master.limits import Limits, Pace
from services.master.metering import Account, Meter, bearer
from services.master.outbox import Outbox, refuse
from services.master.policies import Policies
from services.master.roster import Roster
from services.master.serving import Serving
from services.master.tasks import Task
from services.master.worker import Worker

_decode_act = msgspec.msgpack.Decoder(Act).decode

_MAX_BODY_BYTES = 512 * 1024
"""A request travels inside the body of a group."""
_MAX_WAIT_S = 3600.0
_FEW = 64


class Acting:
    """Requests that wait, groups that run.

    Args:
        limits: what tenants may have.
        counters: use by tenant.
        running_task: finds the env task for which a worker asks.
        check_budget: refuses what a tenant over its budget asks for.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        roster: Roster,
        policies: Policies,
        serving: Serving,
        meter: Meter,
        limits: Limits,
        counters: Counters,
        running_task: Callable[[BackMessage, str, int], Task],
        check_budget: Callable[[str], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._roster = roster
        self._policies = policies
        self._serving = serving
        self._meter = meter
        self._running_task = running_task
        self._check_budget = check_budget
        self._limits = limits
        self._counters = counters
        self._pace = Pace()
        self._batchers: dict[str, Batcher[ActRequest]] = {}  # by backbone
        self._workers: dict[str, dict[str, InferenceWorker]] = {}  # backbone -> name -> worker
        self._open: dict[tuple[Peer, str], ActRequest] = {}
        self._under_way: Counter[str] = Counter()  # open requests, by tenant
        self._nbytes: Counter[str] = Counter()  # and their bytes
        self._deadlines: list[tuple[float, int, ActRequest]] = []
        self._numbers = itertools.count()
        self._look = False  # something has happened: the next tick may have groups to send
        roster.add_staff("inference", self)

    # Messages

    def on_act(self, asked: FrontMessage, message: Act) -> None:
        """A tenant asks for actions."""
        self._check_budget(asked.tenant)
        policy = self._policies.get(asked.tenant, message.policy)
        if message.version:
            version = self._policies.version(asked.tenant, message.policy, message.version)
            if version.refused:
                raise refuse(ErrorCode.NOT_FOUND, f"version {version.version} cannot be served: {version.refused}")
        else:
            newest = self._serving.newest(policy)
            if newest is None:
                raise refuse(ErrorCode.NOT_FOUND, f"policy '{policy.name}' has no published version: publish one first")
            version = newest
        self._enqueue(asked, message, asked.body, version, asked.peer, trace=asked.header.id)

    def on_worker_act(self, said: BackMessage, message: WorkerAct) -> None:
        """A rollout asks for actions; its task says for whom and with which version."""
        self.act_for(said, self._running_task(said, message.task, message.attempt), message.act)

    def act_for(self, asked: FrontMessage | BackMessage, task: Task, body: bytes) -> None:
        """Whoever has a task asks for actions, with an encoded `Act`."""
        try:
            act = _decode_act(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise refuse(ErrorCode.INVALID, f"the request to act cannot be read: {error}") from error
        version = self._policies.version(task.tenant, task.policy, task.version)
        self._enqueue(asked, act, body, version, (asked.peer, task.id), task.scope, trace=task.job, job=task.job)

    def on_done(self, said: BackMessage, message: PredictDone) -> None:
        """A group is done: each asker gets its answer."""
        worker = self._roster.check(said, message.task, message.attempt)
        backbone = worker.register.backbone_name
        station = self._workers.get(backbone, {}).get(worker.name)
        if station is None or message.task not in station.groups:
            raise refuse(ErrorCode.INVALID, f"task '{message.task[:64]}' is no request to act")
        self._roster.take(worker, message.task)
        group = station.groups.pop(message.task)
        if any(item.error is None for item in message.items):
            self._batcher(backbone).device.note(rows_of(group), self._outbox.now - station.since)
        station.since = self._outbox.now
        waiting = {str(index): request for index, request in enumerate(group)}
        for item in message.items:
            request = waiting.pop(item.request, None)
            if request is not None:
                self._settle(worker, request, item)
                self._answer(request, *reply_to(item, said.buffers))
        missing = failure(ErrorCode.INTERNAL, "the inference worker left this request out: see its log")
        for request in waiting.values():
            self._answer(request, missing)
        self._look = True

    # Time

    def tick(self) -> None:
        """Send groups whose time has come; answer requests whose deadline has passed."""
        now = self._outbox.now
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.done:
                self._expire(request)
        self._look = False
        for backbone, batcher in self._batchers.items():
            self._pump(backbone, batcher)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do: at once if something has happened since the last one."""
        if self._look:
            return self._outbox.now
        due = [self._due(backbone, batcher) for backbone, batcher in self._batchers.items() if len(batcher)]
        if self._deadlines:
            due.append(self._deadlines[0][0])
        return min((at for at in due if at is not None), default=None)

    # Status

    def serves(self, backbone: str) -> bool:
        """Tell whether an inference worker with this backbone is there."""
        return any(True for _ in self._stations(backbone))

    def by_backbone(self) -> Iterator[tuple[str, Batcher[ActRequest], list[InferenceWorker]]]:
        """Yield each backbone with what waits for it and the workers that have it (for views)."""
        for backbone in sorted({*self._batchers, *self._workers}):
            yield backbone, self._batcher(backbone), [*self._workers.get(backbone, {}).values()]

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's requests that wait."""
        return sum(batcher.waiting(tenant) for batcher in self._batchers.values())

    def running(self, tenant: str) -> int:
        """Number of a tenant's requests that are with a worker."""
        return self._under_way[tenant] - self.waiting(tenant)

    def oldest(self, tenant: str) -> float | None:
        """When the oldest request of a tenant that waits came; None if none waits (for status)."""
        return min((at for batcher in self._batchers.values() for at in batcher.arrivals(tenant)), default=None)

    def tenants(self) -> Iterable[str]:
        """Tenants with requests here."""
        return self._under_way.keys()

    # Staff

    def joined(self, worker: Worker) -> None:
        """An inference worker is there."""
        backbone = worker.register.backbone_name
        station = InferenceWorker(worker, {}, self._outbox.now)
        self._workers.setdefault(backbone, {})[worker.name] = station
        self._look = True

    def leaving(self, worker: Worker) -> None:
        """It gets nothing new (`_stations` leaves it out)."""

    def lost(self, worker: Worker) -> None:
        """An inference worker is dead: its requests go to another one, each alone; deaths over one alone count."""
        backbone = worker.register.backbone_name
        station = self._workers[backbone].pop(worker.name)
        had = list(itertools.chain.from_iterable(station.groups.values()))
        for request in had:
            request.alone = True
            request.kills += len(had) == 1
            if request.kills >= self._config.kills:
                sentence = f"this request was set aside because {request.kills} inference workers died over it alone"
                self._answer(request, failure(ErrorCode.POISON, sentence))
            elif not request.done:
                self._batchers[backbone].give_back(request)
        self._look = True

    # Inside

    def _enqueue(
        self,
        asked: FrontMessage | BackMessage,
        act: Act,
        body: bytes,
        version: VersionRecord,
        session: Hashable,
        scope: str = "",
        *,
        trace: str,
        job: str = "",
    ) -> None:
        if (asked.peer, asked.header.id) in self._open:
            return  # asked again while it is under way
        policy = self._policies.get(version.tenant, version.policy)
        if len(body) > _MAX_BODY_BYTES:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"a request to act has at most {_MAX_BODY_BYTES} bytes besides its arrays, this one has {len(body)}: "
                "shorten the instructions",
            )
        rows = act.state.shape[0] if act.state.shape else 0
        if not 1 <= rows <= limits.MAX_ACT_ROWS:
            raise refuse(ErrorCode.INVALID, f"ask for 1 to {limits.MAX_ACT_ROWS} rows at once, not {rows}")
        if act.contract and act.contract != policy.contract_digest:
            raise refuse(
                ErrorCode.CONTRACT_MISMATCH,
                f"the asker's contract {act.contract[:64]} is not that of policy '{policy.name}' "
                f"({policy.contract_digest}): compare both with `joynexus.contract.first_difference`",
            )
        batcher = self._batcher(policy.spec.backbone)
        nbytes = len(body) + sum(memoryview(buffer).nbytes for buffer in asked.buffers)
        self._check_room(policy.tenant, nbytes)
        wait_s = min(asked.header.deadline_ms / 1000 or self._config.act_deadline_s, _MAX_WAIT_S)
        request = ActRequest(
            tenant=policy.tenant,
            session=session,
            rows=rows,
            nbytes=len(body),
            frames=len(asked.buffers),
            peer=asked.peer,
            re=asked.header.id,
            policy=policy,
            version=version.version,
            digest=version.digest,
            scope=scope,
            trace=trace,
            job=job,
            body=body,
            buffers=asked.buffers,
            held=nbytes,
            deadline=self._outbox.now + wait_s,
        )
        self._open[request.peer, request.re] = request
        self._under_way[request.tenant] += 1
        self._nbytes[request.tenant] += nbytes
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if len(self._deadlines) > 2 * len(self._open) + _FEW:  # most of them were answered long before
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        batcher.add(request, self._outbox.now)
        self._look = True

    def _check_room(self, tenant: str, nbytes: int) -> None:
        """Refuse a request for which a tenant's lane has no room."""
        waiting, limit = self.waiting(tenant), self._limits.max_waiting_acts(tenant)
        if waiting >= limit:
            sentence = f"{waiting} requests of this tenant wait already, {limit} may: ask again a little later"
            raise self._overloaded(tenant, sentence, limit)
        held, limit = self._nbytes[tenant], self._limits.max_act_bytes(tenant)
        if held + nbytes > limit and (held or not limit):  # whatever its size, one request alone is fine
            sentence = f"requests of this tenant with {held} bytes are under way, {limit} may: ask again a little later"
            raise self._overloaded(tenant, sentence, limit)

    def _overloaded(self, tenant: str, sentence: str, limit: int) -> JoyNexusError:
        return self._pace.overloaded(
            tenant,
            self._outbox.now,
            sentence,
            limit=limit,
            waiting=self.waiting(tenant),
            running=self.running(tenant),
        )

    def _pump(self, backbone: str, batcher: Batcher[ActRequest]) -> None:
        """Give groups to workers while it is time for one."""
        while len(batcher):
            free, busy = self._free(backbone), self._first_free(backbone, batcher)
            if free:
                since = min(station.since for station in free)
                station, group = free[0], batcher.group(self._outbox.now, since, workers=len(free))
            elif busy is not None:
                station, group = busy[1], batcher.group(self._outbox.now, None, free_at=busy[0])
            else:
                return
            if not group:
                return
            self._give(station, group)

    def _due(self, backbone: str, batcher: Batcher[ActRequest]) -> float | None:
        """When `_pump` has something to do if nothing else happens."""
        free, busy = self._free(backbone), self._first_free(backbone, batcher)
        if free:
            return batcher.due(self._outbox.now, min(station.since for station in free))
        return None if busy is None else batcher.due(self._outbox.now, None, free_at=busy[0])

    def _free(self, backbone: str) -> list[InferenceWorker]:
        return [station for station in self._stations(backbone) if not station.groups]

    def _first_free(self, backbone: str, batcher: Batcher[ActRequest]) -> tuple[float, InferenceWorker] | None:
        """Return the busy worker with credit that will be free first, and when; at once if nobody knows."""
        busy = [
            (station.free_at(batcher.device) or self._outbox.now, station)
            for station in self._stations(backbone)
            if 0 < len(station.groups) < station.worker.register.credit.get("predict", 1) and not station.suspects
        ]
        return min(busy, key=lambda pair: pair[0], default=None)

    def _give(self, station: InferenceWorker, group: list[ActRequest]) -> None:
        task = self._outbox.new_id()
        if not station.groups:
            station.since = self._outbox.now
        station.groups[task] = group
        for request in group:
            if not request.kills:
                self._outbox.waited("inference", request.arrived)
        self._roster.give(station.worker, task, 1, *group_of(task, group))

    def _settle(self, worker: Worker, request: ActRequest, item: Predicted) -> None:
        self._batcher(request.policy.spec.backbone).settle(request, item.busy_s)
        self._meter.worked(
            worker,
            bearer(Account(*request.policy.key, request.job), item.error),
            {
                "inference_s": item.busy_s,
                "samples": item.rows,
                "backbone_forwards": item.backbone_forwards,
                "bytes_in": request.held,
            },
        )

    def _answer(self, request: ActRequest, message: Message, buffers: tuple[Buffer, ...] = ()) -> None:
        if request.done:
            return
        request.done = True
        request.body, request.buffers = b"", ()  # its deadline may lie far ahead, and is remembered until then
        self._open.pop((request.peer, request.re), None)
        for counts, amount in ((self._under_way, 1), (self._nbytes, request.held)):
            counts[request.tenant] -= amount
            if not counts[request.tenant]:
                del counts[request.tenant]
        self._pace.moved(request.tenant, self._outbox.now)
        self._batcher(request.policy.spec.backbone).replied(request, self._outbox.now)
        self._outbox.send(request.peer, message, re=request.re, buffers=buffers)

    def _expire(self, request: ActRequest) -> None:
        backbone = request.policy.spec.backbone
        if self.serves(backbone):
            reason = failure(ErrorCode.DEADLINE, "the deadline passed before an inference worker was free")
        else:
            reason = failure(
                ErrorCode.UNAVAILABLE,
                f"no inference worker with backbone '{backbone}' is there now: is it running, or still loading?",
                retry_after_ms=1000,
            )
        self._batchers[backbone].drop(request)
        self._answer(request, reason)

    def _stations(self, backbone: str) -> Iterator[InferenceWorker]:
        stations = self._workers.get(backbone, {}).values()  # one without credit is about to say that it leaves
        return (s for s in stations if not s.worker.leaving and s.worker.register.credit.get("predict", 1) > 0)

    def _batcher(self, backbone: str) -> Batcher[ActRequest]:
        batcher = self._batchers.get(backbone)
        if batcher is None:
            batcher = self._batchers[backbone] = Batcher(
                self._counters,
                target_rows=self._config.batch_rows,
                max_rows=self._config.max_rows,
                wait_s=self._config.batch_wait_s,
            )
        return batcher
