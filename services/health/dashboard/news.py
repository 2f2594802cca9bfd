"""What is worth saying aloud of a change between two pictures: a screen reader hears it, everybody sees the tables.

In: two pictures of one scope. Out: short sentences, few. Never: figures that change all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.health.dashboard.listing import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from joynexus.wire.back import ClusterView

MOST = 3
"""Sentences told one by one; of more, only how many there are."""


def news(before: ClusterView, after: ClusterView) -> list[str]:
    """Return what happened between two pictures."""
    said: list[str] = []
    states = {(job.tenant, job.job): job.state for job in before.jobs}
    for job in after.jobs:
        was = states.get((job.tenant, job.job))
        if was is not None and was != job.state and job.state in (*ENDED, "parked", "paused"):
            said.append(f"Job {job.job} {'is ' * (job.state not in ENDED)}{job.state}.")
    phases = {role.worker: role.phase for role in before.roles}
    for role in after.roles:
        was = phases.get(role.worker)
        if was is not None and was != role.phase and "lost" in (was, role.phase):
            said.append(f"{role.worker} is {'lost' if role.phase == 'lost' else 'back'}.")
    decided = {(decision.at, decision.group) for decision in before.decisions}
    said += [
        f"{decision.group} is scaled from {decision.before} to {decision.after}."
        for decision in after.decisions
        if (decision.at, decision.group) not in decided
    ]
    return said


def aloud(said: Sequence[str]) -> str:
    """Return sentences as one text that is not too long to listen to."""
    more = len(said) - MOST
    return " ".join([*said[:MOST], *([f"And {more} more changes."] if more > 0 else [])])
