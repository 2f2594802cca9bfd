"""Which processes a rolling restart takes, in which order, and what it does not wait for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from joynexus import rolling
from joynexus.local import ClusterPlan, HealthReport, InstanceHealth, LocalCluster
from joynexus.rolling import chosen

NAMES = {"master": "master", "trainer": "trainer", "trainer-2": "trainer", "inference": "inference", "env": "env"}


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ((), ["trainer", "trainer-2", "inference", "env", "master", "health"]),
        (("master", "env"), ["env", "master"]),
        (("trainer",), ["trainer", "trainer-2"]),
        (("trainer-2", "trainer-2"), ["trainer-2"]),
        (("health", "inference"), ["inference", "health"]),
    ],
)
def test_workers_go_first_then_the_master_and_health_last(which: tuple[str, ...], expected: list[str]) -> None:
    assert chosen(NAMES, which) == expected


def test_an_unknown_role_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'trainer-3' is no role of this cluster: it has master, trainer, trainer-2"):
        chosen(NAMES, ["env", "trainer-3"])


@pytest.mark.parametrize("when", ["before its turn", "as it is restarted"])
def test_one_that_scaling_ends_meanwhile_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()
    cluster.save_plan(ClusterPlan(python="", root="", roles=()))
    pids = {"health": 1, "env": 2, "env-2": 3}

    def report() -> None:
        health = [InstanceHealth(name=n, role="env", state="running", pid=p) for n, p in pids.items() if n != "health"]
        cluster.save_health(HealthReport(pid=1, instances=tuple(health)))

    def end(_: LocalCluster, names: list[str], **__: object) -> list[str]:
        pids[names[0]] += 10
        if names == ["env-2"] or when == "before its turn":
            del pids["env-2"]
        report()
        return []

    report()
    client = MagicMock()
    client.__enter__.return_value.status.side_effect = lambda: SimpleNamespace(
        roles=[SimpleNamespace(pid=pid, phase="idle") for pid in pids.values()]
    )
    client.status = client.__enter__.return_value.status
    monkeypatch.setattr(rolling, "connect", lambda _: client)
    monkeypatch.setattr(LocalCluster, "running", lambda _, name: pids.get(name, 0))
    monkeypatch.setattr(LocalCluster, "end", end)
    assert rolling.restart(tmp_path, ["env"], timeout_s=5.0) == ["env", "env-2"]
    assert pids == {"health": 1, "env": 12}
