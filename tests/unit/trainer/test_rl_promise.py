"""THE promise of RL: through the trainer it gives, bit for bit, what a plain PyTorch loop with the same seeds gives."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from joynexus.seeds import derived_seed
from joynexus.simulation.trajectories import concatenate
from joynexus.specs import Algorithm, CriticSpec, ExplorationSpec, GrpoSpec, PolicySpec, PpoSpec
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version
from joynexus.wire.back import RlBegin
from tests.unit.trainer.rollouts import RlLoop, collect, of_chunk, see, starts_of
from tests.unit.workers import Arrays, Bench, Group, NoiseBackbone, opening, spec

UPDATES, EPISODES = 3, 8
GROOT: dict[str, Any] = {"head": "groot", "head_config": {"width": 32, "layers": 2, "heads": 2}}


def plain_loop(
    made_of: PolicySpec, algorithm: Algorithm, begin: RlBegin, reward: str, stale: int = 0, limit: float = 0.0
) -> tuple[list[float], Policy]:
    """PPO and GRPO as a researcher writes them in one process; returns the loss of each epoch, and the policy.

    With a `limit` it is decoupled PPO, on what the policy of `stale` updates ago did.
    """
    backbone, ppo = NoiseBackbone(), isinstance(algorithm, PpoSpec)
    policy = Policy(made_of, backbone.digest, backbone.hidden_size)
    policy.begin_rl(begin)
    settings, beside = begin.optimizer, policy.actor_critic
    parameters = [*policy.module.parameters(), *beside.parameters()]
    drawing = set(beside.exploration.parameters())
    rate = begin.critic.lr if begin.critic is not None and begin.critic.lr else settings.lr
    judging = set(beside.critic.parameters()) if beside.critic is not None else set()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p not in drawing | judging]},
            {"params": [p for p in parameters if p in drawing], "weight_decay": 0.0},
            {"params": [p for p in parameters if p in judging], "lr": rate},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    losses, whole, history = [], algorithm.level == "chunk", list[Policy]()
    for update in range(UPDATES):
        history.append(copy.deepcopy(policy))
        # Act.
        values = (1 if whole else made_of.chunk) if ppo else 0
        parts = [
            collect(history[max(0, update - stale)], backbone, 1, starts, reward=reward, values=values)
            for starts in np.split(np.array(starts_of(algorithm, update, EPISODES)).astype(object), 2)
        ]
        seen = concatenate(parts)
        count = torch.arange(made_of.chunk) < torch.from_numpy(seen.executed)[:, None]

        def of_steps(numbers: Tensor, count: Tensor, whole: bool = whole) -> Tensor:
            each = torch.where(count, numbers.sum(-1), 0.0)
            return each.sum(-1, keepdim=True) if whole else each

        old, rewards = of_steps(torch.from_numpy(seen.log_prob), count), seen.rewards.astype(np.float64)
        mask = np.ones((len(count), 1), bool) if whole else count.numpy()
        if whole:
            rewards = rewards.sum(1, keepdims=True)
        # How good was it?
        advantage, target, weight = np.zeros(mask.shape), np.zeros(mask.shape), np.ones((len(count), 1))
        ends = np.cumsum(seen.lengths)
        episodes = [slice(end - length, end) for end, length in zip(ends, seen.lengths, strict=True)]
        kept = np.ones(len(count), bool)
        if ppo:
            for number, rows in enumerate(episodes):
                r, v = rewards[rows][mask[rows]], seen.value[rows][mask[rows]].astype(np.float64)
                a, ahead, following = np.zeros(len(r)), 0.0, float(seen.last_value[number, 0])
                for t in range(len(r) - 1, -1, -1):
                    delta = r[t] + algorithm.gamma * following - v[t]
                    ahead = delta + algorithm.gamma * algorithm.lam * ahead
                    a[t], following = ahead, v[t]
                spread = np.zeros(mask[rows].shape)
                spread[mask[rows]] = a
                advantage[rows] = spread
            target[mask] = advantage[mask] + seen.value[mask].astype(np.float64)
            advantage[mask] = (advantage[mask] - advantage[mask].mean()) / (advantage[mask].std(ddof=1) + 1e-8)
        else:
            totals = np.array([rewards[rows].sum() for rows in episodes])
            steps = np.array([mask[rows].sum() for rows in episodes])
            good = np.zeros(len(totals), bool)
            for seed in set(seen.seeds.tolist()):
                same = seen.seeds == seed
                good[same] = algorithm.filter_low <= totals[same].mean() <= algorithm.filter_high
                z = (totals[same] - totals[same].mean()) / (totals[same].std(ddof=1) + 1e-6)
                for rows, each in zip([episodes[i] for i in np.flatnonzero(same)], z, strict=True):
                    advantage[rows] = np.where(mask[rows], each, 0.0)
            for rows, each, fine in zip(episodes, steps, good, strict=True):
                weight[rows], kept[rows] = steps[good].mean() / each if algorithm.by_length and fine else 1.0, fine
        # Learn.
        rows = np.flatnonzero(kept)
        state, sample, value = (torch.from_numpy(x[rows]) for x in (seen.state, seen.sample, seen.value))
        adv, ret, w = (torch.from_numpy(x[rows]).float() for x in (advantage, target, weight))
        m, old, count = torch.from_numpy(mask[rows]).float(), old[rows], count[rows]
        features = backbone.forward([see(made_of, each) for each in state.numpy()]) if len(rows) else []
        reference, trust = old, torch.ones_like(old)
        if limit:
            with torch.no_grad():
                reference = of_steps(policy.evaluate(features, state, sample)[0], count)
            trust = (reference - old).exp().clamp(max=limit)
        for epoch in range(algorithm.epochs):
            dice = torch.Generator().manual_seed(derived_seed(11, "order", update, epoch))
            order, total, taken = torch.randperm(len(rows), generator=dice), 0.0, 0
            for i in order.tensor_split(-(-len(rows) // algorithm.minibatch)) if len(rows) else []:
                log_prob, entropy, v = policy.evaluate([features[j] for j in i.tolist()], state[i], sample[i])
                ratio = (of_steps(log_prob, count[i]) - reference[i]).exp()
                surrogate = torch.max(
                    -adv[i] * ratio, -adv[i] * ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                )
                surrogate = torch.where(adv[i] < 0, surrogate.min(-algorithm.dual_clip * adv[i]), surrogate)
                loss = (surrogate * trust[i] * w[i] * m[i]).sum() / m[i].sum()
                if ppo:
                    error = 0.5 * (v - ret[i]) ** 2
                    if algorithm.value_clip:
                        near = value[i] + (v - value[i]).clamp(-algorithm.value_clip, algorithm.value_clip)
                        error = torch.max(error, 0.5 * (near - ret[i]) ** 2)
                    loss = loss + algorithm.value_weight * ((error * m[i]).sum() / m[i].sum())
                if algorithm.entropy_weight:
                    chaos = (of_steps(entropy, count[i]) * m[i]).sum() / m[i].sum()
                    loss = loss - algorithm.entropy_weight * chaos
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip)
                optimizer.step()
                total, taken = total + loss.item(), taken + 1
            losses.append(total / max(taken, 1))
    return losses, policy


ALGORITHMS: list[Any] = [
    pytest.param(PpoSpec(minibatch=9, epochs=3, critic=CriticSpec(width=16, lr=0.01)), "dense", id="ppo by action"),
    pytest.param(
        PpoSpec(level="chunk", minibatch=12, epochs=2, value_clip=0.1, entropy_weight=0.01), "dense", id="ppo by chunk"
    ),
    pytest.param(GrpoSpec(group_size=4, minibatch=10, epochs=2, filter_low=0.0, filter_high=1.0), "success", id="grpo"),
    pytest.param(
        GrpoSpec(level="chunk", group_size=4, minibatch=10, epochs=2, by_length=False, filter_low=-99, filter_high=99),
        "dense",
        id="grpo by chunk, not by length",
    ),
]
HEADS: list[Any] = [
    pytest.param({}, ExplorationSpec(), id="oft"),
    pytest.param(GROOT, ExplorationSpec(), id="groot sde"),
    pytest.param(GROOT, ExplorationSpec(flow="noise"), id="groot noise"),
]


def loop_of(bench: Bench, algorithm: Algorithm, reward: str, exploration: ExplorationSpec, **changes: Any) -> RlLoop:
    made_of = of_chunk(spec(cameras=0), 3, **changes)
    return RlLoop(bench, made_of, algorithm, reward=reward, episodes=EPISODES, exploration=exploration)


def same_weights(policy: Policy, other: Policy) -> bool:
    mine, theirs = policy.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("algorithm", "reward"), ALGORITHMS)
@pytest.mark.parametrize(("head", "exploration"), HEADS)
def test_rl_through_the_trainer_equals_a_plain_loop_bit_for_bit(
    tmp_path: Path, algorithm: Algorithm, reward: str, head: dict[str, Any], exploration: ExplorationSpec
) -> None:
    loop = loop_of(Bench(tmp_path), algorithm, reward, exploration, **head)
    metrics = loop.train(UPDATES)
    losses, policy = plain_loop(loop.spec, algorithm, loop.begin, reward)
    assert [each["loss"] for each in metrics] == losses
    assert any(each["steps"] for each in metrics)
    final = loop.bench.blobs.path(loop.answers[-1].result.digest)
    assert same_weights(read_version(final).policy, policy)


@pytest.mark.parametrize(
    "algorithm",
    [PpoSpec(minibatch=9, epochs=3), GrpoSpec(group_size=4, minibatch=10, epochs=2, filter_low=-99, filter_high=99)],
    ids=["ppo", "grpo"],
)
def test_asynchronous_rl_equals_a_plain_loop_of_decoupled_ppo_bit_for_bit(tmp_path: Path, algorithm: Algorithm) -> None:
    loop = loop_of(Bench(tmp_path), algorithm, "dense", ExplorationSpec())
    loop.staleness, loop.weight_limit = 1, 1.01
    metrics = loop.train(UPDATES)
    losses, policy = plain_loop(loop.spec, algorithm, loop.begin, "dense", stale=1, limit=1.01)
    assert [each["loss"] for each in metrics] == losses
    assert same_weights(read_version(loop.bench.blobs.path(loop.answers[-1].result.digest)).policy, policy)
    later = metrics[-1]
    assert 0 < later["weight_clip_fraction"] < 1  # the versions differed, and the limit acted on some
    assert metrics[0]["weight_mean"] == 1.0  # the first update's did not


class Disturbed(RlLoop):
    """The same job, beside another tenant's training, in another order, through restarts between any two ops."""

    def __init__(self, bench: Bench, like: RlLoop, seed: int) -> None:
        super().__init__(bench, like.spec, like.algorithm)
        self.__dict__ |= {name: value for name, value in vars(like).items() if name not in ("bench", "answers")}
        self.seq = self.version = 0
        self.dice = random.Random(seed)
        self.openings = {self.name: opening(self.name, self.spec), "sft": opening("sft")}
        self.sent = 0
        self.learned: list[float] = []
        self.restarts = 0

    def op(self, kind: str, group: Group | None = None, **fields: Any) -> Any:
        group = Group(*self.openings.values())
        self.openings = {}
        self.seq += 1
        before = self.dice.randint(0, 2)
        for turn in range(3):
            if turn == before:
                group.op(self.name, self.seq, kind, **fields)
            self.sent += 1
            group.train("sft", self.sent, Arrays(self.sent))
        found = {answer.policy: answer for answer in self.done(group) if answer.policy == self.name}
        self.answers.append(found[self.name])
        if self.dice.random() < 0.4:
            self.restart()
        return self.answers[-1]

    def done(self, group: Group) -> list[Any]:
        answers = self.bench.done(group)
        self.learned += [answer.result.metrics["loss"] for answer in answers if answer.kind == "train_step"]
        return answers

    def restart(self) -> None:
        """Save both policies, lose the trainer, and open them again."""
        self.restarts += 1
        seqs = {self.name: self.seq, "sft": self.sent}
        saved = Group()
        for name, seq in seqs.items():
            saved.op(name, seq, "checkpoint")
        states = {answer.policy: answer.checkpoint for answer in self.bench.done(saved)}
        self.bench.fresh()
        made_of = defaultdict(spec, {self.name: self.spec})
        self.openings = {name: opening(name, made_of[name], states[name], seqs[name]) for name in seqs}


