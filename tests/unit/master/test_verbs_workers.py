"""Every request of a worker: said twice it counts once, and nobody else's word counts for it.

Each row answers a piece of work that is with a worker in `Busy`. Clusters that differ only in what was said beside it
must look the same afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from joynexus.keys import KeyEntry
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, JobSpec
from joynexus.wire import Array, Buffer, ErrorCode, Failure, Message, back, failure, front
from joynexus.wire.front import FileEntry
from joynexus.wire.messages import BACK_REQUESTS
from services.master.commands import Send
from services.master.events import Peer
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer
from tests.unit.master.acts import ACT, STATE
from tests.unit.master.jobs import sft
from tests.unit.master.rl import rl
from tests.unit.master.test_verbs_garbage import GARBAGE, strings
from tests.unit.master.test_verbs_repeated import USE
from tests.unit.master.verbs import SOURCE, Scene, digest_of, plain
from tests.unit.master.world import FakeWorker

MADE = b"what a worker made"
BROKEN = failure(ErrorCode.BAD_DATA, "it cannot be read")
ROLES = ("trainer", "inference", "env", "health", "dashboard")


class Busy(Scene):
    """A scene in which work of every kind is with a worker, and unanswered."""

    env_credit: ClassVar[dict[str, int]] = {"simulator": 9, "data": 9}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dashboard = FakeWorker(self.world, "inc-dashboard", key="d", role="dashboard", credit={})
        self.health = FakeWorker(self.world, "inc-health", key="h", role="health", credit={})
        for worker in (self.dashboard, self.health):
            worker.role = worker.register_with["role"]

    def beat(self) -> None:
        super().beat()
        for worker in self.workers[:2] if hasattr(self, "health") else ():
            self.world.say(worker.peer, back.Beat(progress=1, phase="idle", busy_s=0.0))

    def session(self) -> str:
        """Let tenant `a` into the dashboard."""
        code = self.ask(front.OpenDashboard(), front.DashboardCode).code
        (viewer,) = self.say(self.dashboard, back.RedeemCode(code=code))
        assert isinstance(viewer, back.Viewer)
        return viewer.session

    def _furnish(self) -> None:
        ids = self.ids
        ids["file"] = self.upload(SOURCE)
        self.push("demos")
        self.env.work()
        for policy in ("p", "o"):
            self.world.create(policy)
            ids[policy] = self.ask(front.AcquireLease(policy=policy, holder="loop"), front.Lease).lease
        self.world.say_as("a", front.Publish(policy="p", lease=ids["p"], seq=1))
        self.trainer.work()
        self.inference.work()

    def _make_b(self) -> None:
        super()._make_b()
        ids, say = self.ids, self.world.say_as
        say("a", front.Publish(policy="o", lease=ids["o"], seq=1))
        self.trainer.work()  # and the version is offered
        say("a", front.OptimStep(policy="p", lease=ids["p"], seq=2), id="op")
        say("a", ACT, buffers=(STATE,), id="act")
        self.push("more", image_side=8)
        jobs: dict[str, JobSpec] = {
            "sft": sft(policy="s", steps=3),
            "evaluate": EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=2),
            "rl": rl(policy="r"),
            "errors": EvaluateDatasetSpec(policy="p", dataset="demos", episodes=(0,)),
        }
        for key, spec in jobs.items():
            self.ask(front.SubmitJob(key=key, spec=spec), front.JobInfo)
        self.world.wait(0.2)

    def push(self, name: str, **more: Any) -> None:
        entry = FileEntry(path="meta/info.json", digest=self.ids["file"], nbytes=len(SOURCE))
        self.ask(front.PushDataset(dataset=name, files=(entry,), **more), front.DatasetInfo)

    @property
    def workers(self) -> tuple[FakeWorker, ...]:
        return (self.dashboard, self.health, self.trainer, self.inference, self.env)

    def take(self, kind: type[Message]) -> Send:
        """Take a piece of work of a kind out of a worker's inbox: it is answered by the test."""
        for worker in self.workers:
            for send in worker.inbox:
                if type(send.message) is kind:
                    worker.inbox.remove(send)
                    return send
        raise AssertionError(f"no worker has a {kind.__name__}")

    def say(
        self, worker: FakeWorker, message: Message, buffers: tuple[Buffer, ...] = (), *, id: str = "said"
    ) -> list[Message]:
        """Have a worker say something, through the gate; return the answers that came at once."""
        bulk = type(message).__name__.startswith("Blob")
        peer = Peer("back_bulk", b"bulk") if bulk else worker.peer
        entry = KeyEntry(name=worker.key, public="", domain="worker", roles=(worker.role,))
        return self.world.speak(entry, peer, message, id=id, buffers=buffers)

    def go_on(self) -> None:
        """Everything but simulators goes on for a while."""
        for _ in range(3):
            self.world.wait(1.0)
            self.beat()
            self.trainer.work()
            self.inference.work()

    def seen(self, leave_out: tuple[type, ...] = ()) -> str:
        """What both tenants have, and what was answered to the requests that waited."""
        answers = [self.world.answers("op"), self.world.answers("act")]
        return plain([*(self.view(tenant, leave_out=leave_out) for tenant in ("a", "b")), answers])


