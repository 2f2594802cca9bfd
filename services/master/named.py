"""Which worker an operator means: by its own name or by its process's, which differ once processes were scaled.

In: a word, the workers that may be meant, what health calls their processes. Out: one of them. Never: a guess between
two.

A process has the name that health knows it by, or the end of its instance (`host/env-2`), as in `joynexus status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from joynexus.wire import ErrorCode
from joynexus.wire.back import InstanceRow
from services.master.outbox import refuse
from services.master.worker import Worker

_SHOWN = 20


def worker_named(word: str, workers: Iterable[Worker], rows: Mapping[str, InstanceRow]) -> Worker:
    """Return the worker of this name, or whose process has it.

    Args:
        rows: what health knows of processes, by instance.

    Raises:
        JoyNexusError: `NOT_FOUND` with those that there are; `INVALID` if it may be one or another.
    """

    def process(worker: Worker) -> str:
        instance = worker.register.instance
        return row.name if (row := rows.get(instance)) else instance.rpartition("/")[2]

    def described(worker: Worker) -> str:
        apart = process(worker) not in ("", worker.name)
        return f"{worker.name} (process {process(worker)[:80]})" if apart else worker.name

    able = sorted(workers, key=lambda worker: worker.name)
    meant = [worker for worker in able if word and word in (worker.name, worker.register.instance, process(worker))]
    if len(meant) > 1:
        instances = ", ".join(worker.register.instance[:80] for worker in meant if worker.register.instance)
        raise refuse(
            ErrorCode.INVALID,
            f"'{word}' may be {' or '.join(map(described, meant))}: say which by its instance, one of {instances}",
        )
    if not meant:
        more = f" and {len(able) - _SHOWN} more" if len(able) > _SHOWN else ""
        raise refuse(
            ErrorCode.NOT_FOUND,
            f"there is no worker '{word[:80]}', nor a process of that name, to drain; there are "
            f"{', '.join(map(described, able[:_SHOWN])) or 'none'}{more}",
        )
    return meant[0]
