"""CPU time of a local cluster's processes, by role.

In: the cluster's folder. Out: seconds of user and system time since each role's process started, those of its children
(simulators) included. Never: a process that is none of the cluster's, or one that is counted twice (roles are health's
children).
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from joynexus.local import LocalCluster

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(cluster: LocalCluster) -> dict[str, float]:
    """Return CPU seconds so far, by role; a process that ended counts as long as its parent lives."""
    children = _children()
    seconds: defaultdict[str, float] = defaultdict(float)
    roles = cluster.all_running()
    for name, pid in roles.items():
        family = [pid]
        for member in family:  # grows while it is walked
            family += [child for child in children.get(member, []) if child not in roles.values()]
        seconds[name.partition("-")[0]] += sum(map(_process_s, family))
    return dict(seconds)


def _children() -> dict[int, list[int]]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (fields := _stat(int(path.name))):
            children[int(fields[1])].append(int(path.name))
    return children


def _process_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended (proc(5), fields 14 to 17)."""
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
