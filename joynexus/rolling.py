"""`joynexus restart`: the roles of a running cluster are started anew, one after another, while the others serve.

In: the cluster's folder, and which roles. Out: each ended by SIGTERM, so that it finishes or hands over what it has,
and started again by health. Never: the next one ended before all are back and known to the master, or an operation of
a tenant that fails: queues and clients wait meanwhile.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from joynexus.client import Client, connect
from joynexus.launch import start_health
from joynexus.local import LocalCluster
from joynexus.wire import JoyNexusError

HEALTH = "health"


def restart(
    folder: Path,
    which: Sequence[str] = (),
    *,
    grace_s: float = 60.0,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Restart roles of a cluster, one after another.

    Args:
        folder: the cluster's folder.
        which: roles (`trainer`: all of them) or processes (`trainer-2`); none: all. Workers go first, then the master,
            then health.
        grace_s: a role that has not ended so long after SIGTERM is killed; what it had is then done again.
        timeout_s: how long everything may take to be back after each.
        say: called with a line on each step.

    Returns:
        The names of the processes, in the order in which they were restarted; those that scaling ended, too.

    Raises:
        ValueError: if there is no such role, health does not run, or one does not come back; the rest runs on then.
    """
    cluster = LocalCluster(folder)
    plan = cluster.load_plan()
    if not cluster.running(HEALTH):
        raise ValueError(f"health does not run in {folder}, and it starts the roles again: run `joynexus up` first")
    report = cluster.load_health()
    instances = () if report is None else report.instances
    names = chosen({i.name: i.role for i in instances if i.state != "leaving"}, which)
    try:
        client = connect(cluster.client_file)
    except JoyNexusError as error:
        raise ValueError(f"the cluster in {folder} does not serve, so nothing was restarted: {error}") from error
    with client:
        _wait_until_back(cluster, client, timeout_s)
        for name in names:
            old = cluster.running(name)
            if not old:  # scaling has had it leave meanwhile
                continue
            say(f"restarting {name}")
            if name == HEALTH:  # SIGTERM would have it take the cluster down; it holds nothing that could be lost
                cluster.end([name], grace_s=grace_s, by=signal.SIGKILL)
                start_health(cluster, Path(plan.root), plan.roles[0].env.get("JOYNEXUS_LOG_LEVEL", "info"))
            elif cluster.end([name], grace_s=grace_s):
                say(f"{name} had not ended after {grace_s:g} s and was killed")
            _wait_until_back(cluster, client, timeout_s, name=name, old=old)
    return names


def chosen(roles: Mapping[str, str], which: Sequence[str]) -> list[str]:
    """Return the names of the processes that are meant, in the order in which they go; ValueError for a wrong word.

    Args:
        roles: role by name, of those that health looks after.
        which: as in `restart`.
    """
    roles = {**roles, HEALTH: HEALTH}
    meant: set[str] = set()
    for word in which:
        found = [name for name, role in roles.items() if word == role] or [name for name in roles if word == name]
        if not found:
            raise ValueError(f"'{word}' is no role of this cluster: it has {', '.join(roles)}")
        meant.update(found)
    last = {"master": 1, HEALTH: 2}
    return sorted((name for name in roles if name in meant or not which), key=lambda name: last.get(roles[name], 0))


def _wait_until_back(cluster: LocalCluster, client: Client, timeout_s: float, *, name: str = "", old: int = 0) -> None:
    """Wait until all roles run and the master knows them; of `name`, another process than `old`, or none if it left."""
    deadline = time.monotonic() + timeout_s
    while True:
        health, report = cluster.running(HEALTH), cluster.load_health()
        known = () if report is None or report.pid != health else report.instances
        instances = [instance for instance in known if instance.state != "leaving"]
        for instance in instances:
            if instance.state == "crash-loop":
                log = cluster.log_file(instance.name)
                raise ValueError(f"{instance.name} does not start again: {instance.reason} (see {log})")
        up = bool(instances) and all(i.state == "running" and i.pid == cluster.running(i.name) for i in instances)
        left = name != HEALTH and all(instance.name != name for instance in instances)
        if up and (not name or left or cluster.running(name) != old):
            workers = {instance.pid for instance in instances if instance.role != "master"}
            with contextlib.suppress(JoyNexusError):  # the master may only just be back
                if workers <= {role.pid for role in client.status().roles if role.phase != "lost"}:
                    return
        if time.monotonic() > deadline:
            missing = [instance.name for instance in instances if instance.state != "running"]
            what = ", ".join(missing) or name or "a role"
            raise ValueError(f"{what} was not back within {timeout_s:g} s (see the logs in {cluster.run})")
        time.sleep(0.05)
