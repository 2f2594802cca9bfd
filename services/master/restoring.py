"""Which part takes back which record when a master starts.

In: records, in the order in which the journal gives them. Out: parts that know what they knew. Never: anything begun:
that comes once all is restored.
"""

from __future__ import annotations

import msgspec

from common.journal.records import (
    BlobRecord,
    CheckpointRecord,
    CurveRecord,
    DatasetRecord,
    JobRecord,
    LeaseRecord,
    LifeRecord,
    OpDone,
    OpRecord,
    PageRecord,
    PolicyRecord,
    Record,
    StateRecord,
    UsageRecord,
    VersionRecord,
)
from services.master.catalog import Catalog
from services.master.holdings import Holdings
from services.master.jobs import Jobs
from services.master.leases import Leases
from services.master.metering import Meter
from services.master.policies import Policies


class Parts(msgspec.Struct, frozen=True):
    """The parts of the core that the journal has something for."""

    policies: Policies
    leases: Leases
    jobs: Jobs
    catalog: Catalog
    meter: Meter
    holdings: Holdings

    def restore(self, record: Record) -> None:
        """Give a record to its part."""
        match record:
            case PolicyRecord() | VersionRecord() | CheckpointRecord() | StateRecord():
                self.policies.restore(record)
            case LeaseRecord():
                self.leases.restore(record)
            case OpRecord():
                self.policies.restore_op(record)
            case OpDone():
                self.policies.restore_done(record)
            case JobRecord() | PageRecord() | CurveRecord():
                self.jobs.restore(record)
            case DatasetRecord():
                self.catalog.restore(record)
            case UsageRecord() | LifeRecord():
                self.meter.restore(record)
            case BlobRecord():
                self.holdings.upload(record.tenant, record.digest, record.nbytes)
