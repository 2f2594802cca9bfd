"""How soon a tenant is served again after each role of a cluster was killed with SIGKILL, and after a master that very
many workers and tenants come back to.

In: a checkout whose backbone files are cached, and the simulators that are installed. Out: seconds from the kill to the
answer to what a tenant asked right behind it, beside the target. Never: a kill in calm: another tenant trains and acts
all the while, and what it asks must not fail.

A simulator's own making time is what a plain pool takes from nothing to the first observation, in the same run.

    python -m benchmarks.recovery [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

import joynexus
from benchmarks import _report
from benchmarks._cluster import running_master
from benchmarks._herd import Herd
from common import telemetry
from joynexus import Client, Policy, launch
from joynexus.client import Batch
from joynexus.contract import Camera, Contract
from joynexus.local import LocalCluster
from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.pool import Deadlines
from joynexus.specs import PolicySpec
from services.env.simulators.registry import open_pool, prepare_process, survey

BACKBONE = "lite@64"
CACHE = Path(".joynexus/cache").absolute()
CONTRACT = Contract(robot="toy", cameras=(Camera(name="front", height=64, width=64),), state_dim=8, action_dim=4)
ROWS, CHUNK = 8, 4
TASKS = ("metaworld/reach-v3", "maniskill/PickCube-v1", "libero/libero_object/0")
BLIND = SimulatorOptions(cameras=())
EPISODE_LIMIT = 4
PAUSE_S = 0.2
"""Of the neighbour between two rounds: a light load."""
LONG_S = 180.0
HERD = 50, 200
OPS = 5

Times = defaultdict[str, list[float]]
"""Seconds by what was reached."""
Wait = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--runs", type=int, default=0, help="kills of each kind; 5, with --quick 1")

    what = "Seconds until a tenant is served again after a role was killed."
    options = _report.arguments("recovery", what, argv, more)
    runs = options.runs or (1 if options.quick else 5)
    telemetry.configure("recovery", level="critical")
    prepare_process()
    times: Times = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as folder:
        herd(Path(folder), *((10, 40) if options.quick else HERD), runs, times)
    problems = survey()
    tasks = [task for task in TASKS if not problems[task.partition("/")[0]]]
    tasks = tasks[:1] if options.quick else tasks
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as folder:
        roles(Path(folder), tasks, runs, times)
    flags = f" --runs {runs}" if options.runs else ""
    _report.write("recovery", options, [*rows(times, tasks), *beside(times, tasks)], flags=flags)


def rows(times: Times, tasks: Sequence[str]) -> list[_report.Row]:
    """Put what was killed beside its target."""
    making = {task: _report.spread(times[f"making {task}"], 2)["median"] for task in tasks}
    targets: dict[tuple[str, str], object] = {
        ("master", "op done"): 5.0,
        ("health", "all roles adopted"): 5.0,
        ("trainer", "training step done"): 10.0,
        ("inference", "act answered"): 10.0,
        **{("env", f"{task}: evaluated"): making[task] for task in tasks},
        ("env", f"{TASKS[0]}: evaluated"): 5.0,
        ("master, herd", "steady"): 30.0,
    }
    return [
        {
            "table": "Seconds from SIGKILL",
            "killed": who,
            "until": what,
            "seconds": (figures := _report.spread(times[f"{who}: {what}"], 2)),
            "target_s": target,
            "met": "yes" if float(str(figures["median"])) <= float(str(target)) else "no",
        }
        for (who, what), target in targets.items()
    ]


def beside(times: Times, tasks: Sequence[str]) -> list[_report.Row]:
    """What explains them."""
    names = ["master: question answered", "master, herd: all workers registered", "master, herd: ops answered"]
    names += [f"{what} {task}" for task in tasks for what in ("making", "undisturbed")]
    return [{"table": "Beside them", "what": name, "seconds": _report.spread(times[name], 2)} for name in names]


# ------------------------------------------------------------------------------------------------------- a herd


def herd(folder: Path, workers: int, clients: int, runs: int, times: Times) -> None:
    """Kill a master under a herd that has ops under way."""
    with (
        running_master(silent_s=120, log_level="error") as master,
        Herd(master.keyring, folder, workers=workers, clients=clients) as herd,
    ):
        until(lambda: herd.registered() == workers)
        for _ in range(runs):
            herd.gate.clear()
            herd.order(OPS)
            until(lambda: herd.waiting() >= OPS * clients)
            start = time.monotonic()
            master.kill()
            master.start()
            herd.gate.set()
            until(lambda: herd.registered() == workers)
            times["master, herd: all workers registered"].append(time.monotonic() - start)
            until(lambda: not herd.under_way)
            times["master, herd: ops answered"].append(time.monotonic() - start)
            herd.order(1)
            until(lambda: not herd.under_way)
            times["master, herd: steady"].append(time.monotonic() - start)
            if wrong := herd.wrong():
                raise SystemExit(f"ops were lost or doubled: {wrong[0]}")


# ------------------------------------------------------------------------------------------------- a whole cluster


def roles(folder: Path, tasks: Sequence[str], runs: int, times: Times) -> None:
    """Kill the roles of a cluster in turn, and ask for what they do."""
    options = launch.Options(backbone=BACKBONE, cache_dir=CACHE, simulator_processes=1)
    try:
        cluster = launch.up(folder, options)
        with joynexus.connect(cluster.client_file) as client, Neighbour(cluster):
            policy = made(client, "mine", CONTRACT)
            for _ in range(runs):
                for role, asked in asks(client, policy).items():
                    killed(cluster, role, asked, times)
                adopted(cluster, options, times)
            for task in tasks:
                name = actor(client, task, times, runs)
                for _ in range(runs):
                    simulated(cluster, client, name, task, times)
    finally:
        launch.down(folder)


class Neighbour:
    """Another tenant, who trains and acts lightly all the while; leaving the block raises what failed for it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._client = joynexus.connect(cluster.client_file)
        self._policy = made(self._client, "neighbours", CONTRACT)
        self._ending = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._loop, args=(what,)) for what in (self._train, self._act)]

    def __enter__(self) -> Neighbour:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        if self._failures and error is None:
            raise self._failures[0]

    def _loop(self, what: Wait) -> None:
        try:
            while not self._ending.wait(PAUSE_S):
                what()
        except BaseException as error:  # told to whoever made this
            self._failures.append(error)

    def _train(self) -> None:
        step(self._policy)

    def _act(self) -> None:
        act(self._policy)


