"""A journal with a Postgres server: what is acknowledged is there, whatever becomes of connection and server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.backup import BusyError, Places, make, restore
from common.blobs import BlobStore
from common.dump import main
from common.journal import postgres as backend
from common.journal.errors import JournalDamagedError, JournalError, JournalTakenError
from common.journal.journal import Journal, journal_url
from common.journal.opening import NEWEST_SCHEMA
from common.journal.records import BlobRecord, Record
from common.journal.tables import metadata
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.front import CreatePolicy, GetPolicy, PolicyInfo
from tests.postgres import Server, server
from tests.process.master_process import MasterProcess, short_folder
from tests.process.test_master import SPEC
from tests.unit.common.test_journal import done, op

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "RETRY_S", 0.02)


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.new_schema()


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    opened = Journal(url)
    yield opened
    opened.close()


def blob(number: int) -> BlobRecord:
    return BlobRecord(tenant="a", digest=f"{number:08d}", nbytes=number)


def kept(journal: Journal) -> list[Record]:
    return list(journal.load())


def writers(postgres: Server) -> list[int]:
    """Processes of the server that serve journals' writers."""
    rows = postgres.ask("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'joynexus journal %'")
    return [int(str(pid)) for (pid,) in rows]


def cut(postgres: Server) -> None:
    """End the connections of writers, and wait until the server has forgotten them."""
    postgres.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'joynexus journal %'"
    )
    wait_until(lambda: not writers(postgres))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def patiently(journal: Journal, record: Record) -> None:
    """Ask until it is taken, as a client does that is told UNAVAILABLE."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            journal.append([record])
            return
        except JournalError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_lost_connection_refuses_one_batch_and_the_next_is_taken(journal: Journal, postgres: Server) -> None:
    journal.append([blob(1)])
    cut(postgres)
    with pytest.raises(JournalError):
        journal.append([blob(2)])
    assert kept(journal) == [blob(1)]
    patiently(journal, blob(3))
    assert kept(journal) == [blob(1), blob(3)]


def test_while_the_server_is_away_nothing_is_taken_and_all_goes_on_when_it_is_back(
    journal: Journal, postgres: Server
) -> None:
    journal.append([blob(1)])
    postgres.stop()
    for number in (2, 3):
        with pytest.raises(JournalError) as refused:
            journal.append([blob(number)])
        assert str(postgres.folder) not in str(refused.value)  # tenants are told, and it names no server
    with pytest.raises(JournalError, match="cannot be read"):
        journal.payload("a", "p", 1)
    postgres.start()
    patiently(journal, blob(4))
    assert kept(journal) == [blob(1), blob(4)]


@pytest.mark.parametrize("how", ["a process of the server", "the server"])
def test_nothing_acknowledged_is_lost_when_it_is_killed_mid_append(
    journal: Journal, url: str, postgres: Server, how: str
) -> None:
    """Every record that `append` returned for is there; every one that it refused is not."""
    acknowledged, refused = [], []
    going, stop = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                journal.append([blob(number)])
            except JournalError:
                refused.append(number)
                time.sleep(0.01)
            else:
                acknowledged.append(number)
                going.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        going.clear()
        assert going.wait(PATIENCE_S)
        if how == "the server":
            postgres.kill()
            postgres.start()
        else:
            (writer,) = writers(postgres)
            os.kill(writer, signal.SIGKILL)  # the server then ends all, and recovers from its log
            wait_until(lambda: not Path(f"/proc/{writer}").exists())
        for _ in range(2):  # the first may have been acknowledged before
            going.clear()
            assert going.wait(PATIENCE_S)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    journal.close()
    again = Journal(url)
    assert kept(again) == [blob(number) for number in acknowledged]
    again.close()
    assert not set(acknowledged) & set(refused)


def test_commit_that_was_not_answered_is_done_again_until_it_is_known(journal: Journal, postgres: Server) -> None:
    """The server has it on disk and waits for a standby that there is not, when the connection ends."""
    postgres.ask("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgres.ask("SELECT pg_reload_conf()")
    wait_until(lambda: postgres.ask("SHOW synchronous_standby_names") == [("nobody",)])
    done = threading.Event()

    def append() -> None:
        journal.append([blob(1)])
        done.set()

    thread = threading.Thread(target=append)
    thread.start()
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_until(lambda: bool(postgres.ask(waits)))
    postgres.ask("ALTER SYSTEM RESET synchronous_standby_names")
    postgres.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    postgres.ask("SELECT pg_reload_conf()")
    assert done.wait(PATIENCE_S)
    thread.join()
    assert kept(journal) == [blob(1)]


def test_commit_that_never_came_is_done_again(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    real, cuts = sa.Connection.commit, iter([True])

    def commit(self: sa.Connection) -> None:
        if next(cuts, False):
            driver = self.connection.driver_connection
            assert driver is not None
            driver.close()
        real(self)

    monkeypatch.setattr(sa.Connection, "commit", commit)
    journal.append([blob(1)])
    assert next(cuts, None) is None
    assert kept(journal) == [blob(1)]


def test_master_that_lost_its_journal_to_another_one_writes_nothing_more(
    journal: Journal, url: str, postgres: Server
) -> None:
    journal.append([blob(1)])
    cut(postgres)
    second = Journal(url)
    second.append([blob(2)])
    with pytest.raises(JournalError):
        journal.append([blob(3)])  # it learns that its connection is lost
    with pytest.raises(JournalTakenError, match="this one must end"):
        patiently(journal, blob(4))
    second.append([blob(5)])
    second.close()
    with pytest.raises(JournalTakenError, match="this one must end"):
        patiently(journal, blob(6))
    third = Journal(url)
    assert kept(third) == [blob(1), blob(2), blob(5)]
    third.close()


def test_transaction_that_the_server_refuses_leaves_nothing(journal: Journal, url: str, postgres: Server) -> None:
    schema = url.rpartition("%3D")[2]
    postgres.ask(
        f"CREATE FUNCTION {schema}.full() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    )
    postgres.ask(
        f"CREATE TRIGGER is_full BEFORE INSERT ON {schema}.blobs FOR EACH ROW EXECUTE FUNCTION {schema}.full()"
    )
    with pytest.raises(JournalError, match=r"^could not extend file$"):
        journal.append([blob(1)])
    postgres.ask(f"DROP TRIGGER is_full ON {schema}.blobs")
    journal.append([blob(2)])
    assert kept(journal) == [blob(2)]


def test_server_that_does_not_wait_for_its_disk_is_refused(url: str, postgres: Server) -> None:
    postgres.stop()
    postgres.start("fsync=off")
    try:
        with pytest.raises(ValueError, match="fsync = off: a power cut would lose it"):
            Journal(url)
    finally:
        postgres.stop()
        postgres.start()


def test_commits_wait_for_the_disk_whatever_the_server_has_as_its_default(url: str, postgres: Server) -> None:
    journal = Journal(f"{url}%20-csynchronous_commit%3Doff")
    writer = journal._backend._writer  # type: ignore[attr-defined]  # a back end of Postgres has one
    assert writer.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"
    journal.close()


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/journal", "postgresql://me@host/journal?password=secret"])
def test_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="name a file in PGPASSFILE") as refused:
        Journal(url)
    assert "secret" not in str(refused.value)


def test_server_that_is_not_there_is_said_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="the journal postgresql://me@/journal cannot be opened: connection"):
        Journal("postgresql://me@/journal?host=/nowhere")


def test_tables_are_those_that_the_code_expects(journal: Journal, url: str, postgres: Server) -> None:
    schema = url.rpartition("%3D")[2]
    tables = {name for (name,) in postgres.ask(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")}
    assert tables == {*metadata.tables, "alembic_version", "openings"}
    assert postgres.ask(f"SELECT version_num FROM {schema}.alembic_version") == [(NEWEST_SCHEMA,)]


def test_schema_of_something_else_or_of_a_newer_release_is_refused(postgres: Server) -> None:
    other = postgres.new_schema()
    postgres.ask(f"CREATE TABLE {other.rpartition('%3D')[2]}.jobs (id int)")
    with pytest.raises(JournalDamagedError, match="its tables are not those of a journal"):
        Journal(other)
    newer = postgres.new_schema()
    Journal(newer).close()
    postgres.ask(f"UPDATE {newer.rpartition('%3D')[2]}.alembic_version SET version_num = '9999'")
    with pytest.raises(ValueError, match="schema 9999, which this release does not know"):
        Journal(newer)


def test_record_that_is_not_as_it_was_written_is_named(journal: Journal, url: str, postgres: Server) -> None:
    journal.append([blob(1), blob(2)])
    postgres.ask(f"UPDATE {url.rpartition('%3D')[2]}.blobs SET record = 'no record' WHERE digest = '00000002'")
    with pytest.raises(JournalDamagedError, match=r"bring its database back .*table 'blobs' with tenant 'a', digest"):
        kept(journal)
    done = admin("check", url)
    assert done.returncode == 1
    assert "1 damaged:\n  the record of table 'blobs' with tenant 'a', digest '00000002': it" in done.stdout
    assert "1 records would stay" in done.stdout
    assert "bring the server's database back" in admin("repair", url).stderr


def test_journal_is_checked_while_it_is_open(journal: Journal, url: str, postgres: Server) -> None:
    journal.append([blob(1)])
    assert "is sound: 1 records" in admin("check", url).stdout
    assert "there is no journal in" in admin("check", postgres.new_schema()).stderr


def admin(verb: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "joynexus", "admin", "journal", verb, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_master_goes_on_with_what_it_acknowledged_when_the_server_is_killed_and_started_again(
    url: str, postgres: Server
) -> None:
    with short_folder() as folder, MasterProcess(Path(folder), journal_url=url) as master, master.tenant() as peer:
        assert isinstance(peer.ask(CreatePolicy(policy="before", spec=SPEC)).message, PolicyInfo)
        postgres.kill()
        answer = peer.ask(CreatePolicy(policy="meanwhile", spec=SPEC)).message
        assert isinstance(answer, Failure)
        assert answer.code is ErrorCode.UNAVAILABLE
        assert str(postgres.folder) not in answer.message
        assert isinstance(peer.ask(GetPolicy(policy="before")).message, PolicyInfo)
        postgres.start()
        deadline = time.monotonic() + PATIENCE_S
        while isinstance(answer, Failure):
            assert (answer.code, time.monotonic() < deadline) == (ErrorCode.UNAVAILABLE, True)
            answer = peer.ask(CreatePolicy(policy="after", spec=SPEC)).message
        master.kill()
        master.start()
        for policy in ("before", "after"):
            assert isinstance(peer.ask(GetPolicy(policy=policy)).message, PolicyInfo)
        answer = peer.ask(GetPolicy(policy="meanwhile")).message
        assert isinstance(answer, Failure)
        assert answer.code is ErrorCode.NOT_FOUND


def test_backup_of_a_journal_in_postgres_is_restored_to_a_server_or_a_file(postgres: Server, tmp_path: Path) -> None:
    first = Places(state=tmp_path / "state", blobs=tmp_path / "blobs", keys=None, journal_url=postgres.new_schema())
    data = BlobStore(first.blobs).put_bytes(b"an upload")
    records = [BlobRecord(tenant="a", digest=data, nbytes=9), op(1, b"samples"), done(1)]
    with closing(Journal(first.journal_url)) as journal:
        journal.append(records)
        with pytest.raises(BusyError, match="a master has the journal"):
            make(tmp_path / "copy", first, live=False)
        assert make(tmp_path / "copy", first, live=True).records == 3
    assert make(tmp_path / "second", first, live=False).records == 3
    second = Places(state=tmp_path / "2", blobs=tmp_path / "2b", keys=None, journal_url=postgres.new_schema())
    third = Places(state=tmp_path / "3", blobs=tmp_path / "3b", keys=None)
    for places, url in ((second, second.journal_url), (third, journal_url(tmp_path / "3" / "journal.db"))):
        assert restore(tmp_path / "copy", places).missing == ()
        with closing(Journal(url)) as journal:
            assert journal.payload("a", "p", 1) == b"samples"
            assert [type(record) for record in journal.load()] == [type(record) for record in records]
    folders = [word for name in ("state", "blobs", "keys", "run") for word in (f"--{name}", str(tmp_path / name))]
    assert main([str(tmp_path / "bug.tar.gz"), *folders, "--journal-url", first.journal_url], b"") == 0
    with tarfile.open(tmp_path / "bug.tar.gz") as bundle:
        counts = bundle.extractfile("bug/journal.json")
        assert counts is not None
        assert b'"ops": 1' in counts.read()
    with pytest.raises(ValueError, match="has a journal there already: name an empty database or schema"):
        restore(tmp_path / "copy", second)