Said = tuple[Message, tuple[Buffer, ...]]


def _trained(busy: Busy) -> Said:
    send = busy.take(back.TrainGroup)
    group = send.message
    assert isinstance(group, back.TrainGroup)
    (item,) = group.items
    done = busy.trainer._item(group, item, send)
    assert isinstance(done, back.TrainDone)
    return msgspec.structs.replace(done, last=True), ()


def _not_opened(busy: Busy) -> Said:
    group = busy.take(back.TrainGroup).message
    assert isinstance(group, back.TrainGroup)
    place: dict[str, Any] = {"task": group.task, "attempt": group.attempt, "tenant": "a", "policy": "p"}
    return back.SlotFailed(**place, error=failure(ErrorCode.INTERNAL, "no room"), last=True), ()


def _predicted(busy: Busy) -> Said:
    group = busy.take(back.PredictGroup).message
    assert isinstance(group, back.PredictGroup)
    actions = Array(dtype="<f4", shape=(1, 1, 2), frame=0)
    items = tuple(
        back.Predicted(request=item.request, version=item.version, actions=actions, rows=1) for item in group.items
    )
    done = back.PredictDone(task=group.task, attempt=group.attempt, items=items)
    return done, (np.zeros((1, 1, 2), np.float32).tobytes(),)


def _offered(make: Callable[..., Message], **more: Any) -> Callable[[Busy], Said]:
    def row(busy: Busy) -> Said:
        offer = busy.take(back.WeightsOffer).message
        assert isinstance(offer, back.WeightsOffer)
        return make(tenant=offer.tenant, policy=offer.policy, version=offer.version, **more), ()

    return row


def _done(kind: type[Message]) -> Callable[[Busy], Said]:
    return lambda busy: (busy.env.answer(busy.take(kind).message), ())


def _compared(busy: Busy) -> Said:
    asked = busy.take(back.EvaluateActions).message
    assert isinstance(asked, back.EvaluateActions)
    return back.ActionsEvaluated(task=asked.task, attempt=asked.attempt, error=BROKEN), ()


def _act(busy: Busy) -> Said:
    asked = busy.take(back.Rollout).message
    assert isinstance(asked, back.Rollout)
    act = msgspec.msgpack.encode(ACT)
    return back.WorkerAct(task=asked.task, attempt=asked.attempt, act=act), (STATE,)


def _supervised(busy: Busy) -> Said:
    row = back.InstanceRow(name="env", instance="host/env", role="env", state="running", restarts=2, reason="it ended")
    decision = back.Decision(at=1.0, group="env", before=1, after=2, reason="much waits")
    return back.Supervised(instances=(row,), decisions=(decision,), desired={"env": 2}), ()


