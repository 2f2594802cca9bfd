"""What the demo does for each task: record an expert, push, train, evaluate before and after.

In: a client and a task. Out: figures, loss curve, a video. Never: anything that a tenant could not do too, except that
the demonstrations come from a scripted expert.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from joynexus import Client, OptimizerSpec, SftPolicy
from joynexus.wire.front import EvaluationResult
from services.env.producers.demos import write_demonstrations

BACKBONE = "lite@64"
"""Pictures as large as the camera's: less work for the demo's two cores."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One task of the demo.

    Attributes:
        name: of the policy and of its data set.
        env: simulator task.
        demonstrations: expert episodes to record; `reach`, whose goal is somewhere else in each, needs more of them.
        steps: optimizer steps.
    """

    name: str
    env: str
    demonstrations: int = 20
    steps: int = 1500


TASKS = (
    Task(name="reach", env="metaworld/reach-v3", demonstrations=60),
    Task(name="button-press", env="metaworld/button-press-topdown-v3"),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a task; times in seconds."""

    task: Task
    head: str
    backbone: str
    losses: list[float]
    untrained: EvaluationResult
    trained: EvaluationResult
    dataset_steps: int
    samples: int
    backbone_forwards: int
    train_s: float
    evaluate_s: float
    videos: list[Path]

    @property
    def backbone_forwards_per_sample(self) -> float:
        """Backbone forwards for each sample of the data set: 1 means that each was seen by it once, in all epochs."""
        return self.backbone_forwards / self.dataset_steps


def record(task: Task, folder: Path, say: Say) -> None:
    """Write a LeRobot v3.0 set of expert demonstrations."""
    start = time.monotonic()
    write_demonstrations(folder, task.env, task.demonstrations, processes=2)
    say(f"{task.name}: recorded {task.demonstrations} demonstrations in {time.monotonic() - start:.0f} s")


def train_and_evaluate(
    client: Client, task: Task, folder: Path, videos: Path, say: Say, *, untrained_episodes: int, episodes: int
) -> Outcome:
    """Push a data set, train a policy on it, and evaluate it untrained (meanwhile) and trained."""
    info = client.datasets.push(task.name, folder, progress=False)
    if info.state != "ready":
        raise ValueError(f"data set '{task.name}' cannot be used: {'; '.join(fault.what for fault in info.faults)}")
    say(f"{task.name}: pushed {info.episodes} episodes, {info.steps} steps")
    optimizer = OptimizerSpec(lr=1e-3, warmup_steps=50, decay_steps=task.steps)
    create = SftPolicy(backbone=BACKBONE, head="oft", chunk=8, optimizer=optimizer)
    training = client.sft(
        policy=task.name, dataset=task.name, steps=task.steps, batch_size=64, create=create, publish_initial=True
    )
    while (state := training.info()).initial_version == 0 and state.state in ("waiting", "running"):
        time.sleep(0.2)
    if state.initial_version == 0:
        training.wait(progress=False)  # raises what went wrong
    before = client.evaluate(policy=task.name, version=state.initial_version, env=task.env, episodes=untrained_episodes)
    trained = training.wait(progress=False)
    say(f"{task.name}: {task.steps} steps, loss {trained.losses[0]:.3f} → {trained.losses[-1]:.3f}")
    start = time.monotonic()
    after = client.evaluate(policy=task.name, version=trained.version, env=task.env, episodes=episodes, videos=1)
    found = after.wait(progress=False)
    evaluate_s = time.monotonic() - start
    untrained = before.wait(progress=False).evaluation
    if found.evaluation is None or untrained is None:
        raise ValueError(f"{task.name}: an evaluation ended without a result")
    say(f"{task.name}: success {untrained.success:.0%} untrained, {found.evaluation.success:.0%} trained")
    return Outcome(
        task=task,
        head=create.head,
        backbone=create.backbone,
        losses=training.losses,
        untrained=untrained,
        trained=found.evaluation,
        dataset_steps=info.steps,
        samples=trained.samples,
        backbone_forwards=trained.backbone_forwards,
        train_s=trained.seconds,
        evaluate_s=evaluate_s,
        videos=after.save_videos(videos / task.name),
    )
