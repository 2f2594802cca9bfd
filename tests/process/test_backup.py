"""`joynexus admin backup` beside a master that runs, and a cluster that goes on elsewhere from what it made."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import joynexus
from common.backup import Places, make
from common.journal.journal import Journal, journal_url
from common.journal.records import JobRecord
from joynexus import launch
from joynexus.keys import ClusterFile
from joynexus.wire import ErrorCode, Failure
from joynexus.wire.front import CreatePolicy, GetPolicy, PolicyInfo
from tests.chaos.cluster import BACKBONE
from tests.chaos.jobs import push, sft
from tests.process.clusters import running
from tests.process.master_process import MasterProcess, Peer, short_folder
from tests.process.test_master import SPEC
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def admin(*arguments: object, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `joynexus admin …` as an operator does."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    if config is not None:
        env["JOYNEXUS_CONFIG"] = str(config)
    command = [sys.executable, "-m", "joynexus", "admin", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_master_that_runs_is_copied_and_another_one_goes_on_with_what_it_had() -> None:
    with short_folder() as name, MasterProcess(Path(name) / "one") as master:
        folder = Path(name)
        operator = master.keyring.issue("boss", tenant="boss", operator=True)
        with master.tenant() as peer:
            assert isinstance(peer.ask(CreatePolicy(policy="before", spec=SPEC)).message, PolicyInfo)
            stranger = admin("backup", folder / "no", "--state-dir", folder / "one", config=peer_file(master, "laptop"))
            assert stranger.returncode == 1
            assert "only an operator's key may make backups" in stranger.stderr
            assert not (folder / "no").exists()
            made = admin("backup", folder / "copy", "--state-dir", folder / "one", config=operator)
            assert (made.returncode, made.stderr) == (0, "")
            assert "1 records, 0 blobs (0.0 MB), with the keys" in made.stdout
            assert isinstance(peer.ask(CreatePolicy(policy="after", spec=SPEC)).message, PolicyInfo)
        assert master.terminate() == 0
        back = admin("restore", folder / "copy", "--state-dir", folder / "two")
        assert (back.returncode, back.stderr) == (0, "")
        with MasterProcess(folder / "two") as second, Peer(key_of(second, "laptop")) as peer:  # with the key it had
            assert isinstance(peer.ask(GetPolicy(policy="before")).message, PolicyInfo)
            answer = peer.ask(GetPolicy(policy="after")).message
            assert isinstance(answer, Failure)
            assert answer.code is ErrorCode.NOT_FOUND


def places(folder: Path) -> Places:
    return Places(state=folder / "state", blobs=folder / "blobs", keys=folder / "keys")


def peer_file(master: MasterProcess, name: str) -> Path:
    return master.keyring.cluster_file(name)


def key_of(master: MasterProcess, name: str) -> ClusterFile:
    return ClusterFile.load(peer_file(master, name))


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_job_that_ran_while_the_backup_was_made_ends_elsewhere_with_an_equal_curve(tmp_path: Path) -> None:
    options = launch.Options(backbone=BACKBONE, env_workers=1)
    with running(tmp_path / "one", options) as one, joynexus.connect(one.client_file) as client:
        push(client, tmp_path / "toy")
        job = sft(client, "p", 300)
        until(lambda: job.info().done >= 12)
        ticket = client.begin_backup(60.0)
        make(tmp_path / "copy", places(tmp_path / "one"), live=True)
        client.end_backup(ticket)
        assert job.wait(progress=False, timeout_s=240).state == "succeeded"
        losses = job.losses
    with closing(Journal(journal_url(tmp_path / "copy" / "journal.db"))) as journal:
        (record,) = (record for record in journal.load() if isinstance(record, JobRecord))
        assert record.state == "running"  # it was copied in the middle
    back = admin("restore", tmp_path / "copy", "--state-dir", tmp_path / "two")
    assert back.returncode == 0, back.stderr
    with running(tmp_path / "two", options) as two, joynexus.connect(two.client_file) as client:
        again = client.job(job.id)
        assert again.wait(progress=False, timeout_s=240).state == "succeeded"
        assert again.losses == losses