def made(client: Client, name: str, contract: Contract) -> Policy:
    """Make a policy and publish it."""
    spec = PolicySpec(backbone=BACKBONE, chunk=CHUNK, contract=contract, normalization="none")
    policy = client.create_policy(name, spec)
    policy.publish().result(LONG_S)
    return policy


def batch() -> Batch:
    """Samples of the toy robot."""
    random = np.random.default_rng(0)
    return Batch(
        state=random.normal(size=(ROWS, CONTRACT.state_dim)).astype(np.float32),
        action=random.normal(size=(ROWS, CHUNK, CONTRACT.action_dim)).astype(np.float32),
        images=(random.integers(0, 256, (ROWS, 64, 64, 3), dtype=np.uint8),),
        instructions="reach the goal",
    )


def step(policy: Policy) -> None:
    """Train one step."""
    policy.forward_backward(batch())
    policy.optim_step().result(LONG_S)


def act(policy: Policy) -> None:
    """Ask for actions."""
    picture, state = np.zeros((64, 64, 3), np.uint8), np.zeros(CONTRACT.state_dim, np.float32)
    policy.act([picture], "reach the goal", state, timeout_s=LONG_S)


def asks(client: Client, policy: Policy) -> dict[str, dict[str, Wait]]:
    """What a tenant asks behind the kill of a role, in this order."""
    return {
        "master": {"question answered": client.status, "op done": lambda: step(policy)},
        "trainer": {"training step done": lambda: step(policy)},
        "inference": {"act answered": lambda: act(policy)},
    }


def killed(cluster: LocalCluster, role: str, asked: dict[str, Wait], times: Times) -> None:
    """Kill a role of a settled cluster, and take the time of what is asked behind that."""
    until(lambda: settled(cluster))
    pid = cluster.running(role)
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for what, wait in asked.items():
        wait()
        times[f"{role}: {what}"].append(time.monotonic() - start)


def adopted(cluster: LocalCluster, options: launch.Options, times: Times) -> None:
    """Kill health, and start the cluster again, as whoever supervises it would."""
    until(lambda: settled(cluster))
    pid = cluster.running("health")
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not cluster.running("health"))
    launch.up(cluster.folder, options)
    times["health: all roles adopted"].append(time.monotonic() - start)


def actor(client: Client, task: str, times: Times, runs: int) -> str:
    """Take a simulator's own making time, and make a policy for it."""
    for _ in range(runs):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # nothing is imported there
            seconds, contract = fresh.submit(make, task).result()
        times[f"making {task}"].append(seconds)
    name = task.partition("/")[0]
    made(client, name, msgspec.msgpack.decode(contract, type=Contract))
    return name


def make(task: str) -> tuple[float, bytes]:
    """Make a simulator, and return how long it takes to its first observation, and its contract."""
    prepare_process()
    start = time.monotonic()
    with open_pool(task, 1, options=BLIND, deadlines=Deadlines(make_s=300.0)) as pool:
        pool.reset({0: 0})
        return time.monotonic() - start, msgspec.msgpack.encode(pool.contract)


def simulated(cluster: LocalCluster, client: Client, name: str, task: str, times: Times) -> None:
    """Take the time of a short evaluation with the simulator at hand, and of the same behind a kill of its process."""

    def evaluate() -> None:
        job = client.evaluate(policy=name, env=task, episodes=1, episode_limit=EPISODE_LIMIT)
        job.wait(progress=False, timeout_s=LONG_S)

    evaluate()
    start = time.monotonic()
    evaluate()
    times[f"undisturbed {task}"].append(time.monotonic() - start)
    killed(cluster, "env", {f"{task}: evaluated": evaluate}, times)


def settled(cluster: LocalCluster) -> bool:
    """All roles run, as health sees it."""
    report = cluster.load_health()
    return report is not None and all(instance.state == "running" for instance in report.instances)


def until(true: Callable[[], object]) -> None:
    """Look again and again until a condition holds."""
    deadline = time.monotonic() + LONG_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"it never came to be within {LONG_S:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
