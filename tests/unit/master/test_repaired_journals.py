"""Whatever record a journal loses: the master starts with the rest, and others' work ends as if nothing had been."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import pytest

from common.journal.consequences import Key, consequences
from common.journal.records import (
    BlobRecord,
    CheckpointRecord,
    DatasetRecord,
    JobRecord,
    OpDone,
    OpRecord,
    PolicyRecord,
    Record,
    UsageRecord,
    VersionRecord,
    key_of,
)
from tests.unit.master.jobs import info
from tests.unit.master.test_rl_faults import JOBS, Crew, Play
from tests.unit.master.world import MemoryJournal, World


@cache
def games() -> tuple[tuple[Play, tuple[Record, ...]], ...]:
    """Moments in the middle of some games: an RL job of tenant a, an SFT job of tenant b."""
    played = []
    for seed in range(4):
        game = Play(seed)
        for _ in range(40 + 40 * seed):
            game.move()
        game.disk_has_room_again()
        game.journal_catches_up()
        played.append((game, tuple(game.world.journal.load())))
    return tuple(played)


def without(game: Play, records: Collection[Record], lost: Collection[Key]) -> World:
    """Start a master on what is left when these records are lost."""
    kept = [record for record in records if key_of(record) not in lost]
    gone = consequences(kept, lost)
    assert set(gone) <= set(map(key_of, kept))
    journal = MemoryJournal()
    journal.append(record for record in kept if key_of(record) not in gone)
    journal.payloads = dict(game.world.journal.payloads)
    return World(game.world.config, journal)


def finish(world: World) -> None:
    crew = Crew(world)
    for _ in range(20):
        crew.finish()
        world.wait(1)
        crew.beat()


@pytest.mark.parametrize("number", range(4))
def test_a_master_starts_without_any_one_record(number: int) -> None:
    game, records = games()[number]
    assert len(records) > 5
    for record in records:
        without(game, records, {key_of(record)})


def test_nothing_goes_with_records_on_which_nothing_stands() -> None:
    for _, records in games():
        for record in records:
            if isinstance(record, UsageRecord | BlobRecord):
                assert consequences([other for other in records if other is not record], {key_of(record)}) == {}


def test_the_neighbours_job_ends_well_whatever_of_another_tenant_is_lost() -> None:
    game, records = games()[2]
    kinds = (PolicyRecord, CheckpointRecord, JobRecord, VersionRecord, OpRecord, OpDone)
    mine = [record for record in records if isinstance(record, kinds) and record.tenant == "a"]
    firsts, lasts = ({type(record): record for record in order} for order in (reversed(mine), mine))
    for record in (*firsts.values(), *lasts.values()):
        world = without(game, records, {key_of(record)})
        finish(world)
        assert info(world, JOBS["b"], tenant="b").state == "succeeded"


def test_an_op_goes_with_one_that_it_builds_on_and_jobs_with_their_ops() -> None:
    policy = next(r for _, records in games() for r in records if isinstance(r, PolicyRecord))
    ops = [OpRecord(tenant="a", policy="p", seq=seq, kind="train_step") for seq in range(1, 7)]
    covered = CheckpointRecord(tenant="a", policy=policy.policy, digest="d", nbytes=1, seq=3, step=3)
    done = [OpDone(tenant="a", policy="p", seq=seq, result=None) for seq in (1, 2, 3)]  # type: ignore[arg-type]
    kept: list[Record] = [PolicyRecord(tenant="a", policy="p", spec=policy.spec), covered, *ops, *done]

    def gone(*lost: Key) -> set[tuple[object, ...]]:
        left = [record for record in kept if key_of(record) not in lost]
        return {key[1:] for key in consequences(left, lost) if key[0] is OpRecord}

    assert gone((OpRecord, "a", "p", 5)) == {("a", "p", 6)}
    assert gone((OpRecord, "a", "p", 4)) == {("a", "p", 5), ("a", "p", 6)}
    assert gone((OpRecord, "a", "p", 2)) == {("a", "p", 1)}
    assert gone((OpDone, "a", "p", 2)) == {("a", "p", 1), ("a", "p", 2)}
    assert gone((CheckpointRecord, "a", "p")) == {("a", "p", seq) for seq in range(1, 7)}
    assert gone((PolicyRecord, "a", "p")) == {("a", "p", seq) for seq in range(1, 7)}
    assert gone((DatasetRecord, "a", "d")) == set()
