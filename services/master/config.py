"""The numbers by which the master decides. Units are in the names.

In: the shell fills it from `MasterSettings`. Out: one frozen struct. Never: addresses, paths, or the environment.
"""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What may be tuned.

    Attributes:
        server: how the master introduces itself.
        beat_ms, silent_s: workers beat so often, and are declared dead after so much silence.
        pull_s, host_silent_s: hosts of tenants' own environments are told so often that there is nothing to do, and are
            declared dead after so much silence: they are far away, so this is longer.
        max_hosts: hosts of one tenant.
        batch_rows, max_rows: an inference group is sent once it has `batch_rows`, and never has more than `max_rows`
            (one request alone may).
        batch_wait_s: longest that a request waits for expected company while a worker is free; less where sharing a
            forward saves less time than that.
        max_inflight_ops: ops of one policy that may wait unanswered.
        max_waiting_acts, max_act_bytes: requests to act of one tenant that may wait, and bytes of those under way.
        act_deadline_s: they are answered `UNAVAILABLE` or `DEADLINE` after so long, unless they say otherwise.
        quota_bytes, max_policies: blobs kept for one tenant, and its policies.
        max_states: saved states of one policy.
        max_datasets, max_jobs: data sets of one tenant, and its jobs that have not ended.
        group_ops, group_s: ops in one training group, and device seconds that they may take together (one op may take
            more), so that nobody waits long for a group of others.
        turn_ops: ops taken from one policy at a time.
        page_share: of a trainer's busy time that paging may take while there is other work.
        stuck_s: a policy whose gradients wait for a step gives its slot up without a checkpoint if idle for so long.
        balance_s, moves_at_once: loads of trainers are compared so often, and so many policies move at once for it.
        group_bytes: inline samples in one training group.
        payload_memory_bytes: inline samples held in memory while they wait; others are read back from the journal.
        checkpoint_steps, checkpoint_bytes, checkpoint_ops: a loop's policy is checkpointed after so many optimizer
            steps, or once so much would have to be replayed; any policy after so many ops.
        uncheckpointed_ops: ops that may lie above the checkpoint; a loop that never steps is stopped here.
        kept_replies: replies of ops that are kept behind the checkpoint.
        kills: a piece of work over which so many workers died is set aside. After a first death it is done alone, and
            only deaths over it alone count.
        page_steps, pages_ahead: training batches drawn at once, and pages drawn ahead.
        job_ops: ops of a training job that may wait unanswered.
        vetoes: non-finite steps in a row after which a job is parked.
        kept_jobs: ended jobs of one tenant that are kept.
        page_episodes, rollout_episodes: episodes that are run together to evaluate, and to be trained on (about).
        job_pages: pages of one job that may wait or run.
        mounted_image_side: how mounted data sets are prepared; 0 keeps their pictures.
        retry_s: pause before something that failed for a passing reason is tried again.
        usage_s: use that belongs to no op is written down so often.
        freed_blob_s, unused_upload_s: how long an upload stays after its last use, and if it was never used.
    """

    server: str = "joynexus"
    beat_ms: int = 1000
    silent_s: float = 6.0
    pull_s: float = 4.0
    host_silent_s: float = 15.0
    max_hosts: int = 64
    batch_rows: int = 8
    max_rows: int = 32
    batch_wait_s: float = 0.050
    max_inflight_ops: int = 64
    max_waiting_acts: int = 1024
    max_act_bytes: int = 512 * MIB
    act_deadline_s: float = 30.0
    quota_bytes: int = 50 * 1024 * MIB
    max_policies: int = 10_000
    max_states: int = 1000
    max_datasets: int = 10_000
    max_jobs: int = 1000
    group_ops: int = 16
    group_s: float = 1.0
    turn_ops: int = 1
    page_share: float = 0.2
    stuck_s: float = 10.0
    balance_s: float = 10.0
    moves_at_once: int = 2
    group_bytes: int = 16 * MIB
    payload_memory_bytes: int = 64 * MIB
    checkpoint_steps: int = 50
    checkpoint_bytes: int = 32 * MIB
    checkpoint_ops: int = 512
    uncheckpointed_ops: int = 4096
    kept_replies: int = 128
    kills: int = 3
    page_steps: int = 64
    pages_ahead: int = 2
    job_ops: int = 32
    vetoes: int = 3
    kept_jobs: int = 1000
    page_episodes: int = 5
    rollout_episodes: int = 8
    job_pages: int = 16
    mounted_image_side: int = 0
    retry_s: float = 1.0
    usage_s: float = 1.0
    freed_blob_s: float = 600.0
    unused_upload_s: float = 86_400.0
