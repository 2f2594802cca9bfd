"""Every request of a tenant may be asked again: after its answer was lost, through another connection, while it is
being carried out, before it is on disk. It is carried out once, and answered alike.

Two clusters are told the same, one of them more than once; what both say, and what both have, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from common.journal.records import UsageRecord
from joynexus.specs import EvaluateSpec
from joynexus.wire import Buffer, ErrorCode, Failure, Message, back, front, hosted
from joynexus.wire.front import FileEntry
from joynexus.wire.messages import FRONT_REQUESTS
from tests.unit.master.actors import FakeTrainer
from tests.unit.master.acts import ACT, STATE
from tests.unit.master.ops import BUFFERS, SAMPLES
from tests.unit.master.verbs import SOURCE, Scene, digest_of, plain
from tests.unit.master.world import CONTRACT, SPEC

NOW = "it tells how things are now"
USE = (UsageRecord, front.UsageReport)
FRESH = b"bytes that nobody has yet"


class Row(NamedTuple):
    """A request that can be carried out in a scene.

    Attributes:
        again: why a repetition may be answered otherwise; it must not do anything more nevertheless.
        renewed: it is carried out anew each time, which changes nothing but what is metered.
        then: code of the failure that says so, if that is how it is answered.
    """

    say: Callable[[Scene], Message]
    buffers: tuple[Buffer, ...] = ()
    operator: bool = False
    again: str = ""
    renewed: bool = False
    then: ErrorCode | None = None


def _entry(scene: Scene) -> tuple[FileEntry, ...]:
    return (FileEntry(path="meta/info.json", digest=scene.ids["file"], nbytes=len(SOURCE)),)


def _move(scene: Scene) -> Message:
    scene.ids["second"] = FakeTrainer(scene.world, "inc-trainer-2", key="t2")
    return front.MovePolicy(policy="p", trainer="trainer-2")


def _two_versions(scene: Scene) -> Message:
    lease = scene.ask(front.AcquireLease(policy="v2", holder="me"), front.Lease).lease
    for seq in (1, 2):
        scene.world.say_as("a", front.Publish(policy="v2", lease=lease, seq=seq))
        scene.trainer.work()
        scene.inference.work()
    return front.DeleteVersion(policy="v2", version=1)


def _another_set(scene: Scene) -> Message:
    scene.ask(front.PushDataset(dataset="other", files=_entry(scene), image_side=16), front.DatasetInfo)
    scene.env.work()
    return front.DeleteDataset(dataset="other")


def _done(scene: Scene) -> Message:
    ids = scene.ids
    episodes = tuple(front.EpisodeResult(seed=seed, success=True, steps=3, reward=1.0) for seed in range(5))
    done = back.RolloutDone(task=ids["task"], attempt=ids["attempt"], episodes=episodes)
    return hosted.HostDone(incarnation=ids["incarnation"], rollout=done)


def _host_act(scene: Scene) -> Message:
    ids, act = scene.ids, msgspec.msgpack.encode(ACT)
    return hosted.HostAct(incarnation=ids["incarnation"], task=ids["task"], attempt=ids["attempt"], act=act)


def _offer(scene: Scene) -> Message:
    return hosted.OfferEnvironment(name="else", incarnation="inc-2", credit=1, contract=CONTRACT, instruction="go")


def _chunk(scene: Scene) -> Message:
    scene.ask(front.BlobBegin(digest=digest_of(FRESH), nbytes=len(FRESH)), front.BlobOffset)
    return front.BlobChunk(digest=digest_of(FRESH), offset=0)


def _op(make: Callable[..., Message], **more: object) -> Callable[[Scene], Message]:
    return lambda scene: make(policy="p", lease=scene.ids["lease"], seq=4, **more)


ROWS: dict[type[Message], Row] = {
    front.Hello: Row(lambda scene: front.Hello(protocol_min=1, protocol_max=1, client="c")),
    front.Ping: Row(lambda scene: front.Ping()),
    front.GetPolicy: Row(lambda scene: front.GetPolicy(policy="p"), again=NOW),
    front.ListPolicies: Row(lambda scene: front.ListPolicies(), again=NOW),
    front.GetJob: Row(lambda scene: front.GetJob(job=scene.ids["job"]), again=NOW),
    front.ListJobs: Row(lambda scene: front.ListJobs(), again=NOW),
    front.GetDataset: Row(lambda scene: front.GetDataset(dataset="demos"), again=NOW),
    front.ListDatasets: Row(lambda scene: front.ListDatasets(), again=NOW),
    front.Status: Row(lambda scene: front.Status(), again=NOW),
    front.GetUsage: Row(lambda scene: front.GetUsage(), again=NOW),
    front.OpenDashboard: Row(lambda scene: front.OpenDashboard(), again="each code is another one"),
    front.GetVersion: Row(lambda scene: front.GetVersion(policy="p"), again=NOW),
    front.BlobRead: Row(lambda scene: front.BlobRead(digest=scene.ids["file"], offset=0, length=8), renewed=True),
    front.Act: Row(lambda scene: ACT, (STATE,), renewed=True),
    front.CreatePolicy: Row(lambda scene: front.CreatePolicy(policy="new", spec=SPEC)),
    front.AcquireLease: Row(lambda scene: front.AcquireLease(policy="v2", holder="me")),
    front.ReleaseLease: Row(lambda scene: front.ReleaseLease(policy="p", lease=scene.ids["lease"])),
    front.ForwardBackward: Row(_op(front.ForwardBackward, samples=SAMPLES), BUFFERS),
    front.OptimStep: Row(_op(front.OptimStep)),
    front.Publish: Row(_op(front.Publish)),
    front.SaveState: Row(_op(front.SaveState, state="t")),
    front.LoadState: Row(_op(front.LoadState, state="s")),
    front.LoadWeights: Row(lambda scene: _op(front.LoadWeights, weights=scene.ids["payload"])(scene)),
    front.SubmitJob: Row(
        lambda scene: front.SubmitJob(key="new", spec=EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=5)),
        again=NOW,
    ),
    front.CancelJob: Row(lambda scene: front.CancelJob(job=scene.ids["waiting"])),
    front.ResumeJob: Row(lambda scene: front.ResumeJob(job=scene.ids["parked"]), again=NOW),
    front.MovePolicy: Row(_move, operator=True),
    front.DrainWorker: Row(lambda scene: front.DrainWorker(worker="env-1"), operator=True),
    front.CancelJobs: Row(lambda scene: front.CancelJobs(tenant="a"), operator=True),
    front.BackupBegin: Row(lambda scene: front.BackupBegin(ttl_s=60.0), again="each is one more", operator=True),
    front.BackupEnd: Row(lambda scene: front.BackupEnd(ticket="t"), operator=True),
    front.DeletePolicy: Row(lambda scene: front.DeletePolicy(policy="v2")),
    front.DeleteVersion: Row(_two_versions),
    front.DeleteDataset: Row(_another_set),
    front.PushDataset: Row(
        lambda scene: front.PushDataset(dataset="new", files=_entry(scene), image_side=8), again=NOW
    ),
    front.BlobBegin: Row(lambda scene: front.BlobBegin(digest=digest_of(FRESH), nbytes=len(FRESH))),
    front.BlobChunk: Row(
        _chunk, (FRESH,), again="it is told to begin, and then that the blob is complete", then=ErrorCode.INVALID
    ),
    hosted.OfferEnvironment: Row(_offer),
    hosted.PullWork: Row(lambda scene: hosted.PullWork(incarnation=scene.ids["incarnation"])),
    hosted.HostAct: Row(_host_act, (STATE,), renewed=True),
    hosted.HostDone: Row(_done, again="it is told to drop it", then=ErrorCode.STALE),
    hosted.WithdrawEnvironment: Row(lambda scene: hosted.WithdrawEnvironment(incarnation=scene.ids["incarnation"])),
}


class Played:
    """A scene in which a request is asked."""

    def __init__(self, folder: Path, verb: type[Message]) -> None:
        self.scene = Scene(folder)
        self.scene.world.create("v2")
        self.row = ROWS[verb]
        self.message = self.row.say(self.scene)

    def ask(self, *, door: str = "") -> None:
        world, row = self.scene.world, self.row
        bulk = type(self.message).__name__.startswith("Blob")
        peer = world.new_peer("front_bulk" if bulk else "front") if door else None
        world.say_as("a", self.message, buffers=row.buffers, id="asked", operator=row.operator, peer=peer)

    def work(self) -> None:
        """Everything goes on for a while."""
        for _ in range(2):
            self.scene.work()
            self.scene.world.wait(0.5)
            self.scene.beat()
        self.scene.work()

    def restart(self) -> None:
        """The master dies and is started anew; its workers register again."""
        self.scene.world.crash()
        more = [self.scene.ids["second"]] if "second" in self.scene.ids else []
        for worker in (self.scene.trainer, self.scene.inference, self.scene.env, *more):
            worker.connect()

    @property
    def answers(self) -> list[Message]:
        return self.scene.world.answers("asked")

    def seen(self) -> str:
        """What the tenant has; where asking twice costs twice, without what that cost."""
        return plain(self.scene.view("a", leave_out=USE if self.row.renewed else ()))


@pytest.mark.parametrize("verb", FRONT_REQUESTS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("how", ["answer lost", "another connection", "under way", "not yet on disk"])
def test_asked_again_is_carried_out_once_and_answered_alike(verb: type[Message], how: str, tmp_path: Path) -> None:
    assert verb in ROWS, f"{verb.__name__} has no row: say how it is asked where it can be carried out"
    once, twice = Played(tmp_path / "1", verb), Played(tmp_path / "2", verb)
    once.ask()
    once.work()
    match how:
        case "answer lost":
            twice.ask()
            twice.work()
            twice.ask()
            if once.row.renewed:
                twice.work()
                once.work()
        case "another connection":
            twice.ask()
            twice.ask(door="another")
            twice.work()
        case "under way":
            for _ in range(3):
                twice.ask()
            twice.work()
        case _:
            twice.scene.world.auto_persist = False
            twice.ask()
            twice.ask()
            twice.scene.world.auto_persist = True
            twice.scene.world.settle()
            twice.work()
    assert twice.answers, "the request was asked"
    for answer in twice.answers:
        assert not isinstance(answer, Failure) or answer.code is once.row.then, answer
    assert any(not isinstance(answer, Failure) for answer in twice.answers)
    if not once.row.again:
        assert {plain(answer) for answer in twice.answers} == {plain(answer) for answer in once.answers}
    assert twice.seen() == once.seen()


FORGETS = (
    *(hosted.PullWork, hosted.HostAct, hosted.HostDone, hosted.WithdrawEnvironment),
    *(front.BlobBegin, front.BlobChunk),
)
"""What a master that was started anew does not know of: hosts, which offer again, and uploads under way."""

ASKED_AGAIN = (hosted.OfferEnvironment, front.MovePolicy, front.DrainWorker)
"""What is forgotten with the master, and to be asked for again."""


@pytest.mark.parametrize("verb", FRONT_REQUESTS, ids=lambda verb: verb.__name__)
def test_asked_again_after_the_master_was_restarted_is_carried_out_once_and_answered_alike(
    verb: type[Message], tmp_path: Path
) -> None:
    once, twice = Played(tmp_path / "1", verb), Played(tmp_path / "2", verb)
    for played in (once, twice):
        played.ask()
        played.work()
        played.restart()
    twice.ask()
    if verb in ASKED_AGAIN:
        once.ask()
    for played in (once, twice):
        played.work()
    *before, last = twice.answers
    assert before
    if isinstance(last, Failure):
        assert verb in FORGETS or last.code is once.row.then, last
        assert last.code in (ErrorCode.NOT_REGISTERED, ErrorCode.STALE, ErrorCode.INVALID)
    elif not once.row.again and not once.row.renewed:
        assert {plain(answer) for answer in twice.answers} == {plain(answer) for answer in once.answers}
    assert twice.seen() == once.seen()


def test_a_set_that_is_pushed_twice_before_it_is_on_disk_becomes_ready(tmp_path: Path) -> None:
    """It once stayed in `checking`: the second push took the place of the one that was being prepared."""
    played = Played(tmp_path, front.PushDataset)
    played.scene.world.auto_persist = False
    played.ask()
    played.ask()
    played.scene.world.auto_persist = True
    played.scene.world.settle()
    played.work()
    assert played.scene.ask(front.GetDataset(dataset="new"), front.DatasetInfo).state == "ready"


def test_a_resumed_job_may_be_resumed_again_and_another_may_not(tmp_path: Path) -> None:
    played = Played(tmp_path, front.ResumeJob)
    played.ask()
    assert played.scene.ask(played.message, front.JobInfo).state == "running"
    played.work()
    assert played.scene.ask(played.message, front.JobInfo).state == "succeeded"
    never_parked = front.ResumeJob(job=played.scene.ids["job"])
    assert played.scene.ask(never_parked, Failure).code is ErrorCode.CONFLICT
