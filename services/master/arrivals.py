"""Blobs that tenants have uploaded: theirs once that is durable, if there is room for them.

In: `BlobStored`. Out: a record, then `BlobOffset`; or a refusal. Never: a blob over a quota kept, or one acknowledged
that a restart would not know of.
"""

from __future__ import annotations

from common.journal.records import BlobRecord
from joynexus.wire import Failure, JoyNexusError
from joynexus.wire.front import BlobOffset
from services.master.events import BlobStored
from services.master.holdings import Holdings
from services.master.metering import Account, Meter
from services.master.outbox import Outbox, not_saved


class Arrivals:
    """Takes in uploads that are complete."""

    def __init__(self, outbox: Outbox, holdings: Holdings, meter: Meter) -> None:
        self._outbox = outbox
        self._holdings = holdings
        self._meter = meter

    def refusal(self, tenant: str, digest: str, nbytes: int) -> Failure | None:
        """Say why a tenant may not upload so much; None if it may."""
        try:
            self._holdings.check_quota(tenant, digest, nbytes)
        except JoyNexusError as error:
            return error.failure
        return None

    def on_stored(self, event: BlobStored) -> None:
        """A blob is in the store."""
        refused = self.refusal(event.tenant, event.digest, event.nbytes)
        if refused is not None:
            self._holdings.discard_orphan(event.digest)
            self._outbox.send(event.peer, refused, re=event.request)
            return

        def saved() -> None:
            self._holdings.upload(event.tenant, event.digest, event.nbytes)
            self._meter.add(Account(event.tenant), {"bytes_in": event.nbytes})
            stored = BlobOffset(digest=event.digest, offset=event.nbytes, complete=True)
            self._outbox.send(event.peer, stored, re=event.request)

        def lost(reason: str) -> None:
            self._outbox.send(event.peer, not_saved("the blob", reason).failure, re=event.request)

        self._outbox.save([BlobRecord(tenant=event.tenant, digest=event.digest, nbytes=event.nbytes)], saved, lost)
