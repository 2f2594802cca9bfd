"""Which blobs a journal's records need.

In: records, in the order in which a journal gives them. Out: digests. Never: one of something else than a blob (a
content, a fingerprint), or of a blob that only an op needs which a checkpoint covers.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.journal import records as r


def references(records: Iterable[r.Record]) -> set[str]:
    """Return the digests of the blobs to which records refer by themselves (a manifest names more)."""
    covered: dict[tuple[str, str], int] = {}
    digests: set[str] = set()
    for record in records:
        match record:
            case r.OpRecord():
                if record.seq > covered.get((record.tenant, record.policy), 0):
                    digests.update((record.blob, *(digest for digest, _ in record.rollouts)))
            case r.CheckpointRecord():
                covered[record.tenant, record.policy] = record.seq
                digests.add(record.digest)
            case r.VersionRecord() | r.StateRecord() | r.BlobRecord():
                digests.add(record.digest)
            case r.PageRecord():
                digests.update((record.trajectories, *(digest for digest, _ in record.videos)))
            case r.DatasetRecord():
                digests.update(file.digest for file in record.files)
                digests.update(digest for digest, _ in record.blobs)
    return digests - {""}
