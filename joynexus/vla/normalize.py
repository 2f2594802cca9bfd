"""Normalisation of state and action, once, inside the service.

In: a policy spec with frozen statistics. Out: float32 tensors of unit scale, and actions in the robot's own units.
Never: statistics that change, or a division by the spread of a dimension that has none.

Every mode is a centre and a half-width for each dimension, x ↦ (x - centre) / width:

| mode | centre | width | clipped to |
|---|---|---|---|
| mean_std | mean | std | state ±10, so that a nearly constant dimension cannot drown the others |
| min_max | (max + min) / 2 | (max - min) / 2 | |
| quantile | (q99 + q01) / 2 | (q99 - q01) / 2 | ±2.2, as StarVLA does |
| none | 0 | 1 | |

A dimension without spread becomes 0, and comes back as its constant.

Relative actions (control modes `delta…`) are scaled about zero instead, because their zero has a meaning, no motion:
the centre is 0 and the width the root mean square, or the larger of the two limits' magnitudes. So a policy that has
not learned anything nearly stands still, instead of drifting with the mean action of its data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from joynexus.contract import NormalizationMode, VectorStatistics
from joynexus.specs import PolicySpec

_STATE_LIMIT = 10.0
_QUANTILE_LIMIT = 2.2
_NO_SPREAD = 1e-6  # relative to the centre where that is larger than 1


@dataclass(frozen=True)
class _Scale:
    """Centre and width of each dimension [D]; `width` is 0 where there is no spread."""

    centre: Tensor
    width: Tensor
    limit: float | None

    def apply(self, x: Tensor) -> Tensor:
        constant = self.width == 0
        y = (x - self.centre) / torch.where(constant, 1.0, self.width)
        y = torch.where(constant, 0.0, y)
        return y if self.limit is None else y.clamp(-self.limit, self.limit)

    def invert(self, y: Tensor) -> Tensor:
        return y * self.width + self.centre

    def to(self, device: torch.device) -> _Scale:
        return _Scale(self.centre.to(device), self.width.to(device), self.limit)


class Normalizer:
    """Scales the state and action of one policy."""

    def __init__(self, state: _Scale, action: _Scale, low: Tensor | None, high: Tensor | None) -> None:
        self._state, self._action = state, action
        self._low, self._high = low, high

    @classmethod
    def from_spec(cls, spec: PolicySpec) -> Normalizer:
        """Build the normaliser of a policy.

        Raises:
            ValueError: if statistics are missing, not finite, or do not have the contract's lengths.
        """
        contract, mode = spec.contract, spec.normalization
        if mode != "none" and spec.statistics is None:
            raise ValueError(
                f"normalization '{mode}' needs statistics, but the policy has none: use 'none' or give them"
            )
        state, action = (
            _scale(name, dim, mode, getattr(spec.statistics, name, None))
            for name, dim in (("state", contract.state_dim), ("action", contract.action_dim))
        )
        limits = []
        for name, values in (("action_low", contract.action_low), ("action_high", contract.action_high)):
            if values and len(values) != contract.action_dim:
                raise ValueError(f"contract field '{name}' has {len(values)} values for {contract.action_dim} actions")
            limits.append(torch.tensor(values, dtype=torch.float32) if values else None)
        if mode == "mean_std":
            state = _Scale(state.centre, state.width, _STATE_LIMIT)
        if contract.control_mode.startswith("delta") and mode != "none":
            action = _about_zero(action, mode)
        return cls(state, action, *limits)

    def normalize_state(self, state: Tensor) -> Tensor:
        """Scale states [..., S], raw units, to about unit size."""
        return self._state.apply(state)

    def normalize_action(self, action: Tensor) -> Tensor:
        """Scale actions [..., A], raw units, to about unit size."""
        return self._action.apply(action)

    def unnormalize_action(self, action: Tensor) -> Tensor:
        """Bring actions [..., A] back to raw units and into the contract's limits."""
        raw = self._action.invert(action)
        return raw if self._low is None and self._high is None else raw.clamp(self._low, self._high)

    def to(self, device: torch.device) -> Normalizer:
        """Return this normaliser with its tensors on `device`."""
        limits = (None if t is None else t.to(device) for t in (self._low, self._high))
        return Normalizer(self._state.to(device), self._action.to(device), *limits)


def _about_zero(scale: _Scale, mode: NormalizationMode) -> _Scale:
    centre, width = scale.centre, scale.width
    width = (centre**2 + width**2).sqrt() if mode == "mean_std" else centre.abs() + width
    return _Scale(torch.zeros_like(centre), width, scale.limit)


def _scale(name: str, dim: int, mode: NormalizationMode, statistics: VectorStatistics | None) -> _Scale:
    if mode == "none" or statistics is None:
        return _Scale(torch.zeros(dim), torch.ones(dim), None)
    first, second = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantile": ("q01", "q99")}[mode]
    a, b = (torch.tensor(getattr(statistics, field), dtype=torch.float64) for field in (first, second))
    if a.shape != (dim,) or b.shape != (dim,):
        raise ValueError(f"statistics of the {name} have {len(a)} dimensions, but the contract says {dim}")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"statistics of the {name} are not finite: the data set holds NaN or infinity")
    centre, width = (a, b) if mode == "mean_std" else ((a + b) / 2, (b - a) / 2)
    if (width < 0).any():
        raise ValueError(f"statistics of the {name} are wrong: {second} is below its least possible value")
    width = torch.where(width <= _NO_SPREAD * centre.abs().clamp(min=1.0), 0.0, width)
    return _Scale(centre.float(), width.float(), _QUANTILE_LIMIT if mode == "quantile" else None)
