"""The master that ships, set as an operator of such devices would, its seconds at the pace of the devices.

In: `BENCH_PACE`, seconds of the table in a real one. Out: the master's process. Never: another rule than the shipped
ones: only numbers that an operator or a host would choose differ. For benchmarks only.
"""

from __future__ import annotations

import os
from functools import partial

from services.master import service
from services.master.__main__ import main
from services.master.config import CoreConfig

PACE = "BENCH_PACE"
ROLLOUT_EPISODES = 16
"""Environments that a device steps together; the table's devices have room for more than a CPU has cores."""


def paced(pace: float) -> partial[CoreConfig]:
    """Return the master's numbers, with what is measured in device time divided by the pace."""
    usual = CoreConfig()
    return partial(
        CoreConfig,
        max_rows=64,
        rollout_episodes=ROLLOUT_EPISODES,
        group_s=usual.group_s / pace,
        balance_s=usual.balance_s / pace,
        stuck_s=usual.stuck_s / pace,
    )


if __name__ == "__main__":
    setattr(service, "CoreConfig", paced(float(os.environ[PACE])))  # noqa: B010 - a name that it only imports
    main()
