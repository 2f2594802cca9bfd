"""A damaged journal is never taken for a sound one, and what can be read of it is not given up.

A journal of some hundred records is damaged in all ways that tests can think of. It then either still says exactly what
it said, or is refused with a sentence; and repairing it leaves a journal that opens, without anything that was not
written, with a report that names what is missing.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from common.journal import repair as repairing
from common.journal import wal
from common.journal.errors import JournalDamagedError, JournalError
from common.journal.journal import Journal, journal_url
from common.journal.records import (
    BlobRecord,
    CheckpointRecord,
    OpDone,
    OpRecord,
    OpsCovered,
    PolicyRecord,
    Record,
    UsageRecord,
    key_of,
)
from common.journal.repair import check, repair
from joynexus.wire.front import OpResult
from tests.unit.common.test_journal import ONE_OF_EACH, SPEC

PAYLOADS = {seq: bytes([seq % 256]) * 9000 for seq in range(40, 60)}


def op(policy: str, seq: int, payload: bytes = b"") -> OpRecord:
    return OpRecord(tenant="a", policy=policy, seq=seq, kind="train_step", payload=payload, payload_nbytes=len(payload))


def content() -> list[Record]:
    records: list[Record] = [*ONE_OF_EACH[:-2]]
    records += [PolicyRecord(tenant="a", policy=f"p{number}", spec=SPEC) for number in range(20)]
    records += [BlobRecord(tenant="a", digest=f"{number:064x}", nbytes=number) for number in range(200)]
    for seq in range(1, 60):
        records += [op("p1", seq, PAYLOADS.get(seq, b"")), op("p2", seq)]
        records += [OpDone(tenant="a", policy="p1", seq=seq, result=OpResult(policy="p1", seq=seq))]
    return records


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound journal."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(journal_url(folder / "journal.db"))
    journal.append(content())
    journal.close()
    return folder


@pytest.fixture
def damage(whole: Path, tmp_path: Path) -> Callable[[Callable[[bytearray], object]], Path]:
    """Make a copy of the journal in which some bytes are others."""

    def damaged(change: Callable[[bytearray], object]) -> Path:
        data = bytearray((whole / "journal.db").read_bytes())
        change(data)
        for rest in tmp_path.iterdir():
            rest.unlink()
        (tmp_path / "journal.db").write_bytes(data)
        return tmp_path

    return damaged


def said(folder: Path) -> list[bytes]:
    """All that a journal says, payloads too; as bytes, because one record holds a NaN, which is not equal to itself."""
    journal = Journal(journal_url(folder / "journal.db"))
    try:
        records = [type(record).__name__.encode() + msgspec.msgpack.encode(record) for record in journal.load()]
        return [*records, *(journal.payload("a", "p1", seq) for seq in PAYLOADS)]
    finally:
        journal.close()


def change(folder: Path, statement: str) -> None:
    database = sqlite3.connect(folder / "journal.db")
    with database:
        database.execute(statement)
    database.close()


def keys(folder: Path) -> set[tuple[object, ...]]:
    journal = Journal(journal_url(folder / "journal.db"))
    try:
        return {key_of(record) for record in journal.load()}
    finally:
        journal.close()


def test_a_sound_journal_is_said_to_be_sound_and_stays_as_it_is(whole: Path, tmp_path: Path) -> None:
    shutil.copyfile(whole / "journal.db", tmp_path / "journal.db")
    for report in (check(tmp_path), repair(tmp_path)):
        assert (report.damaged, report.besides, report.copy) == ((), (), None)
        assert report.kept == len(content())
    assert (tmp_path / "journal.db").read_bytes() == (whole / "journal.db").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"journal.db", "journal.db.lock"}


@pytest.mark.parametrize("block", range(2))
def test_a_flipped_bit_anywhere_in_the_file_is_harmless_or_refused_with_a_sentence(
    whole: Path, damage: Callable[[Callable[[bytearray], object]], Path], block: int
) -> None:
    truth, chance, refused = said(whole), random.Random(block), 0
    written = set(map(key_of, content()))
    for _ in range(12):
        at, bit = chance.randrange((whole / "journal.db").stat().st_size), 1 << chance.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> None:
            data[at] ^= bit

        folder = damage(flip)
        try:
            assert said(folder) == truth, (at, bit)
            continue
        except (JournalError, ValueError):
            refused += 1
        try:
            report = repair(folder)
        except ValueError as error:  # nothing can be read any more: a file is not one of ours for one bit in its head
            if at < 4096 or "newer release" in str(error):
                continue
            raise
        assert report.damaged, (at, bit)
        assert report.copy is not None
        assert report.kept > 0
        assert keys(folder) <= written
        assert check(folder).damaged == ()
    assert refused > 2


@pytest.mark.parametrize("start", [0.2, 0.5, 0.8])
def test_of_a_journal_with_destroyed_pages_the_rest_is_kept(
    damage: Callable[[Callable[[bytearray], object]], Path], start: float
) -> None:
    def destroy(data: bytearray) -> None:
        page = int(start * len(data)) // 4096
        data[4096 * page : 4096 * (page + 2)] = random.Random(1).randbytes(8192)

    folder = damage(destroy)
    with pytest.raises(ValueError, match="damaged"):
        said(folder)
    looked = check(folder)
    report = repair(folder)
    assert (report.damaged, report.besides, report.kept) == (looked.damaged, looked.besides, looked.kept)
    assert report.copy is not None
    assert report.copy.stat().st_size > 0
    assert len(keys(folder)) == report.kept > 0.3 * len(content())


@pytest.mark.parametrize("part", [0.1, 0.4, 0.7, 0.95])
def test_of_a_truncated_journal_the_rest_is_kept_or_the_sentence_says_there_is_none(
    damage: Callable[[Callable[[bytearray], object]], Path], part: float
) -> None:
    def truncate(data: bytearray) -> None:
        del data[int(part * len(data)) :]

    folder = damage(truncate)
    with pytest.raises(ValueError, match="damaged"):
        said(folder)
    report = repair(folder)
    assert report.damaged
    assert len(keys(folder)) == report.kept


def test_an_empty_file_is_no_new_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    with pytest.raises(JournalDamagedError, match="it is empty"):
        Journal(journal_url(tmp_path / "journal.db"))
    with pytest.raises(ValueError, match="is empty: put it back from a copy, or move it away"):
        repair(tmp_path)


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    text = b"certainly not a database" * 1000
    (tmp_path / "journal.db").write_bytes(text)
    with pytest.raises(JournalDamagedError, match="file is not a database"):
        Journal(journal_url(tmp_path / "journal.db"))
    for verb in (check, repair):
        with pytest.raises(ValueError, match="nothing can be read"):
            verb(tmp_path)
    assert (tmp_path / "journal.db").read_bytes() == text


def test_another_programs_database_is_no_journal(tmp_path: Path) -> None:
    change(tmp_path, "CREATE TABLE theirs (a)")
    with pytest.raises(JournalDamagedError, match="it has not the tables of a journal"):
        Journal(journal_url(tmp_path / "journal.db"))


def test_what_stands_on_a_damaged_record_goes_with_it_and_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copyfile(whole / "journal.db", tmp_path / "journal.db")
    change(tmp_path, "UPDATE ops SET record = x'00' WHERE policy = 'p2' AND seq = 57")
    change(tmp_path, "UPDATE ops SET payload = zeroblob(9) WHERE policy = 'p1' AND seq = 59")
    change(tmp_path, "UPDATE usage SET record = x'00'")
    report = repair(tmp_path)
    assert len(report.damaged) == 3
    assert any("table 'ops' with tenant 'a', policy 'p2', seq 57" in line for line in report.damaged)
    assert any("policy 'p1', seq 59: its payload is damaged" in line for line in report.damaged)
    assert len(report.besides) == 2
    assert all("an op that it builds on is lost" in line for line in report.besides)
    gone = {key_of(record) for record in content()} - keys(tmp_path)
    ops = {key for key in gone if key[0] is OpRecord}
    assert ops == {(OpRecord, "a", "p2", seq) for seq in (57, 58, 59)} | {(OpRecord, "a", "p1", 59)}
    assert {key[0] for key in gone} == {OpRecord, OpDone, UsageRecord}
    journal = Journal(journal_url(tmp_path / "journal.db"))
    assert journal.payload("a", "p1", 58) == PAYLOADS[58]
    journal.close()


def test_payloads_that_a_checkpoint_freed_are_no_loss(tmp_path: Path) -> None:
    journal = Journal(journal_url(tmp_path / "journal.db"))
    journal.append(content())
    journal.append([CheckpointRecord(tenant="a", policy="p1", digest="d", nbytes=1, seq=59, step=59)])
    journal.append([OpsCovered(tenant="a", policy="p1", covered=59, forget=10)])
    journal.close()
    assert check(tmp_path).damaged == ()


def test_nobody_repairs_a_journal_under_a_running_master(whole: Path, tmp_path: Path) -> None:
    shutil.copyfile(whole / "journal.db", tmp_path / "journal.db")
    journal = Journal(journal_url(tmp_path / "journal.db"))
    for verb in (check, repair):
        with pytest.raises(ValueError, match="another process has the journal"):
            verb(tmp_path)
    with pytest.raises(ValueError, match="another process has the journal"):
        Journal(journal_url(tmp_path / "journal.db"))
    journal.close()
    assert check(tmp_path).damaged == ()


def test_records_that_were_not_yet_written_into_the_file_are_read_too(tmp_path: Path) -> None:
    lived, died = tmp_path / "lived", tmp_path / "died"
    for folder in (lived, died):
        folder.mkdir()
    journal = Journal(journal_url(lived / "journal.db"))
    journal.append(content())
    for name in ("journal.db", "journal.db-wal"):
        shutil.copyfile(lived / name, died / name)  # as after kill -9
    journal.close()
    change(died, "UPDATE usage SET record = x'00'")
    report = repair(died)
    assert (len(report.damaged), report.kept) == (1, len(content()) - 1)


@pytest.mark.parametrize("moment", ["_copy", "_write"])
def test_a_repair_that_fails_leaves_the_journal_as_it_was(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    shutil.copyfile(whole / "journal.db", tmp_path / "journal.db")
    change(tmp_path, "UPDATE usage SET record = x'00'")
    before = (tmp_path / "journal.db").read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(repairing, moment, full)
        with pytest.raises(OSError, match="no space left"):
            repair(tmp_path)
    assert (tmp_path / "journal.db").read_bytes() == before
    assert len(repair(tmp_path).damaged) == 1


def test_a_repair_that_is_killed_at_the_end_leaves_no_file_that_passes_for_a_journal(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(whole / "journal.db", tmp_path / "journal.db")
    change(tmp_path, "UPDATE usage SET record = x'00'")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(repairing, "_write", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        repair(tmp_path)
    with pytest.raises(JournalDamagedError, match="it is empty"):
        Journal(journal_url(tmp_path / "journal.db"))


PAGE, HEAD, WAL_HEAD = 4096, 24, 32
BATCHES = 12


@dataclass(frozen=True)
class Killed:
    """What a killed master leaves: the files, and how long the log was when each batch was acknowledged."""

    folder: Path
    batches: list[list[Record]]
    ends: list[int]

    @property
    def log(self) -> bytes:
        return (self.folder / "journal.db-wal").read_bytes()

    def with_log(self, log: bytes, folder: Path) -> Path:
        """The same files with another log."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copyfile(self.folder / "journal.db", folder / "journal.db")
        (folder / "journal.db-wal").write_bytes(log)
        return folder

    def keys(self, batches: int) -> set[tuple[object, ...]]:
        return {key_of(record) for batch in self.batches[:batches] for record in batch}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    lived, died = tmp_path_factory.mktemp("lived"), tmp_path_factory.mktemp("died")
    Journal(journal_url(lived / "journal.db")).close()
    journal = Journal(journal_url(lived / "journal.db"))
    batches: list[list[Record]] = [[PolicyRecord(tenant="a", policy="p", spec=SPEC)]]
    batches += [[op("p", seq, bytes([seq]) * 9000)] for seq in range(1, BATCHES)]
    ends: list[int] = []
    for batch in batches:
        journal.append(batch)
        ends.append((lived / "journal.db-wal").stat().st_size)
    for name in ("journal.db", "journal.db-wal"):
        shutil.copyfile(lived / name, died / name)
    journal.close()
    return Killed(died, batches, ends)


