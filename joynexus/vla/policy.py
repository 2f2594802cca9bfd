"""A policy: an action module with its normalisation, on features of one backbone.

In: features and raw states (and raw actions to learn from). Out: a loss, or raw actions. Never: a backbone, another
policy's samples, or the global random generator. Trainer, inference and exported policies all run this class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from joynexus.seeds import derived_seed
from joynexus.specs import PolicySpec
from joynexus.vla.actor_critic import PREFIX, ActorCritic
from joynexus.vla.feature import LAST, PaddedFeature, VLAFeature, pad_features
from joynexus.vla.heads.base import without_drawing
from joynexus.vla.modules import build_module, training_bytes
from joynexus.vla.noise import Noise
from joynexus.vla.normalize import Normalizer
from joynexus.vla.tensors import Layout, layout
from joynexus.wire.back import RlBegin

Array = npt.NDArray[np.generic] | Tensor

_GIB = 1 << 30


class Explored(NamedTuple):
    """What a policy drew for B rows, and what training needs to know of it; all float32.

    Attributes:
        actions: [B, chunk, A] raw units, within the contract's limits: what to do.
        sample: [B, …], for `Policy.evaluate`.
        log_prob: [B, chunk, A], of each number as it was drawn, before limits.
        value: [B, V]; V is 0 without a value head.
    """

    actions: npt.NDArray[np.float32]
    sample: npt.NDArray[np.float32]
    log_prob: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]


class Policy:
    """One tenant's trainable thing.

    Attributes:
        spec: what it was built from.
        backbone_digest: the only backbone whose features it takes.
        hidden_size: width H of those features.
        module: the action module, behind its adapter if it has one; float32.
        normalizer: scaling of state and action.
        rl, actor_critic: since `begin_rl`, what it was given and what learns from rewards beside the module; else None.
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
        self.rl: RlBegin | None = None
        self.actor_critic: ActorCritic | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states that the features must hold."""
        judges = self.actor_critic is not None and self.actor_critic.critic is not None
        return tuple(dict.fromkeys((*self.module.layers, LAST))) if judges else self.module.layers

    @property
    def memory_bytes(self) -> int:
        """Bytes that training takes: parameters, gradients, two moments, and buffers."""
        return training_bytes(self.module) + (training_bytes(self.actor_critic) if self.actor_critic else 0)

    @property
    def layout(self) -> Layout:
        """Shapes and types of all tensors by name."""
        beside = layout(self.actor_critic) if self.actor_critic else {}
        return layout(self.module) | {PREFIX + name: each for name, each in beside.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: the module's under their own, those of `actor_critic` behind `rl.`."""
        beside = self.actor_critic.state_dict() if self.actor_critic else {}
        return dict(self.module.state_dict()) | {PREFIX + name: tensor for name, tensor in beside.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of all tensors, named and shaped as in `layout`."""
        own = dict(tensors)
        if self.actor_critic is not None:
            names = self.actor_critic.state_dict()
            self.actor_critic.load_state_dict({name: own.pop(PREFIX + name) for name in names})
        self.module.load_state_dict(own)

    def begin_rl(self, begin: RlBegin, *, drawn: bool = True, most_bytes: int = 0) -> None:
        """Make ready to learn from rewards: give the policy what it draws with, and a value head if one is asked for.

        What it has of an earlier job and is asked for again stays as it was learned: what it draws with, if the
        settings are the same; the value head, if it has the same size. The rest has the initial values that `spec.seed`
        gives; `drawn` as for the policy.

        Args:
            begin: what to give it.
            most_bytes: that training the policy may then take (`memory_bytes`); 0 means no limit.

        Raises:
            ValueError: one sentence, if the head cannot explore, a number in `begin` is out of range, or it takes more
                than `most_bytes`; nothing is changed then.
        """
        with nullcontext() if drawn else without_drawing():
            new = ActorCritic(self.spec, self.module, begin).to(self.device)
        nbytes = training_bytes(self.module) + training_bytes(new)
        if most_bytes and nbytes > most_bytes:
            raise ValueError(
                f"with what RL adds it takes {nbytes / _GIB:.1f} GiB to train, and policies have "
                f"{most_bytes / _GIB:.1f} GiB here: choose a narrower critic or a smaller head_config, or ask the "
                "operator for more (slot_bytes)"
            )
        old, before = self.actor_critic, self.rl
        if old is not None and before is not None:
            if before.exploration == begin.exploration:
                new.exploration = old.exploration
            if old.critic is not None and new.critic is not None and layout(old.critic) == layout(new.critic):
                new.critic = old.critic
        self.rl, self.actor_critic = begin, new

    def end_rl(self) -> None:
        """Forget what `begin_rl` gave."""
        self.rl = self.actor_critic = None

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
        noise = self._seeded([0] * len(features) if seeds is None else seeds, len(features))
        with self._acting(), torch.inference_mode():
            actions = self._raw(self.module(padded, states, noise), state)
        return _array(actions)

    def explore(self, features: Sequence[VLAFeature], state: Array, *, seeds: Sequence[int]) -> Explored:
        """Draw chunks for one request's samples, and judge the samples; arguments and errors as for `act`.

        Raises:
            ValueError: also if the policy was not made ready by `begin_rl`.
        """
        rl = self._ready()
        padded, states = self._inputs(features, state)
        noise = self._seeded(seeds, len(features))
        with self._acting(), torch.inference_mode():
            drawn = self.module.explore(padded, states, noise, rl.exploration)
            self._check_chunks(drawn.log_prob, len(features), "log-probabilities")
            actions = self._raw(drawn.action, state)
            value = rl.values(features, states)
        return Explored(_array(actions), _array(drawn.sample), _array(drawn.log_prob), _array(value))

    def evaluate(self, features: Sequence[VLAFeature], state: Array, sample: Array) -> tuple[Tensor, Tensor, Tensor]:
        """Judge what was drawn under the weights of now, with gradients.

        Args:
            features: B features of this policy's backbone.
            state: raw [B, S].
            sample: [B, …], as `explore` gave it.

        Returns:
            log-probability and entropy [B, chunk, A] of each number, and values [B, V]; V is 0 without a value head.

        Raises:
            ValueError: as `explore`, or if the sample cannot be one of this policy's.
        """
        rl = self._ready()
        padded, states = self._inputs(features, state)
        samples = self._floats(sample)
        if len(samples) != len(features):
            raise ValueError(f"{len(samples)} samples of the exploration came for {len(features)} rows")
        with self._acting():
            log_prob, entropy = self.module.log_prob(padded, states, samples, rl.exploration)
            self._check_chunks(log_prob, len(features), "log-probabilities")
            return log_prob, entropy, rl.values(features, states)

    def _ready(self) -> ActorCritic:
        if self.actor_critic is None:
            raise ValueError("this policy has nothing to explore with: an RL job gives it that")
        return self.actor_critic

    def _seeded(self, seeds: Sequence[int], rows: int) -> Noise:
        if len(seeds) != rows:
            raise ValueError(f"{len(seeds)} seeds came for {rows} rows: give one a row, or none")
        return self._noise("act", [(seed,) for seed in seeds])

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Within the block the module does as when it acts: one that an operator installed may have dropout."""
        training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(training)

    def _raw(self, predicted: Tensor, state: Array) -> Tensor:
        """Bring a module's chunks to raw units and into the contract's limits."""
        origin = self._origin(state)
        self._check_chunks(predicted, len(state))
        return self.normalizer.unnormalize_action(predicted if origin is None else predicted + origin)

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

    def _check_chunks(self, found: Tensor, rows: int, what: str = "chunks") -> None:
        """Refuse what another row's could be mistaken for."""
        expected = [rows, self.spec.chunk, self.spec.contract.action_dim]
        if list(found.shape) != expected:
            raise ValueError(
                f"the head '{self.spec.head}' returned {what} of shape {list(found.shape)}; they must be "
                f"{expected}: have whoever installed the head repair it"
            )

    def _numbers(self, name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
        tensor = self._floats(values)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
        return tensor

    def _floats(self, values: Array) -> Tensor:
        if not isinstance(values, Tensor):
            values = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: arrays off the wire are read-only
        return values.to(self.device, torch.float32)


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.float().cpu().numpy()
    return array
