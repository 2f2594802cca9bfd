"""A journal that any release left behind opens, and says what it said then; a migration happens as a whole or not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import common
from common.journal.journal import Journal, journal_url
from common.journal.opening import NEWEST_SCHEMA
from tests.unit.common.journals.record import FOLDER, PAYLOADS, as_json

RECORDED = sorted(FOLDER.glob("*.sql"))
OLD = [path for path in RECORDED if path.stem != NEWEST_SCHEMA]
IN_THE_WAY = {
    "0001": "CREATE TRIGGER hindrance BEFORE UPDATE ON ops BEGIN SELECT RAISE(ABORT, 'disk is full'); END",
    "0002": "CREATE TABLE lives (hindrance TEXT)",
}
"""What makes the migration fail that begins at a schema, in its middle."""


def loaded(recorded: Path, folder: Path) -> Path:
    path = folder / "journal.db"
    with sqlite3.connect(path) as database:
        database.executescript(recorded.read_text())
    database.close()
    return path


def said(path: Path) -> bytes:
    journal = Journal(journal_url(path))
    try:
        for seq, payload in PAYLOADS.items():
            assert journal.payload("tenant", "policy", seq) == payload
        return as_json(journal.load())
    finally:
        journal.close()


def test_there_is_a_journal_of_every_schema() -> None:
    revisions = [path.stem[1:5] for path in (Path(common.__file__).parent / "migrations/versions").glob("v*.py")]
    assert [path.stem for path in RECORDED] == sorted(revisions)
    assert max(revisions) == NEWEST_SCHEMA


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_a_journal_of_any_release_says_what_it_said_then(recorded: Path, tmp_path: Path) -> None:
    path = loaded(recorded, tmp_path)
    assert said(path) == recorded.with_suffix(".jsonl").read_bytes()
    assert said(path) == recorded.with_suffix(".jsonl").read_bytes()  # and once more, without a migration


@pytest.mark.parametrize("recorded", OLD, ids=lambda path: path.stem)
def test_a_migration_that_fails_half_way_leaves_the_journal_as_it_was(recorded: Path, tmp_path: Path) -> None:
    path = loaded(recorded, tmp_path)
    before = list(sqlite3.connect(path).iterdump())
    with sqlite3.connect(path) as database:
        database.execute(IN_THE_WAY[recorded.stem])
    with pytest.raises(ValueError, match=r"disk is full|table lives already exists"):
        Journal(journal_url(path))
    with sqlite3.connect(path) as database:
        database.execute("DROP TRIGGER hindrance" if recorded.stem == "0001" else "DROP TABLE lives")
    assert list(database.iterdump()) == before
    database.close()
    assert said(path) == recorded.with_suffix(".jsonl").read_bytes()


def test_a_journal_that_could_not_be_made_is_made_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("disk is full")

    path = tmp_path / "journal.db"
    with monkeypatch.context() as broken:
        broken.setattr("alembic.op.get_bind", fail)
        with pytest.raises(OSError, match="disk is full"):
            Journal(journal_url(path))
    assert not path.exists()
    Journal(journal_url(path)).close()
