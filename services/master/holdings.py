"""Who may read which blob, how much each tenant keeps, and when nobody needs a blob any more.

In: uploads, and what refers to blobs (ops, checkpoints, versions, states, data sets, videos). Out: deletions, once the
last reference is gone. Never: a word to one tenant about another's blobs, even equal ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from common.journal.records import BlobRecord
from joynexus.wire import ErrorCode
from services.master.config import CoreConfig
from services.master.limits import Limits
from services.master.outbox import Outbox, refuse

_BLOB_BYTES, _LEAST_BLOBS = 64 * 1024, 1000
"""A tenant may keep a blob for each so many bytes of its quota, or so few: the smallest costs memory and a file too."""
SHARED = ""
"""The tenant that mounted data sets belong to: everybody may read what it holds."""


class Holdings:
    """References to blobs, by tenant.

    An upload stays for `freed_blob_s` after its last reference went (a client may use it again), and for
    `unused_upload_s` if nothing has referred to it yet; blobs that workers made go with their last reference.

    Attributes:
        changing: called with a tenant that is about to keep more or less.
    """

    def __init__(self, outbox: Outbox, config: CoreConfig, limits: Limits) -> None:
        self._outbox = outbox
        self._config = config
        self._limits = limits
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)  # tenant -> digest -> bytes
        self._uploads: dict[tuple[str, str], float] = {}  # (tenant, digest) -> when it was last used
        self._held: Counter[tuple[str, str]] = Counter()
        self._everybody: Counter[str] = Counter()  # digest -> tenants that upload or hold it
        self._stored: Counter[str] = Counter()
        self.changing: Callable[[str], None] = lambda tenant: None

    def may_read(self, tenant: str, digest: str) -> bool:
        """Tell whether a tenant uploaded this blob or something of its refers to it."""
        return digest in self._sizes.get(tenant, ()) or digest in self._sizes.get(SHARED, ())

    def size(self, tenant: str, digest: str) -> int:
        """Return the bytes of a blob that the tenant may read."""
        return self._sizes.get(tenant, {}).get(digest, 0)

    def stored(self, tenant: str) -> int:
        """Return the bytes of all blobs kept for a tenant."""
        return self._stored[tenant]

    def check_quota(self, tenant: str, digest: str, nbytes: int) -> None:
        """Refuse an upload for which the tenant has no room."""
        quota, kept = self._limits.quota_bytes(tenant), self._sizes.get(tenant, {})
        if digest in kept:
            return
        most = max(_LEAST_BLOBS, quota // _BLOB_BYTES)
        if len(kept) >= most:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"this tenant keeps {len(kept)} blobs, and its quota of {quota} bytes allows {most}: send larger ones, "
                "delete what is not needed, or ask the operator for more",
            )
        if self._stored[tenant] + nbytes > quota:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"{nbytes} more bytes exceed this tenant's quota of {quota} bytes "
                f"({self._stored[tenant]} in use): delete what is not needed, or ask the operator for more",
            )

    def check_room(self, tenant: str, what: str) -> None:
        """Refuse to make a blob for a tenant that keeps more than it may; how large it will be is not known before."""
        quota = self._limits.quota_bytes(tenant)
        if self._stored[tenant] > quota:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"there is no room for {what}: this tenant keeps {self._stored[tenant]} bytes, more than its quota of "
                f"{quota}: ask the operator for more",
            )

    def upload(self, tenant: str, digest: str, nbytes: int) -> None:
        """A tenant's upload is complete (and written down)."""
        self._enter(tenant, digest, nbytes)
        self._use((tenant, digest), self._config.unused_upload_s)

    def hold(self, tenant: str, digest: str, nbytes: int) -> None:
        """Something of the tenant refers to a blob; each `hold` needs one `release`."""
        if digest:
            self._enter(tenant, digest, nbytes)
            self._held[tenant, digest] += 1

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        """Return those of these blobs to which nothing refers."""
        return [digest for digest in digests if not self._everybody[digest]]

    def release(self, tenant: str, digest: str, *, swept: bool = False) -> None:
        """It does not refer to it any more.

        Args:
            swept: leave the blob to the daily sweep, because something that takes long may be about to refer to it.
        """
        key = (tenant, digest)
        if not digest or not self._held[key]:
            return
        self._held[key] -= 1
        if self._held[key] == 0:
            del self._held[key]
            if key in self._uploads:
                self._use(key, self._config.freed_blob_s)
            else:
                self._leave(tenant, digest, swept=swept)

    def discard_orphan(self, digest: str) -> None:
        """A worker made a blob that is not wanted after all: delete it, unless somebody has an equal one."""
        if digest and not self._everybody[digest]:
            self._outbox.delete_blobs([digest])

    def _enter(self, tenant: str, digest: str, nbytes: int) -> None:
        mine = self._sizes[tenant]
        if digest not in mine:
            self.changing(tenant)
            mine[digest] = nbytes
            self._stored[tenant] += nbytes
            self._everybody[digest] += 1

    def _leave(self, tenant: str, digest: str, *, swept: bool = False) -> None:
        self.changing(tenant)
        self._stored[tenant] -= self._sizes[tenant].pop(digest)
        self._everybody[digest] -= 1
        if not self._everybody[digest]:
            del self._everybody[digest]
            if not swept:
                self._outbox.delete_blobs([digest])

    def _use(self, key: tuple[str, str], stay_s: float) -> None:
        self._uploads[key] = used = self._outbox.now
        self._outbox.after(stay_s, lambda: self._expire(key, used))

    def _expire(self, key: tuple[str, str], used: float) -> None:
        if self._uploads.get(key) == used and not self._held[key]:
            del self._uploads[key]
            tenant, digest = key
            self._outbox.save([BlobRecord(tenant=tenant, digest=digest, gone=True)])
            self._leave(tenant, digest)
