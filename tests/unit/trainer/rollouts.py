"""Rollouts for tests: random numbers, or a policy at work on a point mass; and the loop that trains on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from joynexus.seeds import derived_seed
from joynexus.simulation.trajectories import Trajectories, pack, unpack
from joynexus.specs import Algorithm, ExplorationSpec, GrpoSpec, OptimizerSpec, PolicySpec, PpoSpec
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.feature import Observation
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version
from joynexus.wire.back import RlBegin, RlEpoch, TrainDone
from services.trainer.rl.experience import values_of
from tests.unit.workers import SIDE, Bench, Group, opening, spec


def made_up(
    seed: int,
    *,
    lengths: Sequence[int] = (3, 1, 4),
    seeds: Sequence[int] | None = None,
    chunk: int = 3,
    actions: int = 2,
    values: int = 0,
    **changes: Any,
) -> Trajectories:
    """Return episodes of random numbers; the task ends the first and every other one, in the middle of a chunk."""
    dice = np.random.default_rng(seed)
    episodes, decisions = len(lengths), sum(lengths)
    terminated = np.arange(episodes) % 2 == 0
    executed = np.full(decisions, chunk)
    executed[np.cumsum(lengths)[terminated] - 1] = max(1, chunk - 1)
    rewards = dice.standard_normal((decisions, chunk), dtype=np.float32)
    last_value = dice.standard_normal((episodes, values), dtype=np.float32)
    last_value[terminated] = 0.0
    numbers: dict[str, Any] = {
        "version": 1,
        "contract": "",
        "instruction": "reach",
        "lengths": np.array(lengths),
        "seeds": np.arange(episodes) if seeds is None else np.array(seeds),
        "draws": 100 * seed + np.arange(episodes),
        "success": terminated,
        "terminated": terminated,
        "last_value": last_value,
        "state": dice.standard_normal((decisions, 4), dtype=np.float32),
        "images": (),
        "sample": dice.standard_normal((decisions, chunk, actions), dtype=np.float32),
        "log_prob": dice.standard_normal((decisions, chunk, actions), dtype=np.float32),
        "value": dice.standard_normal((decisions, values), dtype=np.float32),
        "rewards": np.where(np.arange(chunk) < executed[:, None], rewards, np.float32(0)),
        "executed": executed,
    }
    return Trajectories(**(numbers | changes))


INSTRUCTION = "reach the goal"
_STEP = 0.25
_NEAR = 0.2


class PointMass:
    """A point that is to come near its goal, each on a plane of its own: state is both places, action a velocity."""

    def __init__(self, seed: int, reward: str) -> None:
        self.place, self.goal = np.random.default_rng(seed).uniform(-1, 1, (2, 2))
        self.reward = reward

    @property
    def state(self) -> npt.NDArray[np.float32]:
        return np.concatenate([self.place, self.goal]).astype(np.float32)

    def step(self, action: npt.NDArray[np.float32]) -> tuple[float, bool]:
        self.place = (self.place + _STEP * action.clip(-1, 1)).clip(-1.5, 1.5)
        distance = float(np.linalg.norm(self.place - self.goal))
        solved = distance < _NEAR
        return float(solved) if self.reward == "success" else float(solved) - distance, solved


def see(spec: PolicySpec, state: npt.NDArray[np.float32]) -> Observation:
    """What a policy with cameras is shown is a picture that depends on the state alone."""
    dice = np.random.default_rng(int(abs(state).sum() * 1e6))
    views = (dice.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in spec.contract.cameras)
    return Observation(tuple(views), INSTRUCTION)


def collect(
    policy: Policy,
    backbone: Backbone,
    version: int,
    starts: Sequence[tuple[int, int]],
    *,
    reward: str = "dense",
    limit: int = 12,
    values: int = 0,
) -> Trajectories:
    """Let a policy act, all episodes side by side; `starts` are their seeds and draws."""
    spec, places = policy.spec, [PointMass(seed, reward) for seed, _ in starts]
    rows: list[list[dict[str, Any]]] = [[] for _ in starts]
    done = np.zeros(len(starts), np.bool_)
    steps, last = np.zeros(len(starts), np.int64), np.zeros((len(starts), values), np.float32)
    while live := [row for row in range(len(starts)) if not done[row] and steps[row] < limit]:
        state = np.stack([places[row].state for row in live])
        seen = [see(spec, place) for place in state]
        seeds = [derived_seed("rollout", starts[row][1], int(steps[row])) for row in live]
        said = policy.explore(backbone.forward(seen), state, seeds=seeds)
        for number, row in enumerate(live):
            rewards, executed = np.zeros(spec.chunk, np.float32), 0
            while executed < spec.chunk and steps[row] < limit and not done[row]:
                rewards[executed], done[row] = places[row].step(said.actions[number, executed])
                executed += 1
                steps[row] += 1
            taken = {"state": state[number], "sample": said.sample[number], "log_prob": said.log_prob[number]}
            pictures = dict(enumerate(seen[number].images))
            rows[row].append(taken | pictures | {"value": said.value[number], "rewards": rewards, "executed": executed})
    cut = [row for row in range(len(starts)) if not done[row]]
    if cut and values:
        state = np.stack([places[row].state for row in cut])
        seeds = [derived_seed("rollout", starts[row][1], int(steps[row])) for row in cut]
        last[cut] = policy.explore(backbone.forward([see(spec, place) for place in state]), state, seeds=seeds).value
    flat = [decision for episode in rows for decision in episode]

    def gathered(name: str | int) -> npt.NDArray[Any]:
        return np.stack([decision[name] for decision in flat])

    return Trajectories(
        version=version,
        contract=spec.contract.digest(),
        instruction=INSTRUCTION,
        lengths=np.array([len(episode) for episode in rows]),
        seeds=np.array([seed for seed, _ in starts]),
        draws=np.array([draw for _, draw in starts]),
        success=done,
        terminated=done,
        last_value=last,
        images=tuple(gathered(view) for view in range(len(spec.contract.cameras))),
        **{name: gathered(name) for name in ("state", "sample", "log_prob", "value", "rewards", "executed")},
    )


def starts_of(algorithm: Algorithm, update: int, episodes: int) -> list[tuple[int, int]]:
    """Seeds and draws of an update's episodes: siblings of a group start alike and draw differently."""
    numbers = range(update * episodes, (update + 1) * episodes)
    size = algorithm.group_size if isinstance(algorithm, GrpoSpec) else 1
    return [(number // size, derived_seed("episode", 0, number)) for number in numbers]


@dataclass
class RlLoop:
    """Drives one policy's RL on a bench, op by op, as an RL job does.

    Attributes:
        name: of the policy.
        reward, limit, episodes: of the rollouts; episodes for each update.
        staleness: how many updates ago the version that acts was published.
        acting: the policy as it was last published.
        answers: to all ops so far.
    """

    bench: Bench
    spec: PolicySpec
    algorithm: Algorithm
    name: str = "arm"
    reward: str = "dense"
    limit: int = 12
    episodes: int = 8
    exploration: ExplorationSpec = field(default_factory=ExplorationSpec)
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=3e-3))
    weight_limit: float = 0.0
    staleness: int = 0
    seq: int = 0
    version: int = 0
    acting: Policy = field(init=False)
    answers: list[TrainDone] = field(default_factory=list)

    @property
    def values(self) -> int:
        return values_of(self.algorithm, self.spec.chunk)

    @property
    def begin(self) -> RlBegin:
        critic = self.algorithm.critic if isinstance(self.algorithm, PpoSpec) else None
        return RlBegin(
            exploration=self.exploration, critic=critic, values=max(self.values, 1), optimizer=self.optimizer
        )

    def op(self, kind: str, group: Group | None = None, **fields: Any) -> TrainDone:
        """Do the policy's next op; it must succeed."""
        self.seq += 1
        group = group or Group(*((opening(self.name, self.spec),) if self.seq == 1 else ()))
        done = self.bench.done(group.op(self.name, self.seq, kind, **fields))
        self.answers += [answer for answer in done if answer.policy == self.name]
        return self.answers[-1]

    def start(self) -> Policy:
        """Begin RL and publish."""
        self.op("rl_begin", rl=self.begin)
        return self.publish()

    def publish(self) -> Policy:
        """Publish, and return the policy as those who act have it."""
        self.version += 1
        done = self.op("publish", version=self.version)
        self.acting = read_version(self.bench.blobs.path(done.result.digest)).policy
        return self.acting

    def roll(self, policy: Policy, update: int, *, version: int = 0, pages: int = 2) -> tuple[str, ...]:
        """Collect the episodes of an update with a policy; return the pages' digests."""
        starts = starts_of(self.algorithm, update, self.episodes)
        size = len(starts) // pages
        return tuple(
            self.bench.blobs.put_bytes(pack(self.collected(policy, starts[page * size :][:size], version)))
            for page in range(pages)
        )

    def collected(self, policy: Policy, starts: Sequence[tuple[int, int]], version: int = 0) -> Trajectories:
        return collect(
            policy,
            self.bench.backbone,
            version or self.version,
            starts,
            reward=self.reward,
            limit=self.limit,
            values=self.values,
        )

    def epoch(self, update: int, epoch: int, rollouts: tuple[str, ...]) -> RlEpoch:
        return RlEpoch(
            algorithm=self.algorithm,
            rollouts=rollouts,
            update=update,
            epoch=epoch,
            seed=11,
            weight_limit=self.weight_limit,
        )

    def update(self, number: int, rollouts: tuple[str, ...]) -> list[dict[str, float]]:
        """Do all epochs of an update; return their metrics."""
        epochs = range(self.algorithm.epochs)
        return [self.op("rl_epoch", rl=self.epoch(number, e, rollouts)).result.metrics for e in epochs]

    def train(self, updates: int) -> list[dict[str, float]]:
        """The whole job: act, train, publish; return the metrics of all epochs."""
        policies, metrics = [self.start()], []
        for number in range(updates):
            acting = max(0, number - self.staleness)
            metrics += self.update(number, self.roll(policies[acting], number, version=acting + 1))
            policies.append(self.publish())
        return metrics


