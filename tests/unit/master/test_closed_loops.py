"""When to fire, in whole loops: clients, transfers and devices under a simulated clock around the core that ships."""

from __future__ import annotations

import statistics

import pytest

from services.master.config import CoreConfig
from tests.unit.master.closed_loop import ClosedLoop, Device

MS = 0.001


def constant(rows: int) -> float:
    return 20 * MS


def linear(rows: int) -> float:
    return 2.5 * MS * rows


def in_step(clients: int, think: float, device: Device, transfer: float) -> float:
    """Requests a second if all clients ask together and share every group."""
    return clients / (device(clients) + think + 2 * transfer * clients)


def no_wait(*, batch_rows: int = 8) -> CoreConfig:
    return CoreConfig(batch_wait_s=0.0, batch_rows=batch_rows)


@pytest.mark.parametrize("think", [1 * MS, 20 * MS, 100 * MS])
@pytest.mark.parametrize("transfer", [0.5 * MS, 2 * MS])
@pytest.mark.parametrize("device", [constant, linear])
def test_a_lone_client_never_waits(device: Device, transfer: float, think: float) -> None:
    loop = ClosedLoop([think], device, jitter=0.3, transfer_s=transfer).run(2)
    assert loop.latency(part=1.0, after=0.0) == pytest.approx(device(1) + 2 * transfer, abs=0.1 * MS)


@pytest.mark.parametrize("clients", [2, 4, 8])
@pytest.mark.parametrize(("think", "transfer"), [(1 * MS, 0.5 * MS), (5 * MS, 0.5 * MS), (1 * MS, 1 * MS)])
def test_clients_in_a_closed_loop_share_full_groups_where_that_pays(
    clients: int, think: float, transfer: float
) -> None:
    loop = ClosedLoop([think] * clients, constant, jitter=0.3, transfer_s=transfer).run(3)
    assert loop.rate() > 0.92 * in_step(clients, think, constant, transfer)
    assert statistics.mean(loop.sizes()) > 0.9 * clients


def test_transfers_that_take_longer_than_t_was_do_not_split_the_group() -> None:
    """Eight requests of 300 KB need 16 ms from the first to the last: more than the 10 ms that T was once."""
    loop = ClosedLoop([1 * MS] * 8, constant, jitter=0.3, transfer_s=2 * MS).run(3)
    assert loop.rate() > 0.95 * in_step(8, 1 * MS, constant, 2 * MS)


@pytest.mark.parametrize("device", [constant, linear])
@pytest.mark.parametrize("clients", [4, 8])
@pytest.mark.parametrize("think", [1 * MS, 5 * MS, 20 * MS])
@pytest.mark.parametrize("transfer", [0.5 * MS, 2 * MS])
def test_waiting_costs_hardly_any_throughput_where_it_does_not_pay(
    transfer: float, think: float, clients: int, device: Device
) -> None:
    waiting, at_once = (
        ClosedLoop([think] * clients, device, jitter=0.3, transfer_s=transfer, config=config).run(1.5).rate(0.5)
        for config in (None, no_wait())
    )
    assert waiting > 0.92 * at_once


def test_nobody_waits_on_a_device_whose_time_grows_with_the_rows_alone() -> None:
    loop = ClosedLoop([5 * MS] * 4, linear, jitter=0.3).run(2)
    busy = loop.device_s / 2
    assert loop.rate() * 2.5 * MS == pytest.approx(busy, rel=0.05)
    assert loop.rate() > 0.98 * ClosedLoop([5 * MS] * 4, linear, jitter=0.3, config=no_wait()).run(2).rate()


def test_a_robot_that_thinks_for_long_is_not_waited_for() -> None:
    loop = ClosedLoop([0.5 * MS, 700 * MS], lambda rows: 5 * MS, transfer_s=0).run(6)
    assert loop.latency(0, part=0.9) == pytest.approx(5 * MS, abs=0.1 * MS)


def test_robots_beside_clients_in_a_closed_loop_wait_two_groups_at_most() -> None:
    loop = ClosedLoop([1 * MS] * 6 + [300 * MS] * 3, constant, jitter=0.3).run(6)
    for robot in (6, 7, 8):
        assert loop.latency(robot, part=1.0) <= 2 * 20 * MS + 20 * MS


def test_clients_that_leave_are_missed_once() -> None:
    loop = ClosedLoop([1 * MS] * 4, constant).run(1)
    for client in (1, 2, 3):
        loop.world.actors.pop(loop.peers[client])
    loop.run(1)
    assert loop.latency(0, after=1.2, part=1.0) == pytest.approx(20 * MS, abs=0.1 * MS)


# Replicas


@pytest.mark.parametrize("device", [constant, linear, lambda rows: 10 * MS + 1.25 * MS * rows])
@pytest.mark.parametrize("clients", [1, 4, 8, 16])
def test_a_second_replica_never_makes_it_slower(clients: int, device: Device) -> None:
    one, two = (
        ClosedLoop([1 * MS] * clients, device, jitter=0.3, transfer_s=0.25 * MS, workers=workers).run(1.5)
        for workers in (1, 2)
    )
    assert two.rate(0.5) > 0.99 * one.rate(0.5)


def test_replicas_add_up_where_the_device_is_what_is_short() -> None:
    one, four = (ClosedLoop([1 * MS] * 16, linear, jitter=0.3, workers=workers).run(1.5) for workers in (1, 4))
    assert four.rate(0.5) > 3.0 * one.rate(0.5)


# Fairness


@pytest.mark.parametrize("device", [constant, lambda rows: 8 * MS + 1.5 * MS * rows])
def test_a_flood_costs_others_two_groups_at_most(device: Device) -> None:
    """Eight robots; then a tenant beside them keeps 200 requests in the queue."""
    robots = [40 * MS] * 8
    alone = ClosedLoop(robots, device, jitter=0.5, transfer_s=0, tenants=9).run(4)
    flooded = ClosedLoop(robots + [0.0] * 200, device, jitter=0.5, tenants=9, owners=[*range(8), *[8] * 200]).run(4)
    group = device(max(flooded.sizes()))
    worst = max(flooded.latency(robot, part=0.99) for robot in range(8))
    assert worst <= max(alone.latency(robot, part=0.99) for robot in range(8)) + 2 * group


def test_shares_of_device_time_follow_the_weights() -> None:
    loop = ClosedLoop([0.0] * 192, constant, tenants=3, weights=[1, 2, 4]).run(3)
    late = [client % 3 for at, client, _ in loop.latencies if at > loop.start + 0.5]
    answered = [late.count(tenant) for tenant in range(3)]
    for tenant, weight in enumerate((1, 2, 4)):
        assert answered[tenant] / sum(answered) == pytest.approx(weight / 7, rel=0.05)
