"""Action modules by name.

In: a policy spec. Out: its action module. Never: a fallback to another head.
"""

from __future__ import annotations

from joynexus.specs import PolicySpec
from joynexus.vla.heads.base import ActionModule
from joynexus.vla.heads.oft import Oft

__all__ = ["ActionModule", "build_head", "known_heads"]

_HEADS: dict[str, type[ActionModule]] = {"oft": Oft}


def known_heads() -> tuple[str, ...]:
    """Return the names of all action modules that can be built here."""
    return tuple(sorted(_HEADS))


def build_head(spec: PolicySpec, hidden_size: int) -> ActionModule:
    """Build the action module of a policy.

    Raises:
        ValueError: if there is no such head, or its configuration is not valid.
    """
    kind = _HEADS.get(spec.head)
    if kind is None:
        raise ValueError(f"there is no head '{spec.head}'; known heads are: {', '.join(known_heads())}")
    return kind.from_spec(spec, hidden_size)
