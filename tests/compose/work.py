"""What a tenant does again and again while things happen to the cluster: it imitates, reinforces and measures.

In: a client, a name for the policies. Out: all numbers that came of it. Never: a number that depends on anything but
the specs and the data set, so that any two runs have the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import joynexus
from joynexus.specs import EvaluateSpec, OptimizerSpec, PpoSpec, RlPolicy, RlSpec, SftPolicy, SftSpec
from joynexus.wire.front import EvaluationResult, JobInfo

BACKBONE = "lite"
PRESS, REACH = "metaworld/button-press-topdown-v3", "metaworld/reach-v3"
STEPS, UPDATES = 200, 3
LAST_S = 900.0
"""A cluster that is being killed on two busy cores takes its time."""


@dataclass(frozen=True)
class Numbers:
    """What one round of work leaves."""

    losses: tuple[float, ...]
    updates: tuple[tuple[object, ...], ...]
    pressed: EvaluationResult
    reached: EvaluationResult


def work(client: joynexus.Client, name: str) -> Numbers:
    """Imitate and reinforce at the same time, then measure both policies."""
    optimizer = OptimizerSpec(lr=1e-3)
    imitation = client.submit(
        SftSpec(
            policy=f"{name}-press",
            dataset="press",
            steps=STEPS,
            batch_size=16,
            checkpoint_every=40,
            create=SftPolicy(backbone=BACKBONE, chunk=8, seed=3, optimizer=optimizer),
        )
    )
    reinforcement = client.submit(
        RlSpec(
            policy=f"{name}-reach",
            env=REACH,
            algorithm=PpoSpec(epochs=2, minibatch=32),
            updates=UPDATES,
            episodes=12,
            episode_limit=48,
            warmup_episodes=2,
            checkpoint_every=2,
            create=RlPolicy(backbone=BACKBONE, chunk=4, optimizer=optimizer),
        )
    )
    wait(imitation)
    pressing = client.submit(EvaluateSpec(policy=f"{name}-press", version=1, env=PRESS, episodes=4, episode_limit=80))
    wait(reinforcement)
    (reached,) = reach(client, name)
    pressed = wait(pressing).evaluation
    assert pressed is not None
    assert len(pressed.results) == 4, "every episode once"
    updates = tuple((p.success, p.reward, tuple(sorted(p.metrics.items()))) for p in reinforcement.updates)
    return Numbers(tuple(imitation.losses), updates, pressed, reached)


def reach(client: joynexus.Client, name: str, *, times: int = 1) -> list[EvaluationResult]:
    """Measure the policy that was reinforced, so many times at once."""
    version = UPDATES + 1
    spec = EvaluateSpec(policy=f"{name}-reach", version=version, env=REACH, episodes=16, episode_limit=48)
    jobs = [client.submit(spec) for _ in range(times)]
    found = [reached for job in jobs if (reached := wait(job).evaluation) is not None]
    assert [len(reached.results) for reached in found] == times * [16], "every episode once"
    return found


def wait(job: joynexus.Job) -> JobInfo:
    """Wait until it has succeeded."""
    return job.wait(progress=False, timeout_s=LAST_S)


class Rounds:
    """Rounds of work in a thread, one after another, until told that one that began later will not be needed.

    Args:
        client: the tenant's.
        name: what all policies' names begin with.
    """

    def __init__(self, client: joynexus.Client, name: str) -> None:
        self.numbers: list[Numbers] = []
        self._client, self._name = client, name
        self._enough = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Rounds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(2 * LAST_S)
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive(), "the work never came to an end"

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                self.numbers.append(work(self._client, f"{self._name}-{len(self.numbers)}"))
        except BaseException as error:
            self._failure = error
