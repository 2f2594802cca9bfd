"""A local cluster is planned: free ports, keys, each role with settings that are checked; and started once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from joynexus import launch
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile
from joynexus.local import LocalCluster

ROOT = Path(__file__).resolve().parents[3]


def test_up_refuses_a_folder_in_which_a_cluster_runs(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()
    cluster.write_pid("health", os.getpid())
    with pytest.raises(ValueError, match=r"a cluster is up in .* already \(health is process \d+\)"):
        launch.up(tmp_path, launch.Options())
    cluster.forget("health")


def test_a_second_up_leaves_alone_what_the_first_one_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starting(cluster: LocalCluster, options: launch.Options, _: object) -> LocalCluster:
        with pytest.raises(ValueError, match=r"is at work in .* already: wait until it is done"):
            launch.up(tmp_path, options)
        return cluster

    monkeypatch.setattr(launch, "_up", starting)
    launch.up(tmp_path, launch.Options())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["up.lock"]
    launch.up(tmp_path, launch.Options())  # and it is nobody's once that one is done


def test_taken_ports_are_avoided_and_free_ones_kept(tmp_path: Path) -> None:
    first = launch.free_addresses(tmp_path)
    Keyring(tmp_path).prepare(first)
    assert launch.free_addresses(tmp_path) == first
    port = int(first.back_bulk.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        other = launch.free_addresses(tmp_path)
    assert len(set(msgspec.structs.astuple(other))) == 4
    assert other != first


def test_keys_of_a_new_cluster_let_its_owner_see_everything(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    launch.make_keys(cluster, Addresses())
    launch.make_keys(cluster, Addresses())  # again: nothing is replaced
    owner = ClusterFile.load(cluster.client_file)
    entry = Keyring(cluster.keys).registry.lookup(owner.keys().public)
    assert entry is not None
    assert (entry.tenant, entry.scope, entry.operator) == ("default", "all", True)
    assert cluster.client_file.stat().st_mode & 0o077 == 0


def test_plan_has_each_role_with_checked_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.settings import (
        DashboardSettings,
        EnvSettings,
        InferenceSettings,
        MasterSettings,
        RoleSettings,
        TrainerSettings,
        load_settings,
    )

    cluster = LocalCluster(tmp_path)
    options = launch.Options(trainers=2, inference=2, env_workers=2, image_side=64, simulator_processes=3, max_slots=5)
    plan = launch.make_plan(cluster, Addresses(), options, ROOT)
    assert {role.env["JOYNEXUS_METRICS"] for role in plan.roles} == {""}  # whatever is in the shell: it is one port
    names = ["master", "trainer", "trainer-2", "inference", "inference-2", "env", "env-2", "dashboard"]
    assert [role.name for role in plan.roles] == names
    kinds: dict[str, type[RoleSettings]] = {
        "master": MasterSettings, "trainer": TrainerSettings, "inference": InferenceSettings, "env": EnvSettings,
        "dashboard": DashboardSettings,
    }  # fmt: skip
    for role in plan.roles:
        with monkeypatch.context() as patch:
            for name in list(os.environ):
                if name.startswith("JOYNEXUS_"):
                    patch.delenv(name)
            for name, value in role.env.items():
                patch.setenv(name, value)
            settings = load_settings(kinds[role.role])
        assert settings.blobs_dir == tmp_path / "blobs"
        if isinstance(settings, TrainerSettings | InferenceSettings):
            assert settings.image_side == 64
            assert role.env["MKL_CBWR"].endswith(",STRICT")
        if isinstance(settings, TrainerSettings):
            assert settings.max_slots == 5
        if isinstance(settings, EnvSettings):
            assert settings.simulator_processes == 3


def test_dashboard_is_planned_unless_it_is_not_wanted_and_keeps_its_place(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()
    plan = launch.make_plan(cluster, Addresses(), launch.Options(), ROOT)
    (role,) = [role for role in plan.roles if role.role == "dashboard"]
    assert role.module == "services.health.dashboard"
    assert role.env["JOYNEXUS_LISTEN"].startswith("127.0.0.1:")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    moved = msgspec.structs.replace(role, env={**role.env, "JOYNEXUS_LISTEN": free})
    cluster.save_plan(msgspec.structs.replace(plan, roles=(*plan.roles[:-1], moved)))
    again = launch.make_plan(cluster, Addresses(), launch.Options(), ROOT)
    assert again.roles[-1].env["JOYNEXUS_LISTEN"] == free
    without = launch.make_plan(cluster, Addresses(), launch.Options(dashboard=False), ROOT)
    assert [role.role for role in without.roles] == ["master", "trainer", "inference", "env"]