def _register(busy: Busy) -> Said:
    return back.Register(incarnation=busy.env.incarnation, **busy.env.register_with), ()


def _chunk(busy: Busy) -> Said:
    busy.say(busy.env, front.BlobBegin(digest=digest_of(MADE), nbytes=len(MADE)))
    return front.BlobChunk(digest=digest_of(MADE), offset=0), (MADE,)


ROWS: dict[type[Message], Callable[[Busy], Said]] = {
    back.Register: _register,
    back.Beat: lambda busy: (back.Beat(progress=5, phase="working", busy_s=1.0), ()),
    back.Leaving: lambda busy: (back.Leaving(), ()),
    back.Gone: lambda busy: (back.Gone(), ()),
    front.BlobBegin: lambda busy: (front.BlobBegin(digest=digest_of(MADE), nbytes=len(MADE)), ()),
    front.BlobChunk: _chunk,
    front.BlobRead: lambda busy: (front.BlobRead(digest=busy.ids["file"], offset=0, length=4), ()),
    back.TrainDone: _trained,
    back.SlotFailed: _not_opened,
    back.PredictDone: _predicted,
    back.WeightsApplied: _offered(back.WeightsApplied),
    back.WeightsRefused: _offered(back.WeightsRefused, error=failure(ErrorCode.INTERNAL, "no memory")),
    back.DatasetPrepared: _done(back.PrepareDataset),
    back.IndicesDrawn: _done(back.SampleIndices),
    back.RolloutDone: _done(back.Rollout),
    back.SimulatorDescribed: _done(back.DescribeSimulator),
    back.ActionsEvaluated: _compared,
    back.WorkerAct: _act,
    front.Status: lambda busy: (front.Status(), ()),
    back.Supervised: _supervised,
    back.ViewCluster: lambda busy: (back.ViewCluster(), ()),
    back.ViewJob: lambda busy: (back.ViewJob(session=busy.session(), tenant="a", job="sft-1"), ()),
    back.RedeemCode: lambda busy: (
        back.RedeemCode(code=busy.ask(front.OpenDashboard(), front.DashboardCode).code),
        (),
    ),
    back.CloseSession: lambda busy: (back.CloseSession(session=busy.session()), ()),
}

RESULTS: set[type[Message]] = {
    back.TrainDone,
    back.SlotFailed,
    back.PredictDone,
    back.WeightsRefused,
    back.DatasetPrepared,
    back.IndicesDrawn,
    back.RolloutDone,
    back.SimulatorDescribed,
    back.ActionsEvaluated,
}
"""What answers a piece of work: it counts once, from the worker that has the work."""


def speaker(busy: Busy, verb: type[Message]) -> FakeWorker:
    roles = BACK_REQUESTS[verb]
    return next(worker for worker in reversed(busy.workers) if worker.role in roles)


def _name(verb: type[Message]) -> str:
    return verb.__name__


def parametrized(verbs: Iterable[type[Message]]) -> pytest.MarkDecorator:
    ordered: list[type[Message]] = sorted(verbs, key=_name)
    return pytest.mark.parametrize("verb", ordered, ids=_name)


def test_each_request_has_a_row() -> None:
    assert set(ROWS) == set(BACK_REQUESTS)


@parametrized(BACK_REQUESTS)
@pytest.mark.parametrize("how", ["at once", "later", "after it was connected again"])
def test_what_a_worker_says_twice_counts_once(verb: type[Message], how: str, tmp_path: Path) -> None:
    once, twice = Busy(tmp_path / "1"), Busy(tmp_path / "2")
    for busy in (once, twice):
        worker = speaker(busy, verb)
        message, buffers = ROWS[verb](busy)
        busy.say(worker, message, buffers)
        if how == "after it was connected again":
            inbox = list(worker.inbox)
            worker.connect()
            worker.inbox.clear()
            worker.inbox.extend(inbox)
        elif how == "later":
            busy.go_on()
        if busy is twice:
            again = busy.say(worker, message, buffers)
            if verb in RESULTS:
                (answer,) = again
                assert isinstance(answer, Failure)
                assert answer.code is ErrorCode.STALE
        busy.go_on()
    leave_out = USE if verb is back.WorkerAct else ()  # it acts each time
    assert twice.seen(leave_out) == once.seen(leave_out)


