"""Env and inference processes are added to a cluster under load, by hand or by what waits, and taken away again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from joynexus.client import Job
from joynexus.scale import Range
from joynexus.specs import EvaluateSpec
from joynexus.wire.front import EvaluationResult, RoleStatus
from tests.chaos import faulty_simulator as faulty
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.verdict import Verdict
from tests.process.test_rl import ENV, learn, numbers, rl
from tests.process.test_rolling_restart import Load
from tests.waiting import until

# On a busy host each process starts in minutes.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1500)]
START_S, LAST_S = 300.0, 300.0
EPISODES = 40
BURST = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    slow = tmp_path_factory.mktemp("faults") / "fault"
    slow.write_text(faulty.SLOW)
    variables = {
        "JOYNEXUS_GYMNASIUM_MODULES": faulty.__name__,
        faulty.VARIABLE: str(slow),
        "JOYNEXUS_SCALE_DOWN_S": "4",  # else each step down takes a minute
    }
    with chaotic(tmp_path_factory.mktemp("cluster"), **variables) as cluster:
        yield cluster


class Added:
    """One more process of a role, with the key and settings of the one that is there."""

    def __init__(self, cluster: Cluster, role: str, number: int) -> None:
        plan = cluster.local.load_plan()
        settings = next(planned.env for planned in plan.roles if planned.name == role)
        self._cluster = cluster
        self.name = f"{role}-{number}"
        with cluster.local.log_file(self.name).open("wb") as log:
            self.process = subprocess.Popen(
                [plan.python, "-m", f"services.{role}"],
                cwd=plan.root,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def status(self) -> RoleStatus | None:
        """What the master says of it; nothing if it does not know it."""
        return worker(self._cluster, self.process.pid)

    def leave(self) -> int:
        """Have it end in order; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LAST_S)

    def end(self) -> None:
        """Leave nothing behind if the test failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def worker(cluster: Cluster, pid: int) -> RoleStatus | None:
    return next((role for role in cluster.client.status().roles if role.pid == pid), None)


@contextmanager
def added(cluster: Cluster, role: str, count: int) -> Iterator[list[Added]]:
    """So many processes more, known to the master."""
    with ExitStack() as stack:
        more = []
        for number in range(2, count + 2):
            more.append(Added(cluster, role, number))
            stack.callback(more[-1].end)
        until(lambda: all(process.status() for process in more), START_S)
        yield more


def works(cluster: Cluster, pids: list[int]) -> None:
    """Wait until each of these processes has worked, as the master says."""

    def busy() -> list[float]:
        found = [worker(cluster, pid) for pid in pids]
        return [0.0 if role is None else role.busy_s for role in found]

    before = busy()
    until(lambda: all(now > then for now, then in zip(busy(), before, strict=True)), LAST_S)


def goes_on(loads: list[Load]) -> None:
    """Wait until each load has done something more, or one has failed."""
    before = [load.done for load in loads]

    def more() -> bool:
        return all(load.done > then for load, then in zip(loads, before, strict=True))

    until(lambda: more() or any(load.failed for load in loads), LAST_S)
    assert [load.failed for load in loads] == [[]] * len(loads)


@pytest.mark.case(30, "env 1 -> 4 -> 1 and inference 1 -> 3 -> 1 under load")
def test_processes_that_come_and_go_under_load_take_their_share_and_change_no_number(
    cluster: Cluster, verdict: Verdict
) -> None:
    client = cluster.client
    undisturbed = numbers(learn(client, rl("undisturbed")))
    actor = client.policy("undisturbed")
    state = np.linspace(0, 1, actor.info().spec.contract.state_dim).astype(np.float32)
    evaluation = EvaluateSpec(policy="undisturbed", version=1, env=ENV, episodes=EPISODES, episode_limit=24)
    acts: list[bytes] = []
    curves: list[list[tuple[object, ...]]] = []
    evaluations: list[EvaluationResult] = []

    def act() -> None:
        acts.append(actor.act({}, "reach", state, version=1, timeout_s=LAST_S).actions.tobytes())

    def train() -> None:
        curves.append(numbers(learn(client, rl(f"disturbed-{len(curves)}"))))

    def evaluate() -> None:
        job = client.submit(evaluation)
        assert job.wait(progress=False, timeout_s=LAST_S).state == "succeeded"
        assert isinstance(job.result, EvaluationResult)
        evaluations.append(job.result)

    evaluate()
    there = len(client.status().roles)
    with Load(act) as acting, Load(train) as training, Load(evaluate) as evaluating:
        loads = [acting, training, evaluating]
        for role, more in (("env", 3), ("inference", 2)):
            first = cluster.pid(role)
            with added(cluster, role, more) as came:
                with verdict("I5"):  # work goes to those that came
                    works(cluster, [added.process.pid for added in came])
                with verdict("I3"):
                    assert [added.leave() for added in came] == [0] * more
            with verdict("I5"):  # and back to the one that stayed
                assert cluster.pid(role) == first
                works(cluster, [first])
                goes_on(loads)
            with verdict("I4"):
                until(lambda: len(client.status().roles) == there)
    with verdict("I3"):
        assert [load.failed for load in loads] == [[]] * len(loads)
    with verdict("I1"):
        assert len(set(acts)) == 1
        assert all(curve == undisturbed for curve in curves)
        assert all(result == evaluations[0] for result in evaluations)
        assert [episode.seed for episode in evaluations[0].results] == list(range(EPISODES))
    with verdict("I4"):
        until(cluster.idle)
    with verdict("I6"):
        assert cluster.log("master").count("worker_left") >= 5  # more if the host stood still: who is back leaves again


def decided(cluster: Cluster) -> list[tuple[int, int]]:
    """What scaling decided for env workers, as health keeps it."""
    report = cluster.local.load_health()
    decisions = report.decisions if report else ()
    return [(decision.before, decision.after) for decision in decisions if decision.group == "env"]


@pytest.mark.case(30, "a burst of evaluations: env 1 -> 4 -> 1 by itself")
def test_a_burst_takes_env_workers_to_the_limit_and_back_and_each_episode_is_done_once(
    cluster: Cluster, verdict: Verdict
) -> None:
    client, env = cluster.client, f"gymnasium/{faulty.__name__}:Faulty-v0"
    learn(client, rl("walker", env=env, updates=1, episodes=4, episode_limit=12))
    evaluation = EvaluateSpec(
        policy="walker", version=1, env=env, episodes=EPISODES, first_seed=faulty.FIRST_SEED, episode_limit=12
    )

    def result(job: Job) -> EvaluationResult:
        info = job.wait(progress=False, timeout_s=LAST_S)
        assert info.state == "succeeded", info.message
        assert isinstance(job.result, EvaluationResult)
        return job.result

    alone = result(client.submit(evaluation))
    before = {role.worker for role in client.status().roles}
    first = cluster.pid("env")
    cluster.local.save_scale({"env": Range(1, 4)})
    jobs = [client.submit(evaluation) for _ in range(BURST)]
    with verdict("I5"):
        until(lambda: decided(cluster)[:2] == [(1, 2), (2, 4)], LAST_S)
        until(lambda: len([role for role in client.status().roles if role.role == "env"]) == 4, START_S)
    with verdict("I3"):
        results = [result(job) for job in jobs]
    with verdict("I1"):
        assert [episode.seed for episode in alone.results] == list(
            range(faulty.FIRST_SEED, faulty.FIRST_SEED + EPISODES)
        )
        assert all(found == alone for found in results)
    with verdict("I4"):
        until(lambda: decided(cluster)[2:] == [(4, 3), (3, 2), (2, 1)], LAST_S)
        until(lambda: {role.worker for role in client.status().roles} == before, LAST_S)
        until(lambda: not [name for name in cluster.local.all_running() if name.startswith("env-")], LAST_S)
        assert cluster.local.running("env") == first
    with verdict("I6"):
        scaled = [line for line in cluster.log("health").splitlines() if " scaled " in line and "group=env" in line]
        assert len(scaled) == 5
        assert all("reason='" in line for line in scaled)
        left = [line for line in cluster.log("master").splitlines() if "worker_lost" in line and "worker=env" in line]
        assert left == []
