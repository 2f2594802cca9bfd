"""What has come through a door: whose is it, may it come in, and is a refusal told?

In: frames with the key that they came with. Out: what `admit` makes of them, or nothing if nothing is to be said.
Never: a refusal that is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.refusals import Refusals, name_of
from joynexus.keys import KeyRegistry
from joynexus.wire import Buffer, ErrorCode, Failure, failure
from joynexus.wire.errors import TOO_OFTEN
from services.master.doors import look_up
from services.master.events import BackMessage, FrontMessage, Peer
from services.master.gate import BlobMessage, Refused, admit
from services.master.rates import Rates


class Reception:
    """The checks of one kind of door, control or bulk. One thread uses it.

    Args:
        registry: who is who.
        per_s: requests a second of a tenant of which the operator says nothing.
        refusals: counts what is refused.
    """

    def __init__(self, registry: KeyRegistry, per_s: float, refusals: Refusals) -> None:
        self._registry = registry
        self._rates = Rates(per_s)
        self._refusals = refusals

    def change(self, per_s: Mapping[str, int | None]) -> None:
        """The operator's limits are these now."""
        self._rates.change(per_s)

    def take(
        self, peer: Peer, frames: Sequence[Buffer], key: str, now: float
    ) -> FrontMessage | BackMessage | BlobMessage | Refused | None:
        """Check one multipart (without routing id)."""
        entry = look_up(self._registry, key)
        tenant = entry.tenant if entry is not None else ""
        whom = tenant or key
        over = self._too_often(tenant, now) if tenant else None
        if over is not None and not self._rates.may_tell(whom, now):
            self._refusals.note("rate", name_of(entry, key), over.message)
            return None
        taken = admit(peer, frames, entry, over=over)
        if not isinstance(taken, Refused):
            return taken
        self._refusals.note(taken.reason, name_of(entry, key), taken.failure.message)
        return taken if over is not None or self._rates.may_tell(whom, now) else None

    def _too_often(self, tenant: str, now: float) -> Failure | None:
        hint_ms = self._rates.ask(tenant, now)
        if not hint_ms:
            return None
        per_s = self._rates.of(tenant)
        sentence = (
            f"tenant '{tenant}' may ask {per_s:g} times a second here, with all its keys together: ask again later"
        )
        return failure(ErrorCode.OVERLOADED, sentence, retry_after_ms=hint_ms, details={TOO_OFTEN: float(per_s)})
