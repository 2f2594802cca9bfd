"""A master whose journal is damaged does not start, and says in one sentence what is damaged and what to do."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

from joynexus.wire import ErrorCode
from joynexus.wire.front import CreatePolicy, GetPolicy, PolicyInfo
from tests.process.master_process import PATIENCE_S, MasterProcess, short_folder
from tests.process.test_master import SPEC, failed

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
            assert master.process.wait(PATIENCE_S) == EXIT_DAMAGED
            (sentence,) = master.log_text().splitlines()[before:]
            for part in (str(journal), "table 'policies'", "policy 'bad'", "checksum", "admin journal check"):
                assert part in sentence
            assert repair("check", journal.parent) == (1, True)
            assert repair("repair", journal.parent) == (0, True)
            assert repair("check", journal.parent) == (0, False)
            master.start()
            assert isinstance(peer.ask(GetPolicy(policy="good")).message, PolicyInfo)
            assert failed(peer.ask(GetPolicy(policy="bad"))).code is ErrorCode.NOT_FOUND
            assert (journal.parent / "journal.db.damaged-1").exists()


def repair(verb: str, folder: Path) -> tuple[int, bool]:
    """Run the operator's command; return its exit code, and whether it names the damaged record."""
    command = [sys.executable, "-m", "joynexus", "admin", "journal", verb, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, "the record of table 'policies' with tenant 'acme', policy 'bad'" in done.stdout
