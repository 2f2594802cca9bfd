"""The baselines: every tenant with a backbone and devices of its own, as today's frameworks run them.

In: the same recipes and the same table. Out: seconds and busy device seconds of one tenant alone. Never: a cost that
the service does not have. Where a choice had to be made it favours the baseline: no jitter between environments, no
messages, no journal, no checkpoints, no gradient synchronisation between the training devices.

Rollouts go in lock-step, as in RLinf: all environments step, then all rows are acted on. With two stages, half of the
environments step while the other half is acted on (RLinf's `pipeline_stage_num`).
"""

from __future__ import annotations

import math

import msgspec

from benchmarks._tenants import SFT_BATCH, Rl
from benchmarks._times import Times


class Devices(msgspec.Struct, frozen=True):
    """What a tenant holds. With `together`, its inference devices train as well, between rollouts."""

    train: int
    inference: int
    env: int
    together: bool = False

    @property
    def count(self) -> int:
        """How many it holds."""
        return self.env + (self.inference if self.together else self.train + self.inference)


class Alone(msgspec.Struct, frozen=True):
    """One tenant's whole job: seconds, and busy device seconds by role."""

    seconds: float
    train_s: float
    inference_s: float
    env_s: float

    def __mul__(self, times: int) -> Alone:
        return Alone(self.seconds * times, self.train_s * times, self.inference_s * times, self.env_s * times)


def rl_iteration(times: Times, recipe: Rl, devices: Devices, *, stages: int = 1) -> Alone:
    """One iteration: rollouts, training, weights to the inference devices."""
    part = recipe.envs // stages
    env_s = times.simulate(recipe.simulator, math.ceil(part / devices.env), recipe.chunk)
    act_s = times.forward(math.ceil(part / devices.inference)) + times.act("oft")
    if stages == 1:
        rollout_s = recipe.chunks * (env_s + act_s)
    else:
        assert stages == 2
        rollout_s = recipe.chunks * max(2 * env_s, 2 * act_s, env_s + act_s)
    micros = math.ceil(recipe.samples / recipe.micro)
    steps = math.ceil(recipe.samples / recipe.batch)
    micro_s = times.forward(recipe.micro) + times.train("oft", recipe.micro)
    train_s = math.ceil(micros / devices.train) * micro_s + steps * times.optim_step_s
    return Alone(
        rollout_s + train_s + times.publish_s + times.apply_s,
        micros * micro_s + steps * times.optim_step_s * devices.train,
        stages * recipe.chunks * act_s * devices.inference,
        stages * recipe.chunks * env_s * devices.env,
    )


def sft_step(times: Times, devices: Devices, batch: int = SFT_BATCH) -> Alone:
    """One step: each training device takes its part of the batch; the frozen backbone runs in every epoch."""
    part = math.ceil(batch / devices.train)
    seconds = times.forward(part) + times.train("groot", part) + times.optim_step_s
    return Alone(seconds, seconds * devices.train, 0.0, 0.0)
