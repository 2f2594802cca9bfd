"""A policy: an action module with its normalisation, on features of one backbone.

In: features and raw states (and raw actions to learn from). Out: a loss, or raw actions. Never: a backbone, another
policy's samples, or the global random generator. Trainer, inference and exported policies all run this class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from joynexus.seeds import derived_seed
from joynexus.specs import PolicySpec
from joynexus.vla.feature import PaddedFeature, VLAFeature, pad_features
from joynexus.vla.modules import build_module, training_bytes
from joynexus.vla.noise import Noise
from joynexus.vla.normalize import Normalizer

Array = npt.NDArray[np.generic] | Tensor


class Policy:
    """One tenant's trainable thing.

    Attributes:
        spec: what it was built from.
        backbone_digest: the only backbone whose features it takes.
        hidden_size: width H of those features.
        module: the action module, behind its adapter if it has one; float32.
        normalizer: scaling of state and action.
    """

    def __init__(
        self,
        spec: PolicySpec,
        backbone_digest: str,
        hidden_size: int,
        *,
        device: torch.device | str = "cpu",
        drawn: bool = True,
    ) -> None:
        """Build the policy; with `drawn` its initial weights are those that `spec.seed` gives, see `build_module`.

        Raises:
            ValueError: if head, adapter, chunk, contract or statistics are not valid or do not fit each other.
        """
        if spec.action_target == "relative_to_state" and spec.contract.state_dim != spec.contract.action_dim:
            raise ValueError(
                f"action_target 'relative_to_state' needs states and actions of one length, not "
                f"state_dim={spec.contract.state_dim}, action_dim={spec.contract.action_dim}: use 'absolute'"
            )
        self.device = torch.device(device)
        self.spec = spec
        self.backbone_digest = backbone_digest
        self.hidden_size = hidden_size
        self.module = build_module(spec, hidden_size, drawn=drawn).to(self.device)
        self.normalizer = Normalizer.from_spec(spec).to(self.device)

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states that the features must hold."""
        return self.module.layers

    @property
    def memory_bytes(self) -> int:
        """Bytes that training takes: parameters, gradients, two moments, and buffers."""
        return training_bytes(self.module)

    def loss(
        self, features: Sequence[VLAFeature], state: Array, action: Array, action_mask: Array, *, draw: int = 0
    ) -> Tensor:
        """Compute the head's loss on one op's samples.

        Args:
            features: B features of this policy's backbone.
            state: raw [B, S].
            action: raw [B, chunk, A].
            action_mask: bool [B, chunk], False behind an episode's end.
            draw: which draws a head that needs noise makes, e.g. the op's number; the same again draws the same.

        Returns:
            a scalar with gradients.

        Raises:
            ValueError: if a shape does not fit, nothing is valid, features come from another backbone, or the head
                returns something else.
        """
        chunk, action_dim = self.spec.chunk, self.spec.contract.action_dim
        padded, states = self._inputs(features, state)
        actions = self._numbers("action", action, (len(features), chunk, action_dim))
        valid = torch.as_tensor(np.array(action_mask), device=self.device).bool()
        if valid.shape != (len(features), chunk):
            raise ValueError(f"action_mask has shape {list(valid.shape)}; it must be {[len(features), chunk]}")
        if not valid.any():
            raise ValueError("action_mask is False everywhere: there is no action to learn from")
        target = self.normalizer.normalize_action(actions)
        origin = self._origin(state)
        noise = self._noise("train", [(draw, row) for row in range(len(features))])
        loss = self.module.loss(padded, states, target if origin is None else target - origin, valid, noise)
        if loss.shape != () or not loss.requires_grad:
            gradients = "with" if loss.requires_grad else "without"
            raise ValueError(
                f"the head '{self.spec.head}' returned a loss of shape {list(loss.shape)} {gradients} gradients; it "
                "must be a scalar with gradients: have whoever installed the head repair it"
            )
        return loss

    def act(
        self, features: Sequence[VLAFeature], state: Array, *, seeds: Sequence[int] | None = None
    ) -> npt.NDArray[np.float32]:
        """Predict chunks for one request's samples.

        Args:
            features: B features of this policy's backbone.
            state: raw [B, S].
            seeds: one a row, for heads that draw; None is 0 for each. A row's draws depend on its seed alone.

        Returns:
            float32 [B, chunk, A] in raw units, within the contract's limits.

        Raises:
            ValueError: if a shape does not fit, a state is not finite, features come from another backbone, or the
                head returns chunks of another shape.
        """
        padded, states = self._inputs(features, state)
        seeds = [0] * len(features) if seeds is None else seeds
        if len(seeds) != len(features):
            raise ValueError(f"{len(seeds)} seeds came for {len(features)} rows: give one a row, or none")
        noise = self._noise("act", [(seed,) for seed in seeds])
        training = self.module.training
        self.module.eval()
        try:
            with torch.inference_mode():
                predicted, origin = self.module(padded, states, noise), self._origin(state)
                self._check_chunks(predicted, len(features))
                actions = self.normalizer.unnormalize_action(predicted if origin is None else predicted + origin)
        finally:
            self.module.train(training)
        result: npt.NDArray[np.float32] = actions.float().cpu().numpy()
        return result

    def _inputs(self, features: Sequence[VLAFeature], state: Array) -> tuple[PaddedFeature, Tensor]:
        """Pad to this op's own longest sample, whoever else shared the forward."""
        states = self._numbers("state", state, (len(features), self.spec.contract.state_dim))
        if not torch.isfinite(states).all():
            raise ValueError("the state holds NaN or infinity: check the sensor or data set it comes from")
        foreign = next((f.backbone for f in features if f.backbone != self.backbone_digest), None)
        if foreign is not None:
            raise ValueError(
                f"the features come from backbone {foreign}, but this policy was made for {self.backbone_digest}"
            )
        padded = pad_features(features, self.layers, device=self.device)
        return padded, self.normalizer.normalize_state(states)

    def _noise(self, use: str, rows: Sequence[tuple[int, ...]]) -> Noise:
        return Noise([derived_seed(self.spec.seed, use, *row) for row in rows], device=self.device)

    def _origin(self, state: Array) -> Tensor | None:
        """Return where predictions are counted from, [B, 1, A] in normalised actions; None for their own zero."""
        if self.spec.action_target == "absolute":
            return None
        raw = self._numbers("state", state, (len(state), self.spec.contract.state_dim))
        return self.normalizer.normalize_action(raw)[:, None]

    def _check_chunks(self, predicted: Tensor, rows: int) -> None:
        """Refuse what another row's chunk could be mistaken for."""
        expected = [rows, self.spec.chunk, self.spec.contract.action_dim]
        if list(predicted.shape) != expected:
            raise ValueError(
                f"the head '{self.spec.head}' returned chunks of shape {list(predicted.shape)}; they must be "
                f"{expected}: have whoever installed the head repair it"
            )

    def _numbers(self, name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(values, Tensor):
            values = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: arrays off the wire are read-only
        tensor = values.to(self.device, torch.float32)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
        return tensor
