"""What Prometheus reads of the master: the text, whole; and that no sum ever falls."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.metrics import MASTER, OTHERS, Figures, Tenants, render
from joynexus.wire.back import ClusterView, DemandRow, InstanceRow, JobRow, PolicyRow, UseRow
from joynexus.wire.front import LaneStatus, RoleStatus
from services.master.metrics import ClusterFigures, put_disks
from tests.unit.master.test_view import served
from tests.unit.master.world import World

GOLDEN = Path(__file__).with_name("metrics.txt")


def role(name: str, worker: str, phase: str = "idle", restarts: int = 0) -> RoleStatus:
    return RoleStatus(role=name, worker=worker, phase=phase, progress=7, busy_s=1.5, uptime_s=60.0, restarts=restarts)


def job(name: str, state: str) -> JobRow:
    return JobRow(tenant="acme", job=name, policy="secret-policy", kind="sft", state=state)


VIEW = ClusterView(
    at=1.0,
    server="secret-server",
    uptime_s=100.0,
    roles=(
        role("trainer", "trainer-1", "working", 1),
        role("env", "env-1"),
        role("env", "env-2"),
        role("env", "env-3", "lost"),
    ),
    lanes=(
        LaneStatus(queue="training", tenant="acme", waiting=3, running=1),
        LaneStatus(queue="env", tenant="acme", waiting=2, running=0),
        LaneStatus(queue="training", tenant='b"\\b', waiting=1, running=1, oldest_s=9.0),
    ),
    demand=(
        DemandRow(
            group="env:metaworld", role="env", need="metaworld", waiting=2, running=1, oldest_s=0.25, starved=True
        ),
        DemandRow(group="training:lite", role="trainer", need="lite", waiting=4, running=2, oldest_s=9.0),
    ),
    desired={"env:metaworld": 4},
    jobs=(job("secret-job", "running"), job("j2", "running"), job("j3", "done")),
    jobs_total=3,
    policies=(PolicyRow(tenant="acme", policy="secret-policy", backbone="lite"),),
    policies_total=41,
    use=(
        UseRow(tenant="acme", trainer_s=10.5, inference_s=2.25, env_s=0.0),
        UseRow(tenant="", trainer_s=0.5),
    ),
    counts={"rate": 5, "bug": 0},
)


def said(view: ClusterView, by: ClusterFigures | None = None) -> Figures:
    figures = Figures()
    (by or ClusterFigures()).put(view, figures)
    return figures


def test_text_of_a_cluster_is_this_one() -> None:
    text = render(said(VIEW)).decode()
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
        pytest.fail(f"{GOLDEN.name} was missing: look at it, and commit it")
    assert text == GOLDEN.read_text()


def test_no_name_of_a_policy_a_job_or_a_worker_is_told() -> None:
    text = render(said(VIEW)).decode()
    assert "secret" not in text
    assert "env-1" not in text


def test_only_metrics_of_the_master_are_put() -> None:
    assert said(VIEW).names() <= MASTER.keys()


def test_tenants_beyond_the_first_hundred_share_a_line() -> None:
    use = tuple(UseRow(tenant=f"t{number:03}", trainer_s=1.0) for number in range(250))
    figures = said(msgspec.structs.replace(VIEW, use=use, lanes=()))
    lines = figures.values("joynexus_tenant_device_seconds_total")
    assert len(lines) == 3 * 101
    assert lines[OTHERS, "trainer"] == 150.0


def test_use_of_a_tenant_stays_in_its_line_when_others_come() -> None:
    by = ClusterFigures()
    by._tenants = Tenants(most=2)
    first = msgspec.structs.replace(
        VIEW, lanes=(), use=(UseRow(tenant="m", trainer_s=1.0), UseRow(tenant="n", env_s=1.0))
    )
    more = msgspec.structs.replace(first, use=(UseRow(tenant="a", trainer_s=5.0), *first.use))
    before = said(first, by).values("joynexus_tenant_device_seconds_total")
    after = said(more, by).values("joynexus_tenant_device_seconds_total")
    assert {labels: after[labels] for labels in before} == before
    assert after[OTHERS, "trainer"] == 5.0


def test_restarts_are_summed_up_and_never_fall_when_processes_go() -> None:
    by = ClusterFigures()

    def restarts(*rows: tuple[str, str, int]) -> dict[tuple[str, ...], float]:
        instances = tuple(InstanceRow(name=name, role=role, restarts=count) for name, role, count in rows)
        return said(msgspec.structs.replace(VIEW, instances=instances), by).values("joynexus_restarts_total")

    assert restarts(("env", "env", 2), ("env-2", "env", 1), ("trainer", "trainer", 0)) == {
        ("env",): 3,
        ("trainer",): 0,
        ("inference",): 0,
    }
    assert restarts(("env", "env", 2), ("trainer", "trainer", 1)) == {("env",): 3, ("trainer",): 1, ("inference",): 0}
    assert restarts(("env", "env", 3), ("env-2", "env", 0), ("trainer", "trainer", 1))["env",] == 4


def test_a_disk_that_cannot_be_asked_is_left_out(tmp_path: Path) -> None:
    figures = Figures()
    put_disks(figures, {"journal": tmp_path, "blobs": tmp_path / "missing"})
    assert figures.values("joynexus_disk_free_bytes").keys() == {("journal",)}
    assert (
        figures.values("joynexus_disk_size_bytes")["journal",] >= figures.values("joynexus_disk_free_bytes")["journal",]
    )


def test_what_nobody_is_charged_with_is_told_beside_tenants_use() -> None:
    world = World()
    served(world, "a", "b")
    text = render(said(world.core.views.measured())).decode()
    for tenant in ("(service)", "a", "b"):
        assert f'joynexus_tenant_device_seconds_total{{role="trainer",tenant="{tenant}"}}' in text
