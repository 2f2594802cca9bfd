"""The demo's tenants: each has a key, a client and work of its own, and knows nothing of the others.

In: a client each. Out: measured policies, loss and learning curves, videos. Never: anything that a tenant could not do
too, except that the demonstrations come from a scripted expert.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from joynexus import (
    Client,
    EvaluateSpec,
    ExplorationSpec,
    GrpoSpec,
    Job,
    OptimizerSpec,
    PolicySpec,
    PpoSpec,
    RlPolicy,
    RlSpec,
    SftPolicy,
    SftSpec,
)
from joynexus.simulation.interface import SimulatorOptions
from joynexus.wire.front import EvaluationResult, JobInfo, TaskResult, UpdatePoint
from services.env.producers.demos import write_demonstrations

BACKBONE = "lite@64"
"""Pictures as large as the camera's: less work for the demo's two cores."""
PRESS, PRESS_WALL = "metaworld/button-press-topdown-v3", "metaworld/button-press-topdown-wall-v3"
REACH, PUSH, PUSH_CUBE = "metaworld/reach-v3", "metaworld/push-v3", "maniskill/PushCube-v1"
REACH_STEPS, PUSH_STEPS = 100, 150
RL_OPTIMIZER = OptimizerSpec(lr=5e-4, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, grad_clip=0.5)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One line of the table: a policy on a task, before and after what its tenant did.

    Attributes:
        how: how it was made, e.g. `SFT, oft`.
        before: of the policy it started from; None if nobody measured that.
        seconds: from the start of the training to its end.
    """

    tenant: str
    how: str
    env: str
    before: EvaluationResult | None
    after: EvaluationResult
    seconds: float = 0.0
    forwards: int = 0
    samples: int = 0


@dataclass
class Found:
    """What a tenant found.

    Attributes:
        losses, updates: curves, by the name that they have in the figure.
        short: sentences on what is not as good as it should be.
    """

    measured: list[Measured] = field(default_factory=list)
    losses: dict[str, Sequence[float]] = field(default_factory=dict)
    updates: dict[str, Sequence[UpdatePoint]] = field(default_factory=dict)
    videos: list[Path] = field(default_factory=list)
    short: list[str] = field(default_factory=list)

    def expect(self, fine: bool, sentence: str) -> None:
        """Note what should have been."""
        if not fine:
            self.short.append(sentence)


_one_recorder = threading.Lock()  # each uses all cores


def record(folder: Path, env: str, episodes: int, say: Say, options: SimulatorOptions | None = None) -> Path:
    """Write a LeRobot v3.0 set of an expert's demonstrations."""
    with _one_recorder:
        start = time.monotonic()
        write_demonstrations(folder, env, episodes, options=options, processes=2)
    say(f"recorded {episodes} demonstrations of {env} in {time.monotonic() - start:.0f} s")
    return folder


def push(client: Client, name: str, folder: Path) -> None:
    """Push a data set; ValueError if it cannot be used."""
    info = client.datasets.push(name, folder, progress=False)
    if info.state != "ready":
        raise ValueError(f"data set '{name}' cannot be used: {'; '.join(fault.what for fault in info.faults)}")


def evaluate(client: Client, policy: str, env: str, episodes: int, *, version: int = 0, limit: int = 0) -> Job:
    """Start an evaluation on the seeds from 0 on."""
    return client.evaluate(policy=policy, version=version, env=env, episodes=episodes, episode_limit=limit)


def result_of(job: Job) -> EvaluationResult:
    """Wait for an evaluation."""
    found = job.wait(progress=False).evaluation
    assert found is not None, "an evaluation that succeeded has a result"
    return found


def first_version(job: Job) -> int:
    """Wait until a job has published the policy as it was when it began."""
    while (info := job.info()).initial_version == 0 and info.state in ("waiting", "running"):
        time.sleep(0.2)
    if info.initial_version == 0:
        job.wait(progress=False)  # raises what went wrong
    return info.initial_version


