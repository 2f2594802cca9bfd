"""A damaged log of a journal whose master was killed: noticed, refused as it is, and repaired to what can be read."""

from __future__ import annotations

import random
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.journal import wal
from common.journal.errors import JournalDamagedError
from common.journal.journal import Journal, journal_url
from common.journal.records import PolicyRecord, Record, UsageRecord, key_of
from common.journal.repair import check, repair
from tests.unit.common.damaged import content, keys, op
from tests.unit.common.test_journal import SPEC

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
