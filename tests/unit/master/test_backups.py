"""While a backup is made no blob goes, and what the backup refers to was decided before it began."""

from __future__ import annotations

import blake3
import pytest

from joynexus.specs import RlSpec
from joynexus.wire import ErrorCode
from joynexus.wire.front import (
    BackupBegin,
    BackupEnd,
    BackupTicket,
    CancelJobs,
    CreatePolicy,
    Done,
    JobInfo,
    JobList,
    ListJobs,
    SubmitJob,
)
from tests.unit.master.world import SPEC, World

BLOB = blake3.blake3(b"nobody refers to this").hexdigest()


def begin(world: World, ttl_s: float = 60.0) -> str:
    return world.ask(BackupBegin(ttl_s=ttl_s), BackupTicket, operator=True).ticket


def test_blobs_stay_until_all_backups_have_ended(world: World) -> None:
    assert world.core.unreferenced([BLOB]) == [BLOB]
    first, second = begin(world), begin(world)
    assert first != second
    world.ask(BackupEnd(ticket=first), Done, operator=True)
    assert world.core.unreferenced([BLOB]) == []
    world.ask(BackupEnd(ticket=second), Done, operator=True)
    assert world.core.unreferenced([BLOB]) == [BLOB]


def test_backup_of_whoever_was_killed_ends_by_itself(world: World) -> None:
    begin(world, ttl_s=10.0)
    world.wait(9.0)
    assert world.core.unreferenced([BLOB]) == []
    world.wait(2.0)
    assert world.core.unreferenced([BLOB]) == [BLOB]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e9, float("nan")])
def test_times_that_cannot_be_meant_are_refused(world: World, ttl_s: float) -> None:
    assert world.refused(BackupBegin(ttl_s=ttl_s), operator=True).code is ErrorCode.INVALID
    assert world.core.unreferenced([BLOB]) == [BLOB]


def test_only_operators_make_backups_and_cancel_others_jobs(world: World) -> None:
    for message in (BackupBegin(ttl_s=60.0), BackupEnd(ticket="t"), CancelJobs(tenant="acme")):
        assert world.refused(message).code is ErrorCode.FORBIDDEN


def test_ticket_is_given_once_the_journal_has_what_was_decided_before(world: World) -> None:
    world.auto_persist = False
    world.tell(CreatePolicy(policy="p", spec=SPEC), id="create")
    world.tell(BackupBegin(ttl_s=60.0), operator=True, id="begin")
    assert not world.answers("begin")
    assert world.core.unreferenced([BLOB]) == []
    world.auto_persist = True
    world.settle()
    assert world.answers("create")
    assert isinstance(world.answers("begin")[0], BackupTicket)


def test_operator_cancels_all_jobs_of_a_tenant_and_nobody_elses(world: World) -> None:
    for tenant in ("a", "b"):
        world.create(tenant=tenant)
        for key in ("1", "2"):
            world.ask(
                SubmitJob(key=key, spec=RlSpec(policy="p", env="metaworld/reach-v3", updates=2)), JobInfo, tenant=tenant
            )
    for _ in range(2):  # asked again: alike
        world.ask(CancelJobs(tenant="a"), Done, tenant="b", operator=True)
    world.crash()
    states = {tenant: {job.state for job in world.ask(ListJobs(), JobList, tenant=tenant).jobs} for tenant in "ab"}
    assert states["a"] == {"cancelled"}
    assert "cancelled" not in states["b"]
    world.ask(CancelJobs(tenant="nobody"), Done, operator=True)
