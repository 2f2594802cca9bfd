"""The workload simulator: nothing is lost or counted twice, and the same seed gives the same run."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from benchmarks import _times, simulate
from benchmarks._isolated import Devices, rl_iteration
from benchmarks._many import arrivals
from benchmarks._simulated import Client, Cluster, Reuse, usage
from benchmarks._simulation import Future, Process, Simulation, Station, gather
from benchmarks._tenants import LIBERO, MANISKILL, POLICY, Rl, rl, sft

TIMES = _times.load()
SMALL = {
    "libero": msgspec.structs.replace(LIBERO, envs=16, chunks=6, batch=32, micro=16),
    "maniskill": msgspec.structs.replace(MANISKILL, envs=32, chunks=4, batch=64, micro=16),
}


class Run(msgspec.Struct):
    cluster: Cluster
    clients: dict[str, Client]
    ends: dict[str, float]
    metered: dict[str, dict[str, float]]


def run(reuse: Reuse = "datasets", *, tenants: tuple[str, ...] = ("libero", "maniskill", "sft")) -> Run:
    simulation = Simulation()
    cluster = Cluster(simulation, TIMES, reuse=reuse, dataset_steps=1000)
    clients = {tenant: Client(cluster, tenant) for tenant in tenants}

    def process(tenant: str) -> Process:
        if tenant == "sft":
            return sft(cluster, clients[tenant], 60)
        return rl(cluster, clients[tenant], SMALL[tenant], 2, seed=len(tenant))

    futures = {tenant: simulation.spawn(process(tenant)) for tenant in tenants}
    simulation.run(lambda: all(future.done for future in futures.values()))
    return Run(cluster, clients, {tenant: future.value for tenant, future in futures.items()}, usage(cluster, clients))


@pytest.fixture(scope="module")
def done() -> Run:
    return run()


def ops(recipe: Rl, iterations: int) -> int:
    return 1 + iterations * (recipe.samples // recipe.micro + recipe.samples // recipe.batch + 1)


def test_every_request_is_answered_once(done: Run) -> None:
    for client in done.clients.values():
        assert client.answered == client.asked


def test_every_op_is_applied_once(done: Run) -> None:
    applied = sum((trainer.applied for trainer in done.cluster.trainers), start=Counter())
    assert applied["libero", POLICY] == ops(SMALL["libero"], 2)
    assert applied["maniskill", POLICY] == ops(SMALL["maniskill"], 2)
    assert applied["sft", POLICY] == 60 + 1  # steps, and the version at the end


def test_metered_shares_sum_to_the_devices_busy_time(done: Run) -> None:
    for role, devices in (("trainer_s", done.cluster.trainers), ("inference_s", done.cluster.inference)):
        busy_s = sum(device.station.busy_s for device in devices)
        assert busy_s > 1
        assert sum(use[role] for use in done.metered.values()) == pytest.approx(busy_s)
    env_s = sum(device.busy_s for device in done.cluster.envs)
    assert sum(use["env_s"] for use in done.metered.values()) == pytest.approx(env_s)


def test_metered_forwards_are_those_the_devices_did(done: Run) -> None:
    devices = [*done.cluster.trainers, *done.cluster.inference]
    assert sum(use["backbone_forwards"] for use in done.metered.values()) == sum(len(d.forwards) for d in devices)


def test_all_rows_of_a_rollout_meet_the_backbone_once(done: Run) -> None:
    rows = sum(rows for device in done.cluster.inference for rows, _ in device.forwards)
    assert rows == sum(2 * recipe.samples for recipe in SMALL.values())


def test_the_same_run_again_is_the_same_to_the_last_bit(done: Run) -> None:
    again = run()
    assert again.ends == done.ends
    assert again.metered == done.metered
    assert again.cluster.handled == done.cluster.handled


def test_kept_features_of_a_data_set_are_not_made_again() -> None:
    rows = {
        reuse: sum(rows for trainer in run(reuse, tenants=("sft",)).cluster.trainers for rows, _ in trainer.forwards)
        for reuse in ("none", "datasets")
    }
    assert rows == {"none": 60 * 32, "datasets": 1000}


def test_a_lone_tenant_needs_little_more_than_isolated_devices() -> None:
    """The service gives a policy one home trainer, so one is what it is compared with; shards step out of lock-step."""
    for name, recipe in SMALL.items():
        served_s = run("none", tenants=(name,)).ends[name] - TIMES.publish_s - TIMES.apply_s
        isolated_s = 2 * rl_iteration(TIMES, recipe, Devices(1, 2, 4)).seconds
        assert served_s < 1.25 * isolated_s


def test_tenants_in_bursts_are_drawn_from_the_seed() -> None:
    def figures(seed: int) -> list[object]:
        row = arrivals(TIMES, 10, seed=seed)
        return [value for column, value in row.items() if "core" not in column and "us/" not in column]

    assert figures(0) == figures(0)
    assert figures(0) != figures(1)


def test_the_jobs_of_the_setting_take_equally_long_alone() -> None:
    jobs = simulate.workload(TIMES, 4)
    seconds = simulate.sequential(TIMES, jobs).completion_s.values()
    assert max(seconds) < 1.15 * min(seconds)


def test_no_schedule_ends_before_the_bound() -> None:
    jobs = simulate.workload(TIMES, 1)
    for variant in (simulate.Variant("none"), simulate.Variant("everything", max_staleness=1)):
        assert simulate.shared(TIMES, jobs, variant).last_s >= simulate.bound(TIMES, jobs, variant)


def test_every_service_time_has_a_source() -> None:
    entries = _times.entries()
    assert set(entries) == set(_times.Times.__struct_fields__)
    assert all(entry.value >= 0 and len(entry.source) > 20 for entry in entries.values())


def test_a_prefix_that_names_no_row_is_refused() -> None:
    assert TIMES.scaled("backbone", 2).backbone_row_s == 2 * TIMES.backbone_row_s
    with pytest.raises(AssertionError, match="begins with"):
        TIMES.scaled("nothing", 2)


def test_a_station_does_one_piece_at_a_time_in_order() -> None:
    simulation = Simulation()
    station = Station(simulation)
    ends: list[float] = []

    def worker(seconds: float) -> Process:
        yield station.work(seconds, busy_s=seconds / 2)
        ends.append(simulation.now)

    workers = [simulation.spawn(worker(seconds)) for seconds in (3.0, 1.0, 2.0)]
    simulation.run(lambda: all(worker.done for worker in workers))
    assert ends == [3.0, 4.0, 6.0]
    assert (station.busy_s, station.held_s) == (3.0, 6.0)


def test_gather_waits_for_the_last_and_keeps_the_order() -> None:
    first, second = Future(), Future()
    every = gather([first, second])
    second.resolve(2)
    assert not every.done
    first.resolve(1)
    assert every.value == [1, 2]
    assert gather([]).done
