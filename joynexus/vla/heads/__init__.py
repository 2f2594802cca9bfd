"""Action modules by name: those built in, and those that the operator installed.

In: a policy spec. Out: its action module. Never: a fallback to another head, or a service that does not start because
an installed module is broken.
"""

from __future__ import annotations

import functools

from joynexus.specs import PolicySpec
from joynexus.vla.heads.base import ActionModule
from joynexus.vla.heads.groot import Groot
from joynexus.vla.heads.installed import Heads, installed_heads
from joynexus.vla.heads.oft import Oft

__all__ = ["ActionModule", "build_head", "exploring_heads", "known_heads"]


@functools.cache  # modules are installed before a service starts, not while it runs
def _heads() -> Heads:
    return installed_heads({"groot": Groot, "oft": Oft})


def known_heads() -> tuple[str, ...]:
    """Return the names of all action modules that can be built here."""
    return tuple(sorted(_heads().usable))


def exploring_heads() -> tuple[str, ...]:
    """Return the names of the action modules that can explore, and so learn from rewards."""
    return tuple(name for name in known_heads() if _heads().usable[name].explore is not ActionModule.explore)


def build_head(spec: PolicySpec, hidden_size: int) -> ActionModule:
    """Build the action module of a policy.

    Raises:
        ValueError: if there is no such head, or its configuration is not valid.
    """
    heads = _heads()
    kind = heads.usable.get(spec.head)
    if kind is not None:
        return kind.from_spec(spec, hidden_size)
    known = ", ".join(known_heads())
    if spec.head in heads.broken:
        raise ValueError(
            f"the head '{spec.head}' is installed here but cannot be used, because {heads.broken[spec.head]}; "
            f"usable heads are: {known}"
        )
    raise ValueError(f"there is no head '{spec.head}'; known heads are: {known}")
