"""A master whose journal is damaged does not start, and says in one sentence what is damaged and what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from joynexus.wire.front import CreatePolicy, GetPolicy, PolicyInfo
from tests.process.master_process import MasterProcess, short_folder
from tests.process.test_master import SPEC

EXIT_DAMAGED = 78


def change(journal: Path, statement: str) -> None:
    """Do something to the file that the master would not do."""
    database = sqlite3.connect(journal)
    with database:
        database.execute(statement)
    database.close()


def test_a_damaged_record_keeps_the_master_from_starting_with_a_sentence_that_names_it() -> None:
    with short_folder() as folder, MasterProcess(Path(folder)) as master:
        journal = Path(folder) / "state" / "journal.db"
        with master.tenant() as peer:
            for policy in ("good", "bad"):
                assert isinstance(peer.ask(CreatePolicy(policy=policy, spec=SPEC)).message, PolicyInfo)
            assert master.terminate() == 0
            change(journal, "UPDATE policies SET record = zeroblob(9) WHERE policy = 'bad'")
            before = len(master.log_text().splitlines())
            master.start()
            assert master.process is not None
            assert master.process.wait(30) == EXIT_DAMAGED
            (sentence,) = master.log_text().splitlines()[before:]
            for part in (str(journal), "table 'policies'", "policy 'bad'", "checksum", "admin journal repair"):
                assert part in sentence
            change(journal, "DELETE FROM policies WHERE policy = 'bad'")
            master.start()
            assert isinstance(peer.ask(GetPolicy(policy="good"), timeout_s=30).message, PolicyInfo)