PPO = PpoSpec(minibatch=10, epochs=2)
GRPO = GrpoSpec(group_size=4, minibatch=10, epochs=2, filter_low=-99, filter_high=99)


def begun(bench: Bench, algorithm: PpoSpec | GrpoSpec = PPO, cameras: int = 0, **changes: Any) -> RlLoop:
    made_of = msgspec.structs.replace(spec(cameras=cameras), **changes)
    loop = RlLoop(bench, made_of, algorithm)
    loop.start()
    return loop


def rolled(loop: RlLoop, **changes: Any) -> tuple[str, ...]:
    """Pages of the first update; the first one with changes."""
    pages = loop.roll(loop.acting, 0)
    if changes:
        page = dataclasses.replace(unpack(loop.bench.blobs.path(pages[0]).read_bytes()), **changes)
        pages = (loop.bench.blobs.put_bytes(pack(page)), *pages[1:])
    return pages


def send(loop: RlLoop, epoch: RlEpoch | None, **fields: Any) -> TrainDone:
    """Do an epoch that may be refused."""
    loop.seq += 1
    return loop.bench.one(Group().op(loop.name, loop.seq, "rl_epoch", rl=epoch, **fields))


def state(loop: RlLoop) -> dict[str, torch.Tensor]:
    slot = next(iter(loop.bench.engine._slots.values()))
    tensors, _ = slot._learner.state()
    return tensors | ({} if slot._proximal is None else {"proximal": slot._proximal[1].clone()})


def unchanged(loop: RlLoop, before: dict[str, torch.Tensor]) -> bool:
    after = state(loop)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def of_chunk(spec: PolicySpec, chunk: int, **changes: Any) -> PolicySpec:
    """Return a spec with another chunk."""
    return msgspec.structs.replace(spec, chunk=chunk, **changes)
