"""What only operators ask: `FORBIDDEN` to anybody else."""

from __future__ import annotations

from joynexus.bounds import Short
from joynexus.wire.base import Wire


class DrainWorker(Wire, frozen=True, kw_only=True):
    """Give a worker nothing new, and have it end once it has finished what it has.

    Answer: `Done` at once, and again if it drains already; `NOT_FOUND` if there is no such worker, `INVALID` if the
    name may be one's or another one's.

    Attributes:
        worker: its name, its instance, or its process's name, e.g. `env-2`.
    """

    worker: Short


class BackupBegin(Wire, frozen=True, kw_only=True):
    """Keep all blobs from now on: somebody copies the journal, and then the blobs that it refers to.

    Answer: `BackupTicket`.

    Attributes:
        ttl_s: blobs may be deleted again after this, if `BackupEnd` does not come.
    """

    ttl_s: float


class BackupTicket(Wire, frozen=True, kw_only=True):
    """No blob is deleted until `BackupEnd` names this."""

    ticket: str


class BackupEnd(Wire, frozen=True, kw_only=True):
    """The copy is made: delete blobs again. Answer: `Done`, also for a ticket that has ended already."""

    ticket: Short


class CancelJobs(Wire, frozen=True, kw_only=True):
    """Cancel all jobs of a tenant that have not ended. Answer: `Done`, also if there are none."""

    tenant: Short
