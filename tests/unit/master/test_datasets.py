"""Data sets: by name, checked once, nobody else's."""

from __future__ import annotations

import pytest

from common.journal.records import DatasetRecord
from joynexus.datasets import Fault
from joynexus.wire import ErrorCode, Failure, failure
from joynexus.wire.back import DatasetPrepared, PrepareDataset
from joynexus.wire.front import (
    Accepted,
    BlobOffset,
    CancelJob,
    DatasetInfo,
    DatasetList,
    DatasetSamples,
    FileEntry,
    ForwardBackward,
    GetDataset,
    GetJob,
    GetUsage,
    JobInfo,
    ListDatasets,
    PushDataset,
    SubmitJob,
    UsageReport,
)
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeEnv, FakeTrainer, new_incarnation
from tests.unit.master.jobs import sft
from tests.unit.master.world import MANIFEST, World, run

FILE, OTHER = "f" * 64, "e" * 64


def pushed(*files: tuple[str, str], name: str = "demos", side: int = 0) -> PushDataset:
    entries = tuple(FileEntry(path=path, digest=digest, nbytes=10) for path, digest in files)
    return PushDataset(dataset=name, files=entries, image_side=side)


ONE = pushed(("meta/info.json", FILE))


@pytest.fixture
def world() -> World:
    world = World()
    world.upload(FILE)
    return world


def get(world: World, name: str = "demos", *, tenant: str = "a") -> DatasetInfo:
    return world.ask(GetDataset(dataset=name), DatasetInfo, tenant=tenant)


def prepares(env: FakeEnv) -> list[PrepareDataset]:
    return [task for task in env.tasks if isinstance(task, PrepareDataset)]


def test_a_pushed_set_is_checked_and_then_ready(world: World) -> None:
    assert world.ask(ONE, DatasetInfo).state == "checking"
    env = FakeEnv(world, new_incarnation())
    run(env)
    ready = get(world)
    assert (ready.state, ready.episodes, ready.steps) == ("ready", 4, 200)
    assert ready.digest == MANIFEST.digest()
    assert ready.contract == MANIFEST.contract
    assert ready.instructions == ("go",)
    assert not ready.shared
    assert ready.nbytes == 10 + 10 + 50