def imitate(client: Client, folder: Path, say: Say, exported: Callable[[Path], None]) -> Found:
    """Supervised fine-tuning on demonstrations with pictures; the policy is given away when it is trained."""
    found, steps = Found(), 1500
    push(client, "press", record(folder / "press", PRESS, 20, say))
    optimizer = OptimizerSpec(lr=1e-3, warmup_steps=50, decay_steps=steps)
    create = SftPolicy(backbone=BACKBONE, head="oft", chunk=8, optimizer=optimizer)
    job = client.sft(policy="press", dataset="press", steps=steps, batch_size=64, create=create, publish_initial=True)
    before = evaluate(client, "press", PRESS, 20, version=first_version(job))
    trained = job.wait(progress=False)
    say(f"imitation: {steps} steps, loss {trained.losses[0]:.3f} → {trained.losses[-1]:.3f}")
    exported(client.policy("press").export(folder / "press-policy"))
    after = client.evaluate(policy="press", version=trained.version, env=PRESS, episodes=50, videos=1)
    line = Measured(
        "imitation", "SFT, oft", PRESS, result_of(before), result_of(after),
        trained.seconds, trained.backbone_forwards, trained.samples,
    )  # fmt: skip
    found.measured.append(line)
    found.losses["imitation"] = trained.losses
    found.videos += after.save_videos(folder / "videos")
    found.expect(line.after.success >= 0.9, "imitation should press the button in 90 % of the episodes")
    return found


def reinforce(client: Client, say: Say) -> Found:
    """PPO from nothing but the reward; the policy sees instruction and state."""
    found = Found()
    job = client.rl(
        policy="reach",
        env=REACH,
        updates=30,
        episodes=32,
        episode_limit=REACH_STEPS,
        reward_scale=0.1,
        stop_at=0.85,
        algorithm=PpoSpec(gamma=0.95, lam=0.95, epochs=8, minibatch=128),
        exploration=ExplorationSpec(std=0.5),
        optimizer=RL_OPTIMIZER,
        create=RlPolicy(backbone=BACKBONE, head="oft", chunk=4),
    )
    before = evaluate(client, "reach", REACH, 100, version=first_version(job), limit=REACH_STEPS)
    trained = job.wait(progress=False, on_info=progress_of("reinforcement", say))
    after = evaluate(client, "reach", REACH, 100, version=trained.version, limit=REACH_STEPS)
    line = Measured(
        "reinforcement", "PPO, oft", REACH, result_of(before), result_of(after),
        trained.seconds, trained.backbone_forwards, trained.samples,
    )  # fmt: skip
    found.measured.append(line)
    found.updates["reach, PPO"] = trained.updates
    found.expect(line.after.success >= 0.8, "PPO should reach the goal on at least 80 of 100 seeds")
    found.expect(line.before is not None and line.before.success <= 0.1, "an untrained policy should hardly reach it")
    return found


def judge(client: Client, exported: Path, say: Say) -> Found:
    """Evaluation of a policy that another tenant gave away, on two tasks, twice: the table must be the same."""
    found = Found()
    spec = msgspec.json.decode((exported / "config.json").read_bytes(), type=PolicySpec)
    with client.create_policy("borrowed", spec) as policy:
        policy.load_weights(exported)
        version = policy.publish().result().version
    wanted = EvaluateSpec(policy="borrowed", version=version, env=(PRESS, PRESS_WALL), episodes=10, first_seed=500)
    first, again = (result_of(client.submit(wanted)) for _ in range(2))
    for task in first.tasks:
        say(f"judgement: {task.successes} of {task.episodes} on {task.env}")
    found.measured += [
        Measured("judgement", "given weights", task.env, None, task_result(first, task)) for task in first.tasks
    ]
    found.expect(first.results == again.results, "the same evaluation should give the same table twice")
    return found


def task_result(result: EvaluationResult, task: TaskResult) -> EvaluationResult:
    """Return the part of an evaluation that is about one of its tasks."""
    fields = {name: getattr(task, name) for name in TaskResult.__struct_fields__ if name != "env"}
    results = tuple(episode for episode in result.results if episode.env == task.env)
    return msgspec.structs.replace(result, **fields, results=results, tasks=(task,))


