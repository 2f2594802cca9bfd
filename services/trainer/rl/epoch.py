"""One pass over an update's experience: minibatches, a step each.

In: a learner that `begin_rl` made ready, experience, the features of its decisions. Out: metrics. Never: the global
random generator, a step on numbers that are not finite (the learner vetoes it), or more decisions in one pass through
the head than its activations are known to have room for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joynexus.seeds import derived_seed
from joynexus.specs import Algorithm, PpoSpec
from joynexus.vla.feature import VLAFeature
from joynexus.vla.learner import Learner
from joynexus.vla.policy import Policy
from joynexus.wire.back import RlEpoch
from services.trainer.rl.experience import Experience, by_step
from services.trainer.rl.losses import importance_weights, policy_loss, value_loss

MOST_ROWS = 512
"""Decisions in one pass through the head: the gradients of a larger minibatch are added up part by part. It does not
depend on the machine, so that numbers do not either."""


@dataclass(frozen=True)
class EpochResult:
    """What a pass did.

    Attributes:
        metrics: see docs/reinforcement-learning.md.
        steps: optimizer steps taken.
        vetoed: minibatches that were skipped: their loss or gradient was not finite, or the head refused a sample.
    """

    metrics: dict[str, float]
    steps: int
    vetoed: int


def proximal_log_prob(
    policy: Policy,
    experience: Experience,
    features: Sequence[VLAFeature],
    algorithm: Algorithm,
    advance: Callable[[], None],
) -> Tensor:
    """Return the log-probability [N, K] of what was done under the weights of now, without gradients."""
    parts = [experience.log_prob[:0]]
    with torch.no_grad():
        for rows in _split(torch.arange(len(features)), min(algorithm.minibatch, MOST_ROWS)):
            log_prob, _, _ = _evaluate(policy, experience, features, rows)
            parts.append(by_step(log_prob.cpu(), experience.executed[rows], algorithm.level))
            advance()
    return torch.cat(parts)


def run_epoch(
    learner: Learner,
    experience: Experience,
    features: Sequence[VLAFeature],
    epoch: RlEpoch,
    reference: Tensor,
    advance: Callable[[], None],
) -> EpochResult:
    """Go over the experience once, in an order that `epoch` decides.

    Args:
        learner: of the policy.
        experience: of the update.
        features: one a decision.
        epoch: algorithm, seeds and limits.
        reference: [N, K] log-probabilities that ratios are taken to: those of the experience, or in asynchronous jobs
            those of `proximal_log_prob`.
        advance: called after each part of a minibatch.

    Raises:
        ValueError: if no minibatch's samples can be this policy's; then nothing changed.
    """
    algorithm = epoch.algorithm
    random = torch.Generator().manual_seed(derived_seed(epoch.seed, "order", epoch.update, epoch.epoch))
    order = torch.randperm(len(features), generator=random)
    taken: list[dict[str, float]] = []
    vetoed, stopped, refusal = 0, False, None
    for rows in _split(order, algorithm.minibatch):
        try:
            measured = _add_minibatch(learner, experience, features, epoch, reference, rows, advance)
        except ValueError as error:  # steps before it are taken already
            vetoed, refusal = vetoed + 1, error
            continue
        if algorithm.target_kl and measured["approx_kl"] > algorithm.target_kl:
            stopped = True
            break
        step = learner.apply()
        if step["skipped"]:
            vetoed += 1
        else:
            taken.append(measured | {"grad_norm": step["grad_norm"], "lr": step["lr"]})
    learner.discard()  # of a minibatch that was refused or stopped at
    if refusal is not None and not taken:
        raise refusal
    metrics = _averages(taken) | {
        "explained_variance": experience.explained_variance,
        "steps": float(len(taken)),
        "vetoed": float(vetoed),
        "stopped": float(stopped),
        "groups": float(experience.groups),
        "groups_kept": float(experience.groups_kept),
        "decisions": float(len(features)),
    }
    return EpochResult(metrics, len(taken), vetoed)


_MEASURED = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "dual_clip_fraction",
    "weight_mean",
    "weight_clip_fraction",
    "grad_norm",
    "lr",
)


def _averages(taken: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in taken) / max(len(taken), 1) for name in _MEASURED}


def _add_minibatch(
    learner: Learner,
    experience: Experience,
    features: Sequence[VLAFeature],
    epoch: RlEpoch,
    reference: Tensor,
    rows: Tensor,
    advance: Callable[[], None],
) -> dict[str, float]:
    """Add the gradients of a minibatch, part by part; return what was measured on the way."""
    learner.discard()
    count, totals = experience.mask[rows].sum(), defaultdict[str, float](float)
    for part in _split(rows, MOST_ROWS):
        loss, measured = _loss(learner.policy, experience, features, epoch, reference, part, count)
        learner.add(loss)
        for name, number in measured.items():
            totals[name] += number
        advance()
    return totals


def _loss(
    policy: Policy,
    experience: Experience,
    features: Sequence[VLAFeature],
    epoch: RlEpoch,
    reference: Tensor,
    rows: Tensor,
    count: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """Return what these rows add to the loss of a minibatch with `count` steps, and to what is measured."""
    algorithm = epoch.algorithm

    def of(whole: Tensor) -> Tensor:
        return whole[rows].to(policy.device)

    log_prob, entropy, value = _evaluate(policy, experience, features, rows)
    executed, mask, behaviour = of(experience.executed), of(experience.mask), of(experience.log_prob)

    def mean(steps: Tensor) -> Tensor:
        return (steps * mask).sum() / count

    acted = policy_loss(
        by_step(log_prob, executed, algorithm.level),
        of(reference),
        of(experience.advantage),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    # In synchronous jobs the two are the same, and everything counts once.
    counts, cut = importance_weights(of(reference), behaviour, epoch.weight_limit or 1.0)
    policy_part = mean(acted.loss * counts * of(experience.weight))
    entropy_part = mean(by_step(entropy, executed, algorithm.level))
    loss, value_part = policy_part, torch.zeros(())
    if isinstance(algorithm, PpoSpec):
        value_part = mean(value_loss(value, of(experience.value), of(experience.returns), algorithm.value_clip))
        loss = loss + algorithm.value_weight * value_part
    if algorithm.entropy_weight:
        loss = loss - algorithm.entropy_weight * entropy_part
    measured = {
        "loss": loss,
        "policy_loss": policy_part,
        "value_loss": value_part,
        "entropy": entropy_part,
        "approx_kl": mean(acted.kl),
        "clip_fraction": mean(acted.clipped.float()),
        "dual_clip_fraction": mean(acted.capped.float()),
        "weight_mean": mean(counts),
        "weight_clip_fraction": mean(cut.float()),
    }
    return loss, {name: float(number.detach()) for name, number in measured.items()}


def _evaluate(
    policy: Policy, experience: Experience, features: Sequence[VLAFeature], rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = [features[row] for row in rows.tolist()]
    return policy.evaluate(chosen, experience.state[rows], experience.sample[rows])


def _split(rows: Tensor, most: int) -> Iterator[Tensor]:
    """Cut into parts of at most so many rows, nearly equal: a step on what few rows are left would be mostly noise."""
    if len(rows):
        yield from rows.tensor_split(-(-len(rows) // most))