def test_a_set_that_was_ready_is_ready_after_a_restart(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    run(FakeEnv(world, new_incarnation()))
    before = get(world)
    world.crash()
    assert get(world) == before


def test_a_set_that_could_not_be_read_for_a_passing_reason_is_tried_again(world: World) -> None:
    world.tell(ONE)
    env = FakeEnv(world, new_incarnation())
    task = env.inbox.popleft().message
    assert isinstance(task, PrepareDataset)
    full = failure(ErrorCode.UNAVAILABLE, "the disk is full")
    world.say(env.peer, DatasetPrepared(task=task.task, attempt=task.attempt, error=full))
    assert get(world).state == "checking"
    world.wait(1.5)
    run(env)
    assert get(world).state == "ready"


def test_a_list_of_files_that_cannot_be_passed_on_is_refused(world: World) -> None:
    files = tuple((f"data/{'x' * 300}{n}", FILE) for n in range(2620))
    refused = world.refused(pushed(*files))
    assert refused.code is ErrorCode.TOO_LARGE
    assert "fewer, larger files" in refused.message


def test_a_set_that_was_being_checked_is_checked_after_a_restart(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    world.crash()
    env = FakeEnv(world, new_incarnation())
    run(env)
    assert len(prepares(env)) == 1
    assert get(world).state == "ready"


def test_faults_are_told_in_full_and_jobs_are_refused_with_the_first(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    env = FakeEnv(world, new_incarnation())
    task = env.inbox.popleft().message
    assert isinstance(task, PrepareDataset)
    faults = (
        Fault(severity="warning", where="meta", what="odd"),
        Fault(severity="error", where="data/chunk-000/episode_000003.parquet", what="the file is truncated"),
    )
    world.say(env.peer, DatasetPrepared(task=task.task, attempt=1, faults=faults))
    faulty = get(world)
    assert (faulty.state, faulty.faults) == ("faulty", faults)
    refused = world.refused(SubmitJob(key="k", spec=sft()))
    assert refused.code is ErrorCode.BAD_DATA
    assert "episode_000003.parquet: the file is truncated" in refused.message


def test_a_job_whose_set_turns_out_faulty_ends_with_the_first_fault(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    job = world.ask(SubmitJob(key="k", spec=sft()), JobInfo).job
    env = FakeEnv(world, new_incarnation())
    task = env.inbox.popleft().message
    assert isinstance(task, PrepareDataset)
    faults = (Fault(severity="error", where="meta/info.json", what="it is missing"),)
    world.say(env.peer, DatasetPrepared(task=task.task, attempt=1, faults=faults))
    failed = world.ask(GetJob(job=job), JobInfo)
    assert failed.state == "failed"
    assert "meta/info.json: it is missing" in failed.message


def test_the_same_content_is_not_prepared_again_under_any_name(world: World) -> None:
    env = FakeEnv(world, new_incarnation())
    world.ask(ONE, DatasetInfo)
    run(env)
    assert world.ask(ONE, DatasetInfo).state == "ready"
    twin = world.ask(pushed(("meta/info.json", FILE), name="twin"), DatasetInfo)
    assert (twin.state, twin.dataset) == ("ready", "twin")
    run(env)
    assert len(prepares(env)) == 1


def test_another_content_or_size_makes_the_name_point_there(world: World) -> None:
    env = FakeEnv(world, new_incarnation())
    world.ask(ONE, DatasetInfo)
    run(env)
    world.upload(OTHER)
    assert world.ask(pushed(("meta/info.json", OTHER)), DatasetInfo).state == "checking"
    run(env)
    assert world.ask(pushed(("meta/info.json", OTHER), side=32), DatasetInfo).state == "checking"
    run(env)
    assert [(task.files[0].digest, task.image_side) for task in prepares(env)] == [(FILE, 0), (OTHER, 0), (OTHER, 32)]


def test_a_jobs_data_stay_until_it_ends_though_another_content_is_pushed_under_their_name(world: World) -> None:
    env = FakeEnv(world, new_incarnation())
    world.ask(ONE, DatasetInfo)
    run(env)
    data = ["m" * 64, "b" * 64]
    job = world.ask(SubmitJob(key="k", spec=sft()), JobInfo)
    world.upload(OTHER)
    world.ask(pushed(("meta/info.json", OTHER)), DatasetInfo)
    assert world.core.unreferenced(data) == []
    world.crash()
    assert get(world).state == "checking"
    assert world.core.unreferenced(data) == []
    assert world.ask(CancelJob(job=job.job), JobInfo).state == "cancelled"
    assert world.core.unreferenced(data) == data


def test_a_check_that_another_push_overtook_changes_nothing(world: World) -> None:
    env = FakeEnv(world, new_incarnation())
    world.ask(ONE, DatasetInfo)
    first = env.inbox.popleft()
    world.upload(OTHER)
    world.ask(pushed(("meta/info.json", OTHER)), DatasetInfo)
    env.do(first)
    assert get(world).state == "checking"
    run(env)
    assert get(world).state == "ready"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../secret", "a/../../b", "", "a//b", "./a", "a\\b", "x" * 500, "x" * 300, "a\0b"]
)
def test_paths_lie_inside_the_set(world: World, path: str) -> None:
    assert world.refused(pushed((path, FILE))).code is ErrorCode.INVALID


def test_files_must_have_been_uploaded_by_the_same_tenant(world: World) -> None:
    refused = world.refused(ONE, tenant="b")
    assert refused.code is ErrorCode.NOT_FOUND
    assert "upload it" in refused.message


def test_a_set_without_files_or_with_one_twice_is_refused(world: World) -> None:
    for message in (pushed(), pushed(("a", FILE), ("a", FILE))):
        assert world.refused(message).code is ErrorCode.INVALID


def test_a_set_of_another_tenant_is_not_found(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    assert world.refused(GetDataset(dataset="demos"), tenant="b").code is ErrorCode.NOT_FOUND
    assert world.ask(ListDatasets(), DatasetList, tenant="b").datasets == ()


def test_a_mounted_set_is_everybodys_and_is_prepared_on_first_use(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), mounted=("library",))
    listed = world.ask(ListDatasets(), DatasetList).datasets
    assert [(info.dataset, info.shared, info.state) for info in listed] == [("library", True, "checking")]
    assert not env.inbox, "listing is not using"
    assert get(world, "library").state == "checking"
    run(env)
    for tenant in ("a", "b"):
        assert get(world, "library", tenant=tenant).state == "ready"
    assert [task.mounted for task in prepares(env)] == ["library"]


def test_a_job_on_a_mounted_set_waits_through_a_restart_for_a_worker_that_has_it(world: World) -> None:
    FakeEnv(world, new_incarnation(), mounted=("library",)).die()
    job = world.answers(world.tell(SubmitJob(key="k", spec=sft(dataset="library"))))[0].job  # type: ignore[attr-defined]
    world.crash()
    assert world.ask(GetJob(job=job), JobInfo).state == "waiting"
    env = FakeEnv(world, new_incarnation(), mounted=("library",))
    trainer = FakeTrainer(world, new_incarnation(), key="t")
    run(env, trainer)
    assert world.ask(GetJob(job=job), JobInfo).state == "succeeded"
    (item, *_) = [item for group in trainer.groups for item in group.items]
    assert item.feature_scope == "shared:library"


def test_a_tenants_own_set_comes_before_a_mounted_one_of_that_name(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), mounted=("demos",))
    world.ask(ONE, DatasetInfo)
    run(env)
    assert not get(world).shared
    assert get(world, tenant="b").shared


def test_a_faulty_mounted_set_is_looked_at_again_when_its_worker_comes_back(world: World) -> None:
    env = FakeEnv(world, new_incarnation(), mounted=("library",))
    get(world, "library")
    task = env.inbox.popleft().message
    assert isinstance(task, PrepareDataset)
    world.say(
        env.peer,
        DatasetPrepared(task=task.task, attempt=1, faults=(Fault(severity="error", where="x", what="broken"),)),
    )
    assert get(world, "library").state == "faulty"
    env.die()
    world.wait(8)
    again = FakeEnv(world, new_incarnation(), mounted=("library",))
    run(again)
    assert get(world, "library").state == "ready"


def test_a_set_that_kills_its_workers_is_faulty_with_the_reason(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    for life in range(3):
        FakeEnv(world, new_incarnation(), key=str(life)).die()
        world.wait(8)
    faulty = get(world)
    assert faulty.state == "faulty"
    assert "3 workers died" in faulty.faults[0].what


def test_samples_by_reference_are_resolved_when_the_op_is_accepted(world: World) -> None:
    env = FakeEnv(world, new_incarnation())
    world.ask(ONE, DatasetInfo)
    world.create()
    lease = world.lease()

    def op(*indices: int) -> ForwardBackward:
        return ForwardBackward(policy="p", lease=lease, seq=1, dataset=DatasetSamples(dataset="demos", indices=indices))

    assert world.refused(op(0)).code is ErrorCode.UNAVAILABLE
    run(env)
    assert "between 0 and 199" in world.refused(op(200)).message
    assert world.refused(op()).code is ErrorCode.INVALID
    world.ask(op(0, 199), Accepted)
    trainer = FakeTrainer(world, new_incarnation(), key="t")
    item = trainer.inbox[0].message.items[0]  # type: ignore[attr-defined]
    assert item.dataset == DatasetSamples(dataset="m" * 64, indices=(0, 199))
    assert item.feature_scope == "tenant:a"


# Blobs


def test_an_upload_is_acknowledged_only_once_it_is_known_whose_it_is(world: World) -> None:
    world.auto_persist = False
    assert world.upload(OTHER) == []
    assert not world.core.may_read("a", OTHER)
    world.auto_persist = True
    world.settle()
    assert world.answers("u")[-1] == BlobOffset(digest=OTHER, offset=10, complete=True)
    assert world.core.may_read("a", OTHER)


def test_whose_a_blob_is_is_known_after_a_restart(world: World) -> None:
    world.crash()
    assert world.core.may_read("a", FILE)
    assert not world.core.may_read("b", FILE)


def test_a_tenant_over_its_quota_is_refused_with_the_numbers() -> None:
    world = World(CoreConfig(quota_bytes=100))
    world.upload(FILE, 60)
    refused = world.core.refuse_upload("a", OTHER, 60)
    assert refused is not None
    assert refused.code is ErrorCode.TOO_LARGE
    assert "quota of 100 bytes" in refused.message
    assert world.core.refuse_upload("a", FILE, 60) is None, "it is there already"
    assert world.core.refuse_upload("b", OTHER, 60) is None
    (answer,) = world.upload(OTHER, 60)
    assert answer == refused
    assert world.deleted == [OTHER]


def test_an_upload_that_nobody_uses_goes_after_a_day_and_one_in_use_stays(world: World) -> None:
    world.upload(OTHER)
    world.ask(ONE, DatasetInfo)
    world.wait(86_500, step=3600)
    assert world.deleted == [OTHER]
    assert not world.core.may_read("a", OTHER)
    assert world.core.may_read("a", FILE)


def test_equal_blobs_of_two_tenants_are_deleted_with_the_last(world: World) -> None:
    world.wait(3600, step=600)
    world.upload(FILE, tenant="b")
    world.wait(83_000, step=3600)
    assert world.deleted == []
    assert not world.core.may_read("a", FILE)
    world.wait(5_000, step=600)
    assert world.deleted == [FILE]


def test_kept_bytes_are_in_the_usage_report(world: World) -> None:
    (line,) = world.ask(GetUsage(), UsageReport).lines
    assert (line.bytes_stored, line.bytes_in) == (10, 10)


def test_a_push_that_the_disk_refuses_was_never_there_and_is_taken_once_there_is_room(world: World) -> None:
    push = pushed(("meta/info.json", FILE), ("data/a", OTHER))
    why = "because the service cannot write to its disk (the disk is full): try again later"
    world.journal.full = True
    (refused,) = world.upload(OTHER)
    assert isinstance(refused, Failure)
    assert (refused.code, refused.message) == (ErrorCode.UNAVAILABLE, f"the blob was not accepted {why}")
    assert refused.retry_after_ms
    assert not world.core.may_read("a", OTHER)
    refused = world.refused(ONE)
    assert (refused.code, refused.message) == (ErrorCode.UNAVAILABLE, f"data set 'demos' was not accepted {why}")
    assert refused.retry_after_ms
    world.journal.full = False
    assert world.refused(GetDataset(dataset="demos")).code is ErrorCode.NOT_FOUND
    assert not world.journal.of(DatasetRecord)
    assert world.upload(OTHER) == [BlobOffset(digest=OTHER, offset=10, complete=True)]
    assert world.ask(push, DatasetInfo).state == "checking"


def test_a_manifest_that_cannot_be_read_makes_the_set_faulty_not_the_master(world: World) -> None:
    world.ask(ONE, DatasetInfo)
    env = FakeEnv(world, new_incarnation())
    world.manifests.clear()
    run(env)
    assert get(world).state == "faulty"