def test_a_log_whose_bits_are_as_written_is_read_to_its_end(killed: Killed, tmp_path: Path) -> None:
    assert wal.damage(killed.log) == ""
    assert keys(killed.with_log(killed.log, tmp_path / "died")) == killed.keys(BATCHES)


def test_a_flipped_bit_before_the_last_transaction_of_the_log_is_noticed(killed: Killed) -> None:
    chance, before_last = random.Random(0), killed.ends[-2]
    # Parts of a frame's head (page, end of a transaction, salts, sum) and its page; then of the last frame but those of
    # the last transaction; then of the log's head.
    places = [WAL_HEAD + 3 * (PAGE + HEAD) + at for at in (*range(HEAD), 900)]
    places += [before_last - PAGE - HEAD + at for at in (*range(4), *range(8, HEAD), 900)]
    places += [*range(WAL_HEAD), *(chance.randrange(before_last) for _ in range(30))]
    for at in places:
        log = bytearray(killed.log)
        log[at] ^= 1 << chance.randrange(8)
        assert "-wal file is not as it was written" in wal.damage(bytes(log)), at


@pytest.mark.parametrize("at", [WAL_HEAD + 3 * (PAGE + HEAD) + at for at in (2, 9, 17, 900)])
def test_a_log_with_a_flipped_bit_is_refused_as_it_is_and_can_be_repaired(
    killed: Killed, tmp_path: Path, at: int
) -> None:
    log = bytearray(killed.log)
    log[at] ^= 4
    folder = killed.with_log(bytes(log), tmp_path / "died")
    with pytest.raises(JournalDamagedError, match=r"journal\.db is damaged .*: frame 4 of \d+ in its -wal file"):
        Journal(journal_url(folder / "journal.db"))
    assert (folder / "journal.db-wal").read_bytes() == log, "what is left to read of it stays"
    looked = check(folder)
    assert any("-wal file" in line for line in looked.damaged)
    report = repair(folder)
    assert (report.damaged, report.kept) == (looked.damaged, looked.kept)
    assert report.copy is not None
    assert report.copy.with_name(f"{report.copy.name}-wal").read_bytes() == log
    assert keys(folder) <= killed.keys(BATCHES)
    assert check(folder).damaged == ()


