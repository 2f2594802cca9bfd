"""What cannot stay when records of a journal are lost: those that mean nothing without them.

In: the records that can be read, the keys of those that are lost. Out: keys that go too, each with the reason. Never: a
record that would have an op applied twice, out of order, or upon other weights than it was accepted for.

An op stands on all before it down to the checkpoint, and its reply on those behind it; everything of a policy stands on
the policy. A job that has not ended goes on from its policy's ops, versions and curve: without one of them it would
wait for ever or train something else, so it goes, and its tenant submits it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from common.journal import records as r
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, PipelineSpec, SftSpec

Key = tuple[object, ...]
"""As `records.key_of` gives it: kind of record, then its key fields."""
_Policy = tuple[object, object]

_OF_A_POLICY = (
    r.LeaseRecord, r.VersionRecord, r.CheckpointRecord, r.StateRecord, r.OpRecord, r.OpDone
)  # fmt: skip
_ENDED = frozenset({"succeeded", "failed", "cancelled"})


def consequences(kept: Sequence[r.Base], lost: Collection[Key], *, unknown: bool = False) -> dict[Key, str]:
    """Return the keys of those of `kept` that must go because of `lost`, and why, in a clause.

    Args:
        kept: the records that can be read.
        lost: keys of those that cannot.
        unknown: whether others may be lost too.
    """
    gone: dict[Key, str] = {}
    policies = {(record.tenant, record.policy) for record in kept if isinstance(record, r.PolicyRecord)}
    for record in kept:
        if isinstance(record, _OF_A_POLICY) and (record.tenant, record.policy) not in policies:
            gone[r.key_of(record)] = "its policy is lost"
    _ops(kept, lost, gone, unknown=unknown)
    _jobs(kept, {*lost, *gone}, gone)
    jobs = {(key[1], key[2]) for key in (*lost, *gone) if key[0] is r.JobRecord}
    for record in kept:
        if isinstance(record, r.PageRecord | r.CurveRecord) and (record.tenant, record.job) in jobs:
            gone[r.key_of(record)] = "its job is lost"
    present = set(map(r.key_of, kept))
    return {key: why for key, why in gone.items() if key in present}


def _ops(kept: Sequence[r.Base], lost: Collection[Key], gone: dict[Key, str], *, unknown: bool) -> None:
    """Keep of each policy's ops those that hang together."""
    covered: dict[_Policy, int] = {
        (record.tenant, record.policy): record.seq for record in kept if isinstance(record, r.CheckpointRecord)
    }
    started_anew = {key[1:] for key in lost if key[0] is r.CheckpointRecord}
    seqs: defaultdict[_Policy, set[int]] = defaultdict(set)
    outcomes: set[Key] = set()
    for record in kept:
        if isinstance(record, r.OpRecord):
            seqs[record.tenant, record.policy].add(record.seq)
        elif isinstance(record, r.OpDone):
            outcomes.add(r.key_of(record)[1:])
    broken = {key[1:] for key in lost if key[0] in (r.OpRecord, r.OpDone)}
    hurt = {key[:2] for key in broken} | started_anew
    for policy, found in seqs.items():
        if policy not in hurt and not unknown:
            continue  # what does not hang together was refused by a full disk, and whoever loads it knows that
        whole = {seq for seq in found if (*policy, seq) not in broken}
        checkpoint = covered.get(policy, 0)
        answered = {seq for seq in whole if seq > checkpoint or (*policy, seq) in outcomes}
        last = first = checkpoint
        while last + 1 in answered:
            last += 1
        while first in answered:
            first -= 1
        for seq in found:
            if (*policy, seq) in broken:
                why = "its outcome is lost"
            elif policy in started_anew:
                why = "the checkpoint that it builds on is lost"
            elif seq <= first:
                why = "an op between it and the checkpoint is lost, so its reply cannot be kept"
            elif seq > last:
                why = "an op that it builds on is lost"
            else:
                continue
            for kind in (r.OpRecord, r.OpDone):
                gone.setdefault((kind, *policy, seq), why)


def _jobs(kept: Sequence[r.Base], lost: Collection[Key], gone: dict[Key, str]) -> None:
    """Find the jobs that cannot go on."""
    touched: defaultdict[object, set[Key]] = defaultdict(set)
    for kind, *key in lost:
        touched[kind].add(tuple(key))
    trained = {tuple(key[:2]) for kind in (r.OpRecord, r.OpDone, r.VersionRecord) for key in touched[kind]}
    trained |= touched[r.CheckpointRecord]
    parts = {tuple(key[:2]) for kind in (r.PageRecord, r.CurveRecord) for key in touched[kind]}
    policies = {(record.tenant, record.policy) for record in kept if isinstance(record, r.PolicyRecord)}
    jobs = [record for record in kept if isinstance(record, r.JobRecord) and record.state not in _ENDED]
    for job in jobs:
        policy = (job.tenant, job.spec.policy)
        evaluates = isinstance(job.spec, EvaluateSpec | EvaluateDatasetSpec)
        if policy in touched[r.PolicyRecord] or ((job.first_seq or evaluates) and policy not in policies):
            why = "its policy is lost"
        elif job.first_seq and policy in trained:
            why = "ops or versions of its policy, or the checkpoint, are lost"
        elif job.first_seq and (job.tenant, job.job) in parts:
            why = "a part of its curve or of its rollouts is lost"
        elif evaluates and (*policy, job.version) in touched[r.VersionRecord]:
            why = "the version that it evaluates is lost"
        elif isinstance(job.spec, SftSpec | EvaluateDatasetSpec) and (
            (job.tenant, job.spec.dataset) in touched[r.DatasetRecord]
        ):
            why = "its data set is lost"
        else:
            continue
        gone[r.key_of(job)] = why
    stages = {key[1:] for key in gone if key[0] is r.JobRecord} | touched[r.JobRecord]
    for job in jobs:
        if isinstance(job.spec, PipelineSpec) and job.stages and (job.tenant, job.stages[-1].job) in stages:
            gone[r.key_of(job)] = "the job of its stage is lost"
