"""The action module: what turns a feature and a state into a chunk of actions.

In: features of a frozen backbone, padded with a mask, a normalised state, and noise by row. Out: normalised actions and
a loss. Never: raw units (that is `normalize`), another policy's rows, or a random generator of its own (initial weights
come from `spec.seed`, everything else from `Noise`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from joynexus.specs import ExplorationSpec, PolicySpec
from joynexus.vla.feature import LAST, PaddedFeature
from joynexus.vla.noise import Noise

_Config = TypeVar("_Config", bound=msgspec.Struct)
MILLION = 1_000_000
_ENOUGH = 16
_drawing: ContextVar[bool] = ContextVar("drawing", default=True)


class Drawn(NamedTuple):
    """Chunks that were drawn to explore.

    Attributes:
        action: normalised [B, chunk, A], as drawn.
        sample: float32 [B, …], what `ActionModule.log_prob` needs to find the log-probability again.
        log_prob: [B, chunk, A], of each number.
    """

    action: Tensor
    sample: Tensor
    log_prob: Tensor


class ActionModule(nn.Module, ABC):
    """Base of all action modules. One that can explore, and so learn from rewards, has the last three methods too.

    Shapes: B samples, L tokens, H feature width, S state, A action dimensions.

    Attributes:
        layers: hidden states that it reads; -1 is the last one. A module's own parts need other names than this and
            `rl`.
        max_parameters: a spec that asks for more is refused, so that one tenant's head does not fill a trainer that
            many share. With gradients and optimizer a parameter takes 16 bytes.
    """

    layers: tuple[int, ...] = (LAST,)
    max_parameters: ClassVar[int] = 64 * MILLION

    def __init__(self, *, hidden_size: int, state_dim: int, action_dim: int, chunk: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.state_dim = state_dim
        self.action_dim = action_dim
        self.chunk = chunk

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: PolicySpec, hidden_size: int) -> ActionModule:
        """Build a module whose initial weights depend on `spec` alone.

        Sizes are found out by building under `torch.device("meta")`, so this must not need the weights' values.

        Raises:
            ValueError: if `spec.head_config` has an unknown key or a value out of range.
        """

    @abstractmethod
    def forward(self, feature: PaddedFeature, state: Tensor, noise: Noise) -> Tensor:
        """Predict normalised actions [B, chunk, A] from a feature of B samples and state [B, S]."""

    @abstractmethod
    def loss(self, feature: PaddedFeature, state: Tensor, action: Tensor, action_mask: Tensor, noise: Noise) -> Tensor:
        """Return the scalar loss against normalised actions [B, chunk, A] where action_mask bool [B, chunk] is True."""

    def exploration(self, spec: ExplorationSpec, random: torch.Generator) -> nn.Module:
        """Build what this module draws with; what is learned of it are its parameters."""
        raise NotImplementedError

    def explore(self, feature: PaddedFeature, state: Tensor, noise: Noise, exploration: nn.Module) -> Drawn:
        """Draw chunks around those that `forward` would predict, without gradients."""
        raise NotImplementedError

    def log_prob(
        self, feature: PaddedFeature, state: Tensor, sample: Tensor, exploration: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of what was drawn, each [B, chunk, A], with gradients.

        With the weights that drew it, the same rows give the log-probability that `explore` gave.

        Raises:
            ValueError: if `sample` is not one of `explore`'s.
        """
        raise NotImplementedError


def read_config(spec: PolicySpec, kind: type[_Config]) -> _Config:
    """Check `spec.head_config` against a head's own struct.

    Raises:
        ValueError: naming the unknown key or the value that is out of range.
    """
    return convert_config(f"head_config of '{spec.head}'", spec.head_config, kind)


def convert_config(what: str, values: Mapping[str, object], kind: type[_Config]) -> _Config:
    """Check a module's settings against its struct; `what` names them in the error.

    Raises:
        ValueError: as `read_config`.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ValueError(f"{what} is not valid: {error}; known keys: {known}") from error


def check_sample(sample: Tensor, *shape: int) -> None:
    """Refuse what `ActionModule.explore` cannot have returned.

    Raises:
        ValueError: naming expected and got.
    """
    if sample.shape[1:] != shape:
        raise ValueError(
            f"a sample of the exploration has shape {list(sample.shape[1:])}; this policy's have {list(shape)}"
        )


@contextmanager
def without_drawing() -> Iterator[None]:
    """Within the block modules are built without initial values, for those whose weights come from elsewhere."""
    token = _drawing.set(False)
    try:
        yield
    finally:
        _drawing.reset(token)


def once(read: Callable[..., Tensor], shared: Tensor, *others: Tensor) -> Tensor:
    """Return `read(shared, *others)`, [B, …]; where `shared` is one row B times (stride 0), read it for a few of them.

    Not for one: products of a few rows may have other bits. From 16 rows on they have the same on every host that was
    measured (docs/adr/0007), so that a row's numbers do not tell whether the others were the same.
    """
    rows = len(shared)
    if rows <= _ENOUGH or shared.stride(0) != 0:
        return read(shared, *others)
    return read(shared[:_ENOUGH], *(other[:_ENOUGH] for other in others))[:1].expand(rows, -1)


class _Linear(nn.Linear):
    """A linear layer whose values `linear` draws."""

    def reset_parameters(self) -> None:
        """Draw nothing: torch would take its global generator."""


def linear(inputs: int, outputs: int, random: torch.Generator) -> nn.Linear:
    """Make a linear layer with weights and bias uniform in ±1/sqrt(inputs), as torch does, from a private generator."""
    layer = _Linear(inputs, outputs)
    bound = max(inputs, 1) ** -0.5
    if _drawing.get():
        with torch.no_grad():
            layer.weight.uniform_(-bound, bound, generator=random)
            layer.bias.uniform_(-bound, bound, generator=random)
    return layer


def normal(shape: tuple[int, ...], std: float, random: torch.Generator) -> Tensor:
    """Draw initial values of a parameter from a private generator."""
    values = torch.empty(shape)
    return values.normal_(generator=random) * std if _drawing.get() else values
