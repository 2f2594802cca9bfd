"""Groups of processes that do the same work, and how many there may be: what an operator says, `env=1-4,inference=2`.

In: words. Out: a range by group; a group's processes are `env`, `env-2`, `env-3`, … Never: none at all of a kind (a new
process is like one that runs), or a word that is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

WORKERS = ("trainer", "inference", "env")
"""Kinds of processes that there may be several of."""
MOST = 64
"""Processes of a group; on one machine, or one engine, there is no use for more."""


class Range(msgspec.Struct, frozen=True):
    """From how many to how many processes; `least == most` is a fixed number."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def parse_scale(text: str, *, families: bool = True) -> dict[str, Range]:
    """Return the range of each group in words like `env=1-4,inference=2`; empty text has none.

    Args:
        text: the words.
        families: whether kinds of a role may be groups of their own, like compose's `env-maniskill`.

    Raises:
        ValueError: one sentence that says which word is wrong.
    """
    ranges: dict[str, Range] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([a-z][a-z0-9-]*)=(\d{1,4})(?:-(\d{1,4}))?", word)
        if found is None:
            raise ValueError(f"'{word}' says no number of processes: write for example env=3, or env=1-4")
        group, least, most = found[1], int(found[2]), int(found[3] or found[2])
        if not 1 <= least <= most <= MOST:
            raise ValueError(f"'{word}' cannot be: at least 1, at most {MOST}, and the smaller number first")
        if group in ranges:
            raise ValueError(f"'{group}' is named twice: say one number or range for it")
        if (role_of(group) if families else group) not in WORKERS:
            raise ValueError(f"there is no '{group}' that could be scaled: there are {', '.join(WORKERS)}")
        ranges[group] = Range(least, most)
    return ranges


def role_of(group: str) -> str:
    """Return what a group's processes are: `env-maniskill` is an env, too."""
    return group.partition("-")[0]


def group_for(demand: str, role: str, groups: Iterable[str]) -> str:
    """Return the group that does a kind of work; empty if there is none.

    Args:
        demand: kind of work, like `env:maniskill`: the group is `env-maniskill` if there is one, else `env`, else the
            only one of its role.
        role: of those who do it.
        groups: all there are.
    """
    of_role = [group for group in groups if role_of(group) == role]
    names = (demand.replace(":", "-"), role, *(of_role if len(of_role) == 1 else ()))
    return next((name for name in names if name in of_role), "")


def group_of(name: str) -> str:
    """Return the group of a process."""
    return re.sub(r"-\d+$", "", name)


def number_of(name: str) -> int:
    """Return the number of a process in its group."""
    return int(name.removeprefix(group_of(name)).removeprefix("-") or 1)


def instance_name(group: str, number: int) -> str:
    """Return the name of a group's process."""
    return group if number == 1 else f"{group}-{number}"