@pytest.mark.parametrize(
    ("algorithm", "head", "limit"),
    [
        pytest.param(PpoSpec(minibatch=9, epochs=3), {}, 0.0, id="ppo, oft"),
        pytest.param(PpoSpec(minibatch=9, epochs=3), GROOT, 2.0, id="asynchronous ppo, groot"),
        pytest.param(
            GrpoSpec(group_size=4, minibatch=9, epochs=3, filter_low=-99, filter_high=99),
            {},
            2.0,
            id="asynchronous grpo",
        ),
    ],
)
def test_neighbours_order_and_restarts_between_epochs_change_no_bit_of_an_rl_job(
    tmp_path: Path, algorithm: Algorithm, head: dict[str, Any], limit: float
) -> None:
    alone = loop_of(Bench(tmp_path / "alone"), algorithm, "dense", ExplorationSpec(), **head)
    alone.staleness, alone.weight_limit = int(limit > 0), limit
    expected = alone.train(UPDATES)
    disturbed = Disturbed(Bench(tmp_path / "disturbed"), alone, seed=3)
    assert disturbed.train(UPDATES) == expected
    assert [answer.result.digest for answer in disturbed.answers] == [a.result.digest for a in alone.answers]
    assert disturbed.restarts > 2
    sft = Group(opening("sft"))
    for seq in range(1, disturbed.sent + 1):
        sft.train("sft", seq, Arrays(seq))
    untouched = Bench(tmp_path / "sft").done(sft)
    assert disturbed.learned == [answer.result.metrics["loss"] for answer in untouched]