def test_of_a_log_with_a_damaged_record_the_others_are_kept(killed: Killed, tmp_path: Path) -> None:
    log = bytearray(killed.log)
    at = log.index(bytes([7]) * 3000)
    log[at] ^= 1
    folder = killed.with_log(bytes(log), tmp_path / "died")
    report = repair(folder)
    assert any("policy 'p', seq 7: its payload is damaged" in line for line in report.damaged)
    assert keys(folder) == killed.keys(1 + 6), "an op stands on those before it"


def test_a_log_with_a_damaged_header_is_read_all_the_same_once_it_is_repaired(killed: Killed, tmp_path: Path) -> None:
    folder = killed.with_log(bytes(WAL_HEAD) + killed.log[WAL_HEAD:], tmp_path / "died")
    with pytest.raises(JournalDamagedError, match="the header of its -wal file"):
        Journal(journal_url(folder / "journal.db"))
    repair(folder)
    assert keys(folder) == killed.keys(BATCHES)


def test_a_last_transaction_that_a_power_cut_tore_is_no_damage(killed: Killed, tmp_path: Path) -> None:
    log, chance = killed.log, random.Random(3)
    start, sector = killed.ends[-2], 512
    for _ in range(8):
        torn = bytearray(log[: chance.randrange(start, len(log) + 1)])
        for at in range(start, len(torn), sector):  # each sector is on disk, or it is not
            if chance.random() < 0.5:
                torn[at : at + sector] = bytes(len(torn[at : at + sector]))
        folder = killed.with_log(bytes(torn), tmp_path / "died")
        assert keys(folder) == killed.keys(BATCHES - 1)


def test_frames_of_an_earlier_log_behind_the_end_are_no_damage(tmp_path: Path) -> None:
    lived, died = tmp_path / "lived", tmp_path / "died"
    for folder in (lived, died):
        folder.mkdir()
    journal = Journal(journal_url(lived / "journal.db"))
    journal.append(content())
    long = (lived / "journal.db-wal").stat().st_size
    other = sqlite3.connect(lived / "journal.db")
    other.execute("PRAGMA wal_checkpoint(RESTART)")
    other.close()
    last = UsageRecord(tenant="z", policy="p")
    journal.append([last])
    assert (lived / "journal.db-wal").stat().st_size == long, "the log begins anew over the old one"
    for name in ("journal.db", "journal.db-wal"):
        shutil.copyfile(lived / name, died / name)
    journal.close()
    assert wal.damage((died / "journal.db-wal").read_bytes()) == ""
    assert keys(died) == {key_of(record) for record in (*content(), last)}
