"""A policy's module from its spec: the head, behind an adapter if the spec asks for one.

In: a spec and the width of the backbone's features. Out: the module, or the memory it would take, found out without
taking it. Never: memory for a module that is not valid or larger than its head allows.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import msgspec
import torch
from torch import nn

from joynexus.specs import PolicySpec
from joynexus.vla.adapters import Adapted
from joynexus.vla.heads import ActionModule, build_head
from joynexus.vla.heads.base import MILLION, without_drawing

MAX_CHUNK = 256


def build_module(spec: PolicySpec, hidden_size: int, *, drawn: bool = True) -> ActionModule:
    """Build a policy's module on the CPU.

    Args:
        spec: what to build.
        hidden_size: width of the backbone's features.
        drawn: with the initial weights that `spec.seed` gives; False leaves them to whoever loads all of them next.

    Raises:
        ValueError: as `check_modules`.
    """
    check_modules(spec, hidden_size)
    with nullcontext() if drawn else without_drawing():
        return _build(spec, hidden_size)


def check_modules(spec: PolicySpec, hidden_size: int) -> int:
    """Find what is wrong with a spec's head and adapter, without the memory that they take.

    Returns:
        bytes that the module takes while it is trained: see `training_bytes`.

    Raises:
        ValueError: one sentence, if head, adapter, their configurations or chunk and contract are not valid, or the
            module would be too large.
    """
    return _checked_bytes(msgspec.msgpack.encode(spec), hidden_size)


@functools.lru_cache(maxsize=4096)  # a policy is built whenever it comes into memory, and its spec never changes
def _checked_bytes(encoded_spec: bytes, hidden_size: int) -> int:
    spec = msgspec.msgpack.decode(encoded_spec, type=PolicySpec)
    if not 1 <= spec.chunk <= MAX_CHUNK:
        raise ValueError(f"chunk must be from 1 to {MAX_CHUNK}, not {spec.chunk}")
    if spec.contract.action_dim < 1 or spec.contract.state_dim < 0:
        raise ValueError(
            f"a policy needs at least one action dimension and no negative state dimension, not "
            f"action_dim={spec.contract.action_dim}, state_dim={spec.contract.state_dim}"
        )
    try:
        with torch.device("meta"), without_drawing():
            module = _build(spec, hidden_size)
    except ValueError:
        raise
    except Exception as error:  # an installed module's own fault
        raise ValueError(
            f"the head '{spec.head}' failed with {type(error).__name__} when it was built: {error}"
        ) from error
    parameters = sum(p.numel() for p in module.parameters())
    limit = (module.head if isinstance(module, Adapted) else module).max_parameters
    if parameters > limit:
        raise ValueError(
            f"this policy's '{spec.head}' would have {parameters / MILLION:.0f} million parameters, and at most "
            f"{limit / MILLION:.0f} are allowed: make the sizes in head_config or adapter_config smaller"
        )
    return training_bytes(module)


def training_bytes(module: nn.Module) -> int:
    """Return the bytes that a module takes while it is trained: parameters, gradients, two moments, and buffers."""
    trained = sum(p.numel() * p.element_size() for p in module.parameters())
    return 4 * trained + sum(b.numel() * b.element_size() for b in module.buffers())


def _build(spec: PolicySpec, hidden_size: int) -> ActionModule:
    if spec.adapter != "none":
        return Adapted.from_spec(spec, hidden_size)
    if spec.adapter_config:
        raise ValueError("adapter_config is given, but adapter is 'none': name the adapter, or leave its settings out")
    return build_head(spec, hidden_size)