def improve(client: Client, folder: Path, say: Say) -> Found:
    """GRPO from a weak clone: few demonstrations, then trying, with no reward but success; one spec with stages."""
    found, without_cameras = Found(), SimulatorOptions(cameras=(), episode_limit=PUSH_STEPS)
    push(client, "push", record(folder / "push", PUSH, 6, say, without_cameras))
    clone = SftSpec(
        policy="push",
        dataset="push",
        steps=600,
        batch_size=128,
        create=SftPolicy(backbone=BACKBONE, head="oft", chunk=4, optimizer=OptimizerSpec(lr=1e-3, warmup_steps=50)),
    )
    grpo = RlSpec(
        policy="push",
        env=PUSH,
        updates=20,
        episodes=64,
        reward="success",
        episode_limit=PUSH_STEPS,
        algorithm=GrpoSpec(group_size=8, epochs=3),
        exploration=ExplorationSpec(std=0.25, learn_std=False),
        optimizer=OptimizerSpec(lr=1e-4, weight_decay=0.0),
    )
    pipeline = client.pipeline("push", clone, grpo)
    pipeline.wait(progress=False)
    trained = client.job(pipeline.info().stages[1].job).info()
    before, after = (
        result_of(evaluate(client, "push", PUSH, 200, version=version, limit=PUSH_STEPS))
        for version in (trained.initial_version, trained.version)
    )
    found.measured.append(
        Measured(
            "improvement", "GRPO after SFT", PUSH, before, after,
            trained.seconds, trained.backbone_forwards, trained.samples,
        )
    )  # fmt: skip
    found.updates["push, GRPO"] = trained.updates
    won, lost = wins(before, after)
    chance = mcnemar(won, lost)
    say(f"improvement: {won} seeds won, {lost} lost, McNemar p = {chance:.2g}")
    found.expect(won > lost and chance < 0.05, f"GRPO should win seeds: {won} won, {lost} lost, p = {chance:.2g}")
    return found


def wins(before: EvaluationResult, after: EvaluationResult) -> tuple[int, int]:
    """Count the seeds that only the second solved, and those that only the first did."""
    pairs = [(a.success, b.success) for a, b in zip(before.results, after.results, strict=True)]
    return pairs.count((False, True)), pairs.count((True, False))


def mcnemar(won: int, lost: int) -> float:
    """Return the two-sided exact p-value of McNemar's test (1947): could a fair coin give such a difference?"""
    total, fewer = won + lost, min(won, lost)
    return min(1.0, 2 * sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total)


def manipulate(client: Client, folder: Path, say: Say) -> Found:
    """ManiSkill: demonstrations of its motion planner, SFT, some PPO (which learns too slowly for two cores)."""
    found, without_cameras = Found(), SimulatorOptions(cameras=())
    push(client, "cube", record(folder / "cube", PUSH_CUBE, 20, say, without_cameras))
    steps = 1000
    create = SftPolicy(
        backbone=BACKBONE,
        head="oft",
        chunk=4,
        optimizer=OptimizerSpec(lr=1e-3, warmup_steps=50, decay_steps=steps),
    )
    clone = client.sft(policy="cube", dataset="cube", steps=steps, batch_size=128, create=create, publish_initial=True)
    trained = clone.wait(progress=False)
    job = client.rl(
        policy="cube",
        env=PUSH_CUBE,
        updates=3,
        episodes=16,
        algorithm=PpoSpec(level="chunk", gamma=0.9, lam=0.9, epochs=3, minibatch=64),
        exploration=ExplorationSpec(std=0.1),
        optimizer=OptimizerSpec(lr=5e-5, weight_decay=0.0),
    )
    improved = job.wait(progress=False, on_info=progress_of("manipulation", say))
    results = [
        result_of(evaluate(client, "cube", PUSH_CUBE, 20, version=version))
        for version in (trained.initial_version, trained.version, improved.version)
    ]
    for how, before, after, ended in (
        ("SFT, oft", results[0], results[1], trained),
        ("3 PPO updates", results[1], results[2], improved),
    ):
        line = Measured("manipulation", how, PUSH_CUBE, before, after, ended.seconds, ended.backbone_forwards,
                        ended.samples)  # fmt: skip
        found.measured.append(line)
    found.losses["manipulation"] = trained.losses
    found.updates["PushCube, PPO"] = improved.updates
    return found


def progress_of(tenant: str, say: Say) -> Callable[[JobInfo], None]:
    """Make a callback that says every few updates how an RL job is."""
    told = [0]

    def tell(info: JobInfo) -> None:
        if len(info.updates) >= told[0] + 5:
            told[0] = len(info.updates)
            last = info.updates[-1]
            say(f"{tenant}: update {last.update + 1}, {last.success:.0%} of its episodes succeeded")

    return tell