@parametrized(RESULTS | {back.WorkerAct, back.Register})
def test_nobody_answers_for_another_worker(verb: type[Message], tmp_path: Path) -> None:
    tried, quiet = Busy(tmp_path / "1"), Busy(tmp_path / "2")
    makers: dict[str, type[FakeWorker]] = {"trainer": FakeTrainer, "inference": FakeInference, "env": FakeEnv}
    for busy in (tried, quiet):
        role = speaker(busy, verb).role
        other = makers[role](busy.world, "inc-other", key="other", backbone_name="else")
        other.inbox.clear()
        message, buffers = ROWS[verb](busy)
        if busy is tried:
            (answer,) = busy.say(other, message, buffers)
            assert isinstance(answer, Failure)
            assert answer.code is (ErrorCode.CONFLICT if verb is back.Register else ErrorCode.STALE)
        busy.go_on()
    leave_out = (front.ClusterStatus,) if verb is back.Register else ()  # it has given up its own place
    assert tried.seen(leave_out) == quiet.seen(leave_out)


@parametrized(set(BACK_REQUESTS) - {back.Register, front.BlobBegin, front.BlobChunk, front.BlobRead, front.Status})
def test_who_has_not_registered_is_told_to_and_changes_nothing(verb: type[Message], tmp_path: Path) -> None:
    tried, quiet = Busy(tmp_path / "1"), Busy(tmp_path / "2")
    for busy in (tried, quiet):
        worker = speaker(busy, verb)
        message, buffers = ROWS[verb](busy)
        if busy is tried:
            entry = KeyEntry(name=worker.key, public="", domain="worker", roles=(worker.role,))
            (answer,) = busy.world.speak(entry, Peer("back", b"new"), message, id="said", buffers=buffers)
            assert isinstance(answer, Failure)
            assert answer.code is ErrorCode.NOT_REGISTERED
        busy.go_on()
    assert tried.seen() == quiet.seen()


@parametrized(BACK_REQUESTS)
def test_a_key_of_another_role_may_not_say_it(verb: type[Message], tmp_path: Path) -> None:
    busy = Busy(tmp_path)
    message, buffers = ROWS[verb](busy)
    before = busy.seen()
    bulk = type(message).__name__.startswith("Blob")
    peer = Peer("back_bulk", b"bulk") if bulk else speaker(busy, verb).peer
    keys = [
        KeyEntry(name="k", public="", domain="worker", roles=(role,))
        for role in ROLES
        if role not in BACK_REQUESTS[verb]
    ]
    keys.append(KeyEntry(name="k", public="", domain="tenant", tenant="a", operator=True))
    for number, key in enumerate(keys):
        (answer,) = busy.world.speak(key, peer, message, id=f"said-{number}", buffers=buffers)
        assert isinstance(answer, Failure)
        assert answer.code is ErrorCode.FORBIDDEN
    assert busy.seen() == before


@parametrized(BACK_REQUESTS)
def test_garbage_of_a_worker_changes_nothing_for_a_tenant_without_work(verb: type[Message], tmp_path: Path) -> None:
    busy = Busy(tmp_path)
    worker = speaker(busy, verb)
    message, buffers = ROWS[verb](busy)
    before = plain(busy.view("b", leave_out=(front.ClusterStatus,)))
    for path, put in strings(message):
        for what, garbage in GARBAGE.items():
            answers = busy.say(worker, put(garbage), buffers)
            assert len(answers) <= 1, f"{path}: {what}"
            assert all(len(answer.message) < 700 for answer in answers if isinstance(answer, Failure))
    assert plain(busy.view("b", leave_out=(front.ClusterStatus,))) == before
