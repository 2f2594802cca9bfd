"""Action modules that an operator installed: packages with an entry point in the group `joynexus.action_modules`.

In: the modules built in, and the packages on this process's path. Out: usable modules by name, and for each name that
cannot be used the reason. Never: an exception because of what is installed, or one of two modules of the same name
chosen by chance.

A package says in its `pyproject.toml`, with the name that a policy's `head` asks for on the left:

    [project.entry-points."joynexus.action_modules"]
    mean_pool = "my_package:MeanPool"
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from joynexus.vla.heads.base import ActionModule

GROUP = "joynexus.action_modules"

log = logging.getLogger(__name__)


@dataclass
class Heads:
    """Usable action modules by name, and by name why others are not."""

    usable: dict[str, type[ActionModule]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def installed_heads(built_in: Mapping[str, type[ActionModule]]) -> Heads:
    """Join the modules built in with the installed ones; what cannot be used is logged once and named in `broken`."""
    heads = Heads(dict(built_in))
    offers: dict[str, dict[str, EntryPoint]] = {}  # a package that is seen twice on the path is one package
    for offer in _offers():
        offers.setdefault(offer.name, {}).setdefault(_package(offer), offer)
    for name, packages in sorted(offers.items()):
        try:
            kind = _load(name, packages, built_in)
        except (Exception, SystemExit) as error:  # others' code: whatever it does, the service must start
            reason = str(error) if isinstance(error, _Refused) else _import_failed(packages, error)
            log.warning("action module '%s' is not available: %s", name, reason)
            if name not in built_in:
                heads.broken[name] = reason
        else:
            heads.usable[name] = kind
    return heads


def _offers() -> tuple[EntryPoint, ...]:
    try:
        return tuple(entry_points(group=GROUP))
    except Exception as error:  # a package whose metadata is torn; which one, the library does not say
        log.warning("no installed action module is available: a package's entry points cannot be read: %r", error)
        return ()


class _Refused(Exception):  # noqa: N818 - an outcome, caught above
    """What was found is no action module that can be used."""


def _load(
    name: str, packages: Mapping[str, EntryPoint], built_in: Mapping[str, type[ActionModule]]
) -> type[ActionModule]:
    named = " and ".join(f"'{package}'" for package in sorted(packages))
    if name in built_in:
        raise _Refused(f"the name is that of a built-in module, which stays in use; {named} must use another")
    if len(packages) > 1:
        raise _Refused(f"the packages {named} all have a module of this name; uninstall all but one")
    (offer,) = packages.values()
    kind = offer.load()
    if not (isinstance(kind, type) and issubclass(kind, ActionModule)):
        raise _Refused(f"'{offer.value}' of package {named} is no subclass of joynexus.vla.heads.ActionModule")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise _Refused(f"'{offer.value}' of package {named} does not define {missing}")
    return kind


def _import_failed(packages: Mapping[str, EntryPoint], error: BaseException) -> str:
    ((package, offer),) = packages.items()
    first_line = str(error).partition("\n")[0]
    return f"importing '{offer.value}' of package '{package}' failed with {type(error).__name__}: {first_line}"


def _package(offer: EntryPoint) -> str:
    return (offer.dist.name if offer.dist is not None else None) or offer.module
