"""Policies, their versions, and who drives them."""

from __future__ import annotations

from joynexus.bounds import Short
from joynexus.specs import PolicySpec
from joynexus.wire.base import Wire


class CreatePolicy(Wire, frozen=True, kw_only=True):
    """Create a policy. The same spec again is answered alike; another spec under the name is a `CONFLICT`.

    Answer: `PolicyInfo`.
    """

    policy: Short
    spec: PolicySpec


class GetPolicy(Wire, frozen=True, kw_only=True):
    """Describe a policy. Answer: `PolicyInfo`."""

    policy: Short


class ListPolicies(Wire, frozen=True, kw_only=True):
    """Describe all policies of the tenant. Answer: `PolicyList`."""


class GetVersion(Wire, frozen=True, kw_only=True):
    """Where is a version's blob? `version` 0 means the newest. Answer: `VersionInfo`."""

    policy: Short
    version: int = 0


class VersionInfo(Wire, frozen=True, kw_only=True):
    """One published version.

    Attributes:
        version: number, counted from 1 per policy.
        digest, nbytes: its safetensors blob.
        step: optimizer steps taken before it was published.
    """

    version: int
    digest: str
    nbytes: int
    step: int


class PolicyInfo(Wire, frozen=True, kw_only=True):
    """A policy as the master knows it.

    Attributes:
        next_seq: sequence number of the next op.
        step: optimizer steps applied.
        driver: `""`, `job:<id>` or `loop`: who holds the lease.
        home: the trainer that it lives on; empty while it has none.
        resident: it is in that trainer's memory, not paged out.
        contract_digest: digest of the contract in `spec`.
        states: names of saved states.
    """

    policy: str
    spec: PolicySpec
    next_seq: int
    step: int
    driver: str
    contract_digest: str
    versions: tuple[VersionInfo, ...] = ()
    states: tuple[str, ...] = ()
    home: str = ""
    resident: bool = False


class PolicyList(Wire, frozen=True, kw_only=True):
    """All policies of the tenant."""

    policies: tuple[PolicyInfo, ...]


class MovePolicy(Wire, frozen=True, kw_only=True):
    """Have a policy live on another trainer (operators only). It goes by checkpoint, between two optimizer steps.

    Answer: `PolicyInfo`, once its new home is that trainer; asking again is answered alike.

    Attributes:
        tenant: whose policy; empty for the asker's own.
        trainer: name as in `ClusterStatus`, e.g. `trainer-2`.
    """

    policy: Short
    trainer: Short
    tenant: Short = ""


class AcquireLease(Wire, frozen=True, kw_only=True):
    """Become the driver of a policy, to send ops. Held while its ops keep coming (`ttl_ms` of silence ends it).

    A client that asks again with its own `holder` gets the same lease. Answer: `Lease`, or `CONFLICT`.
    """

    policy: Short
    holder: Short
    ttl_ms: int = 60_000


class Lease(Wire, frozen=True, kw_only=True):
    """You drive the policy; continue with `next_seq`."""

    policy: str
    lease: str
    next_seq: int


class ReleaseLease(Wire, frozen=True, kw_only=True):
    """Stop driving. Answer: `Done`."""

    policy: Short
    lease: Short
