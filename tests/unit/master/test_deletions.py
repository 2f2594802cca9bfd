"""What a tenant deletes is gone, with its blobs; what something still needs stays; a name may be given again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from common.journal.journal import Journal, journal_url
from common.journal.records import Record
from joynexus.specs import EvaluateSpec, PipelineSpec
from joynexus.wire import ErrorCode, Message, failure
from joynexus.wire.back import TrainGroup
from joynexus.wire.front import (
    Act,
    CancelJob,
    DatasetInfo,
    DatasetSamples,
    DeleteDataset,
    DeletePolicy,
    DeleteVersion,
    Done,
    FileEntry,
    ForwardBackward,
    GetDataset,
    GetPolicy,
    JobInfo,
    OptimStep,
    PolicyInfo,
    Publish,
    PushDataset,
    ReleaseLease,
    SaveState,
    SubmitJob,
)
from services.master.core import MasterCore
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.acts import ACT, STATE
from tests.unit.master.jobs import sft
from tests.unit.master.world import FakeWorker, MemoryJournal, World, run

GONE = DeletePolicy(policy="p")


class Cluster:
    """A master with one worker of each kind; tenant `a` has policy `p` with two versions and a state."""

    def __init__(self) -> None:
        self.world = world = World()
        self.workers: tuple[FakeWorker, ...] = (
            FakeTrainer(world, new_incarnation(), key="t"),
            FakeInference(world, new_incarnation(), key="i"),
            FakeEnv(world, new_incarnation(), key="e"),
        )
        self.seq = itertools.count(1)
        world.create()
        self.lease = world.lease()
        for op in (Publish, Publish):
            self.op(op)
        self.op(SaveState, state="s")
        self.op(OptimStep)

    def op(self, make: type, **more: object) -> Message:
        id = self.world.tell(make(policy="p", lease=self.lease, seq=next(self.seq), **more))
        self.work()
        return self.world.answers(id)[-1]

    def work(self) -> None:
        run(*self.workers)

    def free(self) -> None:
        """Let go of the lease, and have all checkpointed that there is."""
        self.world.ask(ReleaseLease(policy="p", lease=self.lease), Done)
        self.world.wait(1.0)
        self.work()

    def restart(self) -> None:
        self.world.crash()
        for worker in self.workers:
            worker.connect()
        self.work()

    @property
    def core(self) -> MasterCore:
        return self.world.core

    def stored(self) -> int:
        return self.core._holdings.stored("a")

    def refusal(self, message: Message) -> ErrorCode:
        return self.world.refused(message).code


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_deleted_policy_is_gone_with_its_blobs_and_comes_not_back(cluster: Cluster) -> None:
    world = cluster.world
    cluster.free()
    before = cluster.stored()
    assert before > 0
    assert world.ask(GONE, Done) == Done()
    assert cluster.stored() == 0
    assert len(set(world.deleted)) >= 3, "two versions, a state and a checkpoint had blobs"
    for _ in range(2):
        assert cluster.refusal(GetPolicy(policy="p")) is ErrorCode.NOT_FOUND
        assert cluster.refusal(ACT) is ErrorCode.NOT_FOUND
        assert world.ask(GONE, Done) == Done(), "asked again, it is answered alike"
        assert [record for record in world.journal.load() if getattr(record, "policy", "") == "p" and
                type(record).__name__ != "UsageRecord"] == []  # fmt: skip
        cluster.restart()


def test_a_journal_on_disk_has_nothing_of_it_left_either(cluster: Cluster, tmp_path: Path) -> None:
    world = cluster.world
    push(world, "demos")
    cluster.work()
    cluster.free()
    world.upload("f" * 64)
    journal = Journal(journal_url(tmp_path / "journal.db"))
    records = [record for record in world.journal.load() if getattr(record, "tenant", "") == "a"]
    journal.append(records)
    kept = MemoryJournal.append

    def append(memory: MemoryJournal, more: Iterable[Record]) -> None:
        journal.append(more := list(more))
        kept(memory, more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryJournal, "append", append)
        world.ask(GONE, Done)
        world.ask(DeleteDataset(dataset="demos"), Done)
    left = {type(record).__name__ for record in journal.load()}
    journal.close()
    assert left <= {"UsageRecord", "BlobRecord", "LifeRecord"}


def test_a_deletion_is_told_once_it_is_on_disk_to_all_who_asked(cluster: Cluster) -> None:
    world = cluster.world
    cluster.free()
    world.auto_persist = False
    ids = [world.tell(GONE) for _ in range(2)]
    assert [world.answers(id) for id in ids] == [[], []]
    world.auto_persist = True
    world.settle()
    assert [world.answers(id) for id in ids] == [[Done()], [Done()]]


def test_a_policy_that_is_driven_or_needed_by_a_job_stays(cluster: Cluster) -> None:
    world = cluster.world
    assert cluster.refusal(GONE) is ErrorCode.CONFLICT, "a loop drives it"
    cluster.free()
    evaluate = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=2)
    for key, spec in (("e", evaluate), ("p", PipelineSpec(policy="p", stages=(evaluate,)))):
        job = world.ask(SubmitJob(key=key, spec=spec), JobInfo).job
        assert cluster.refusal(GONE) is ErrorCode.CONFLICT
        world.ask(CancelJob(job=job), JobInfo)
    cluster.work()
    assert world.ask(GONE, Done) == Done()
    cluster.restart()
    assert cluster.refusal(GetPolicy(policy="p")) is ErrorCode.NOT_FOUND


def test_a_policy_with_ops_under_way_is_deleted_once_they_are_done(cluster: Cluster) -> None:
    world = cluster.world
    world.tell(OptimStep(policy="p", lease=cluster.lease, seq=next(cluster.seq)))
    world.ask(ReleaseLease(policy="p", lease=cluster.lease), Done)
    assert cluster.refusal(GONE) is ErrorCode.UNAVAILABLE
    cluster.work()
    assert world.ask(GONE, Done) == Done()


def test_what_an_op_has_made_is_not_left_behind_by_a_deletion_that_comes_before_it_is_on_disk(cluster: Cluster) -> None:
    world = cluster.world
    world.tell(Publish(policy="p", lease=cluster.lease, seq=next(cluster.seq)))
    world.ask(ReleaseLease(policy="p", lease=cluster.lease), Done)
    world.auto_persist = False
    cluster.work()
    assert cluster.refusal(GONE) is ErrorCode.UNAVAILABLE
    world.auto_persist = True
    world.settle()
    cluster.work()
    assert world.ask(GONE, Done) == Done()
    assert cluster.stored() == 0


def test_a_policy_is_deleted_also_while_it_waits_for_a_trainer_to_have_room_again(cluster: Cluster) -> None:
    world, trainer = cluster.world, cluster.workers[0]
    assert isinstance(trainer, FakeTrainer)
    push(world, "demos")
    cluster.work()
    job = world.ask(SubmitJob(key="s", spec=sft(policy="q", steps=30)), JobInfo).job
    trainer.refuses = failure(ErrorCode.UNAVAILABLE, "the disk is full")
    cluster.work()
    world.ask(CancelJob(job=job), JobInfo)
    assert world.ask(DeletePolicy(policy="q"), Done) == Done()
    world.wait(5.0)
    cluster.work()
    assert cluster.refusal(GetPolicy(policy="q")) is ErrorCode.NOT_FOUND


def test_another_policy_of_the_name_begins_anew_whatever_a_trainer_or_inference_remembers(cluster: Cluster) -> None:
    world = cluster.world
    trainer = cluster.workers[0]
    old = world.ask(GetPolicy(policy="p"), PolicyInfo)
    cluster.free()
    world.ask(GONE, Done)
    cluster.restart()  # the trainer lives on, and hears of the new one from a master that knows of no other
    world.create()
    info = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert (info.next_seq, info.step, info.versions, info.states) == (1, 0, (), ())
    lives = {slot.life for send in trainer.received if isinstance(send, TrainGroup) for slot in send.slots}
    cluster.lease, cluster.seq = world.lease(), itertools.count(1)
    cluster.op(OptimStep)
    cluster.op(Publish)
    new = {slot.life for send in trainer.received if isinstance(send, TrainGroup) for slot in send.slots} - lives
    assert len(new) == 1
    info = world.ask(GetPolicy(policy="p"), PolicyInfo)
    assert [version.version for version in info.versions] == [1]
    assert old.versions
    world.tell(ACT, buffers=(STATE,))


def test_a_version_is_deleted_unless_it_serves_or_a_job_evaluates_it(cluster: Cluster) -> None:
    world = cluster.world
    assert cluster.refusal(DeleteVersion(policy="p", version=2)) is ErrorCode.CONFLICT, "it serves"
    spec = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=2, version=1)
    job = world.ask(SubmitJob(key="e", spec=spec), JobInfo).job
    assert cluster.refusal(DeleteVersion(policy="p", version=1)) is ErrorCode.CONFLICT, "it is evaluated"
    world.ask(CancelJob(job=job), JobInfo)
    cluster.work()
    before = cluster.stored()
    for _ in range(2):
        assert world.ask(DeleteVersion(policy="p", version=1), Done) == Done()
        assert cluster.stored() < before
        assert cluster.refusal(Act(policy="p", version=1, state=ACT.state, images=ACT.images,
                                   instructions=ACT.instructions)) is ErrorCode.NOT_FOUND  # fmt: skip
        cluster.restart()
    for number in (0, -1, 9, 2**63):
        assert world.ask(DeleteVersion(policy="p", version=number), Done) == Done(), "there is none"
    assert cluster.refusal(DeleteVersion(policy="none", version=1)) is ErrorCode.NOT_FOUND
    cluster.lease = world.lease()
    result = cluster.op(Publish)
    assert result.version == 3, "a number is not given again"  # type: ignore[attr-defined]


def test_a_data_set_is_deleted_unless_a_job_or_an_op_without_checkpoint_needs_it(cluster: Cluster) -> None:
    world = cluster.world
    push(world, "demos")
    cluster.work()
    delete = DeleteDataset(dataset="demos")
    job = world.ask(SubmitJob(key="s", spec=sft(policy="q", steps=30)), JobInfo).job
    assert cluster.refusal(delete) is ErrorCode.CONFLICT
    world.ask(CancelJob(job=job), JobInfo)
    cluster.work()
    world.wait(2.0)
    cluster.work()
    before = cluster.stored()
    if (refused := world.answers(world.tell(delete))[-1]) != Done():
        raise AssertionError(refused)
    assert cluster.stored() < before
    for _ in range(2):
        assert cluster.refusal(GetDataset(dataset="demos")) is ErrorCode.NOT_FOUND
        assert world.ask(delete, Done) == Done()
        cluster.restart()
    push(world, "demos")
    cluster.work()
    assert world.ask(GetDataset(dataset="demos"), DatasetInfo).state == "ready"


def test_a_data_set_of_which_another_name_stands_for_the_same_content_is_deleted_alone(cluster: Cluster) -> None:
    world = cluster.world
    for name in ("demos", "again"):
        push(world, name)
        cluster.work()
    world.ask(DeleteDataset(dataset="demos"), Done)
    assert world.ask(GetDataset(dataset="again"), DatasetInfo).state == "ready"
    manifest = world.core._catalog.find("a", "again").manifest
    assert world.core.may_read("a", manifest)


def test_a_data_set_that_a_loop_was_trained_on_stays_until_a_checkpoint_covers_that(cluster: Cluster) -> None:
    world = cluster.world
    push(world, "demos")
    cluster.work()
    samples = DatasetSamples(dataset="demos", indices=(0, 1))
    cluster.op(ForwardBackward, dataset=samples)
    assert cluster.refusal(DeleteDataset(dataset="demos")) is ErrorCode.CONFLICT
    cluster.op(OptimStep)
    cluster.free()
    world.ask(GONE, Done)
    assert world.ask(DeleteDataset(dataset="demos"), Done) == Done()


def test_a_data_set_may_be_deleted_while_it_is_prepared(cluster: Cluster) -> None:
    world = cluster.world
    push(world, "demos")
    assert world.ask(DeleteDataset(dataset="demos"), Done) == Done()
    cluster.work()
    assert cluster.refusal(GetDataset(dataset="demos")) is ErrorCode.NOT_FOUND
    push(world, "demos")
    cluster.work()
    assert world.ask(GetDataset(dataset="demos"), DatasetInfo).state == "ready"


def test_the_operators_data_set_is_not_a_tenants_to_delete() -> None:
    world = World()
    FakeEnv(world, new_incarnation(), key="e", mounted=("shared",))
    assert world.refused(DeleteDataset(dataset="shared")).code is ErrorCode.FORBIDDEN


def test_what_one_tenant_deletes_another_of_the_same_content_keeps(cluster: Cluster) -> None:
    world = cluster.world
    for tenant in ("a", "b"):
        push(world, "demos", tenant=tenant)
    cluster.work()
    world.ask(DeleteDataset(dataset="demos"), Done)
    assert world.ask(GetDataset(dataset="demos"), DatasetInfo, tenant="b").state == "ready"
    theirs = {digest for digest, _ in world.core._catalog.find("b", "demos").blobs}
    assert theirs.isdisjoint(world.deleted)


def push(world: World, name: str, *, tenant: str = "a") -> None:
    world.upload("f" * 64, tenant=tenant)
    entry = FileEntry(path="meta/info.json", digest="f" * 64, nbytes=10)
    world.ask(PushDataset(dataset=name, files=(entry,)), DatasetInfo, tenant=tenant)
