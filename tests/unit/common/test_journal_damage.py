"""A damaged journal is never taken for a sound one, and what can be read of it is not given up.

A journal of some hundred records is damaged in all ways that tests can think of. It then either still says exactly what
it said, or is refused with a sentence; and repairing it leaves a journal that opens, without anything that was not
written, with a report that names what is missing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.journal import repair as repairing
from common.journal.errors import JournalDamagedError, JournalError
from common.journal.journal import Journal, journal_url
from common.journal.records import CheckpointRecord, OpDone, OpRecord, OpsCovered, UsageRecord, key_of
from common.journal.repair import check, repair
from tests.unit.common.damaged import PAYLOADS, change, content, keys, said


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
