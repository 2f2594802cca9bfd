"""A learner: one policy's gradients and optimizer.

In: a policy and its samples, or losses made of it. Out: losses, steps, and a state from which training goes on bit for
bit. Never: a step on a loss or gradient that is not finite: it is vetoed whole, and weights and optimizer stay as they
were.

A policy learns from samples (`forward_backward`, `optim_step`) or from rewards (`begin_rl`, then `add`, `apply`), each
with an optimizer of its own. Changing over, in either direction, begins the optimizer anew: moments that were gathered
from one kind of gradient say nothing of the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from joynexus.specs import OptimizerSpec
from joynexus.vla.actor_critic import PREFIX
from joynexus.vla.feature import VLAFeature
from joynexus.vla.policy import Array, Policy
from joynexus.vla.tensors import check_layout
from joynexus.vla.version_file import read_weights
from joynexus.wire.back import RlBegin

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_CRITIC, _EXPLORATION = f"{PREFIX}critic.", f"{PREFIX}exploration."


class LossMetrics(TypedDict):
    """Result of `forward_backward`: the loss, and whether it was not finite, so that the next step will be skipped."""

    loss: float
    vetoed: bool


class StepMetrics(TypedDict):
    """Result of `optim_step` and `apply`.

    `grad_norm` is the global L2 norm before clipping, `lr` the rate of this step, `step` the number of steps applied so
    far, `skipped` whether this one was vetoed.
    """

    grad_norm: float
    lr: float
    step: int
    skipped: bool


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the rate of the step with index `step` (from 0): linear warm-up, then cosine decay."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.decay_steps <= spec.warmup_steps:
        return spec.lr
    done = min((step - spec.warmup_steps) / (spec.decay_steps - spec.warmup_steps), 1.0)
    low = spec.final_lr_fraction
    return spec.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Learner:
    """AdamW with warm-up, decay and clipping on one policy's action module, and on what RL adds to it.

    Attributes:
        policy: the policy that is trained.
        from_rewards: whether steps learn from rewards: since `begin_rl`, until a step on samples.
        optimizer: settings in force: those of the policy's spec, or while steps learn from rewards those of the RL job.
        step: optimizer steps applied with them so far.
        pending: forward_backwards since the last step.
    """

    def __init__(self, policy: Policy) -> None:
        _check(policy.spec.optimizer)
        self.policy = policy
        self.pending = 0
        self._vetoed = False
        self._start(rl=False)
        policy.module.train()

    def _start(self, *, rl: bool) -> None:
        """Begin the optimizer anew, for samples or for rewards."""
        policy = self.policy
        self.from_rewards = rl
        self.optimizer = policy.rl.optimizer if rl and policy.rl is not None else policy.spec.optimizer
        self._named = self._parameters(rl=rl)
        self._moments: dict[str, dict[str, Tensor]] = {}  # by parameter; none before the first step
        self.step = 0

    def _parameters(self, *, rl: bool) -> dict[str, nn.Parameter]:
        named = dict(self.policy.module.named_parameters())
        beside = self.policy.actor_critic if rl else None
        return named | {PREFIX + name: each for name, each in (beside.named_parameters() if beside else ())}

    def forward_backward(
        self, features: Sequence[VLAFeature], state: Array, action: Array, action_mask: Array, *, draw: int = 0
    ) -> LossMetrics:
        """Add the gradient of one op's mean loss; see `Policy.loss` for shapes and errors.

        A loss that is not finite adds nothing and vetoes the coming step.
        """
        loss = self.policy.loss(features, state, action, action_mask, draw=draw)
        value = float(loss.detach())
        vetoed = not math.isfinite(value)
        if vetoed:
            self._vetoed = True
        else:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.pending += 1
        return {"loss": value, "vetoed": vetoed}

    def discard(self) -> None:
        """Drop gradients that wait for a step, and a veto."""
        for parameter in self._named.values():
            parameter.grad = None
        self.pending, self._vetoed = 0, False

    def optim_step(self) -> StepMetrics:
        """Clip, step and clear the gradients. The first step after `begin_rl` begins the spec's optimizer anew.

        Raises:
            ValueError: if there was no `forward_backward` since the last step.
        """
        if not self.pending:
            raise ValueError("optim_step has no gradient to apply: call forward_backward first")
        before = self.from_rewards, self.optimizer, self._named, self._moments, self.step
        if self.from_rewards:
            self._start(rl=False)
        metrics = self.apply()
        if metrics["skipped"]:  # a step that changed nothing must not cost the moments of rewards
            self.from_rewards, self.optimizer, self._named, self._moments, self.step = before
        return metrics

    def begin_rl(self, begin: RlBegin, *, most_bytes: int = 0) -> None:
        """Make the policy ready to learn from rewards, see `Policy.begin_rl`, with an optimizer that starts anew.

        Gradients that wait for a step are dropped.

        Raises:
            ValueError: one sentence; nothing is changed then.
        """
        _check(begin.optimizer)
        self.policy.begin_rl(begin, most_bytes=most_bytes)
        self.discard()
        self._start(rl=True)

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a loss, or of a part of one, made of what `Policy.evaluate` returned.

        It joins those that were added before, until `apply` or `discard`; gradients of samples that wait are dropped. A
        loss that is not finite adds nothing and vetoes the coming step.

        Raises:
            ValueError: if `begin_rl` did not come first, or a step on samples was taken since.
        """
        if not self.from_rewards:
            raise ValueError("the policy is not ready to learn from rewards: rl_begin comes first")
        if self.pending:
            self.discard()
        if bool(torch.isfinite(loss.detach())):
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:
            self._vetoed = True

    def apply(self) -> StepMetrics:
        """Clip, step and clear the gradients; if one of them or a loss was not finite, the step is skipped."""
        lr = learning_rate(self.optimizer, self.step)
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        skipped = self._vetoed or not bool(torch.isfinite(norm))
        if not skipped:
            parameters = [self._named[name] for name in gradients]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optimizer.grad_clip or math.inf, norm)
            self._update(gradients, lr)
            self.step += 1
        self.discard()
        return {"grad_norm": float(norm), "lr": lr, "step": self.step, "skipped": skipped}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of all tensors, and what else a checkpoint needs as plain JSON.

        Raises:
            ValueError: if gradients are pending; checkpoints are taken between steps.
        """
        if self.pending:
            raise ValueError("gradients are pending: a checkpoint is taken after optim_step, not before")
        tensors = {f"module.{name}": t.detach().cpu().clone() for name, t in self.policy.tensors().items()}
        for name in self._named:
            for moment, value in self._moments.get(name, {}).items():
                tensors[f"optimizer.{moment}.{name}"] = value.detach().cpu().clone()
        rl = self.policy.rl
        return tensors, {
            "step": self.step,
            "rl": None if rl is None else msgspec.to_builtins(rl),
            "from_rewards": self.from_rewards,
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what `state` returned, and drop pending gradients.

        Raises:
            ValueError: if tensors are missing, unknown, or of another shape or type; nothing is changed then.
        """
        step, begin, from_rewards = _read(meta)
        policy = self.policy
        before = policy.rl, policy.actor_critic
        try:
            policy.end_rl()
            if begin is not None:
                policy.begin_rl(begin, drawn=False)
            named = self._parameters(rl=from_rewards)
            expected = {f"module.{name}": each for name, each in policy.layout.items()}
            for name, p in named.items() if step else ():
                for moment in _MOMENTS:
                    shape = torch.Size() if moment == "step" else p.shape
                    expected[f"optimizer.{moment}.{name}"] = (shape, torch.float32)
            # Values are not checked: moments may overflow where weights do not; training goes on from there too.
            check_layout("the learner's state", tensors, expected)
        except ValueError:
            policy.rl, policy.actor_critic = before
            raise
        policy.load_tensors({name: tensors[f"module.{name}"] for name in policy.layout})
        self.discard()
        self._start(rl=from_rewards)
        self._moments = {
            name: {m: tensors[f"optimizer.{m}.{name}"].to(p.device, copy=True) for m in _MOMENTS}
            for name, p in (named.items() if step else ())
        }
        self.step = step

    def load_weights(self, source: Path) -> None:
        """Take a module's weights from a file, see `read_weights`, as if the policy had been created with them.

        The optimizer starts anew; pending gradients and what RL added are dropped.

        Raises:
            ValueError: saying what is wrong with the file; nothing is changed then.
        """
        tensors = read_weights(source, self.policy)
        self.policy.end_rl()
        self.policy.load_tensors(tensors)
        self.discard()
        self._start(rl=False)

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Do AdamW's step; bit for bit that of `torch.optim.AdamW(fused=True)`.

        Its function in place of its class, whose first use imports a compiler (70 MB, seconds) and which takes as long
        for its own bookkeeping as a small head takes for the numbers.
        """
        if not self._moments:
            self._moments = {name: _fresh_moments(parameter) for name, parameter in self._named.items()}
        spec, groups = self.optimizer, defaultdict[tuple[float, float], list[str]](list)
        for name in gradients:
            groups[self._rate_and_decay(name, lr)].append(name)
        for (rate, weight_decay), names in groups.items():
            moments = [self._moments[name] for name in names]
            adamw(
                [self._named[name] for name in names],
                [gradients[name] for name in names],
                [each["exp_avg"] for each in moments],
                [each["exp_avg_sq"] for each in moments],
                [],
                [each["step"] for each in moments],
                fused=True,  # one pass over the parameters
                amsgrad=False,
                maximize=False,
                lr=rate,
                beta1=spec.betas[0],
                beta2=spec.betas[1],
                weight_decay=weight_decay,
                eps=spec.eps,
            )

    def _rate_and_decay(self, name: str, lr: float) -> tuple[float, float]:
        spec, critic = self.optimizer, self.policy.rl.critic if self.policy.rl is not None else None
        if name.startswith(_CRITIC) and critic is not None and critic.lr:
            return learning_rate(msgspec.structs.replace(spec, lr=critic.lr), self.step), spec.weight_decay
        if name.startswith(_EXPLORATION):  # it would not decay towards nothing: a log std of 0 is a std of 1
            return lr, 0.0
        return lr, spec.weight_decay


def _read(meta: Mapping[str, Any]) -> tuple[int, RlBegin | None, bool]:
    """Read the JSON part of a state: steps, what RL added, and whether those steps learned from rewards."""
    step, begin, from_rewards = meta.get("step"), meta.get("rl"), meta.get("from_rewards", False)
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"the learner's state has no valid step: {step!r}")
    try:
        return step, msgspec.convert(begin, RlBegin | None), msgspec.convert(from_rewards, bool)
    except msgspec.ValidationError as error:
        raise ValueError(f"the learner's state says what RL added in a way that is not valid: {error}") from error


def _fresh_moments(parameter: Tensor) -> dict[str, Tensor]:
    average = torch.zeros_like(parameter)
    return {"exp_avg": average, "exp_avg_sq": average.clone(), "step": torch.zeros((), device=parameter.device)}


def _check(spec: OptimizerSpec) -> None:
    beta1, beta2 = spec.betas
    wrong = [
        name
        for name, fine in (
            ("lr", 0 < spec.lr < math.inf),
            ("betas", 0 <= beta1 < 1 and 0 <= beta2 < 1),
            ("eps", 0 < spec.eps < math.inf),
            ("weight_decay", 0 <= spec.weight_decay < math.inf),
            ("grad_clip", 0 <= spec.grad_clip < math.inf),
            ("warmup_steps", spec.warmup_steps >= 0),
            ("decay_steps", spec.decay_steps >= 0),
            ("final_lr_fraction", 0 <= spec.final_lr_fraction <= 1),
        )
        if not fine
    ]
    if wrong:
        raise ValueError(f"optimizer settings out of range: {', '.join(f'{n}={getattr(spec, n)!r}' for n in wrong)}")
