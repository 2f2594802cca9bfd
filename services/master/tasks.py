"""A piece of work for an env worker, and what it needs of one.

In: what jobs and data sets want done. Out: a `Task`, which `env_queue.py` gives to whoever can do it. Never: a choice.

A task needs one thing of a worker: a simulator family (`metaworld`), a tenant's own environment (`own:<tenant>:<name>`,
see `hosted.py`), `datasets`, `sampler`, or the folder of a mounted data set (`mounted:<name>`). Its lane of credit
follows: `simulator` for families and environments, `data` for all others.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from joynexus.wire import Failure, Message
from joynexus.wire.back import ActionsEvaluated, DatasetPrepared, IndicesDrawn, RolloutDone, SimulatorDescribed
from joynexus.wire.hosted import OWN
from services.master.metering import EVERYBODY, Account
from services.master.readiness import Setup
from services.master.worker import Worker

DATASETS, SAMPLER, MOUNTED = "datasets", "sampler", "mounted:"

EnvAnswer = RolloutDone | DatasetPrepared | IndicesDrawn | ActionsEvaluated | SimulatorDescribed


def lane_of(need: str) -> str:
    """Return the lane of credit in which a need is served."""
    return "data" if need in (DATASETS, SAMPLER) or need.startswith(MOUNTED) else "simulator"


def simulator_need(tenant: str, env: str) -> str:
    """Return what a worker must serve to run a simulator task of a tenant."""
    family, _, name = env.partition("/")
    return f"{OWN}:{tenant}:{name}" if family == OWN else family


def whoever_serves(env: str) -> str:
    """Name the worker that a simulator task waits for, as a clause."""
    family = env.partition("/")[0]
    if family == OWN:
        return f"{env}: start it with `joynexus env serve`"
    return f"an env worker that serves {family}"


class Task(msgspec.Struct, kw_only=True, eq=False):
    """One piece of work for an env worker.

    Attributes:
        id, since: set by the queue: its name, and when it was submitted.
        tenant, policy: for whom; the policy whose version acts, if any.
        version: that version.
        job: for which it is done; empty if for none.
        need: what the worker must serve.
        answer: kind of message that answers it.
        make: builds the message from task id and attempt.
        scope: whose features of the pictures may be shared, as in `PredictItem`.
        setup: what a worker that has done one has ready for the next of the same: simulator task and cameras.
        done: called with the answer of the attempt that counts.
        failed: called if it is given up.
        alone: a worker died while it had this, so the next one gets nothing beside it.
        kills: workers that died over this alone.
        doubted: the worker at which it came to nothing, while another one tries it.
    """

    tenant: str
    policy: str = ""
    version: int = 0
    job: str = ""
    need: str
    answer: type[EnvAnswer]
    scope: str = ""
    setup: Setup | None = None
    make: Callable[[str, int], Message]
    done: Callable[[EnvAnswer], None]
    failed: Callable[[Failure], None]
    id: str = ""
    since: float = 0.0
    attempt: int = 0
    estimate_s: float = 0.0
    alone: bool = False
    kills: int = 0
    faults: int = 0
    worker: Worker | None = None
    doubted: Worker | None = None
    cancelled: bool = False

    @property
    def account(self) -> Account:
        """Who is charged for it."""
        return Account(self.tenant, self.policy, self.job) if self.tenant else EVERYBODY

    @property
    def lane(self) -> str:
        """The lane of credit in which it is done."""
        return lane_of(self.need)
