"""What no code expects: a bug in a handler of messages, and settings with which no role can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from joynexus import launch
from joynexus.local import LocalCluster
from joynexus.wire import ErrorCode, Failure, encode
from joynexus.wire.back import Leaving, Register, Registered
from joynexus.wire.front import CreatePolicy, GetPolicy, PolicyInfo
from tests.chaos import buggy_master
from tests.chaos.buggy_master import CURSED
from tests.chaos.cluster import BACKBONE
from tests.chaos.verdict import Verdict
from tests.process.clusters import running
from tests.process.master_process import MasterProcess, short_folder
from tests.process.test_master import SPEC, failed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.case(36, "a bug in the master's handlers of messages")
def test_message_that_meets_a_bug_costs_its_sender_alone(verdict: Verdict) -> None:
    with (
        short_folder() as folder,
        MasterProcess(Path(folder), module=buggy_master.__name__) as master,
        master.tenant() as one,
        master.tenant("other", tenant="other") as other,
        master.worker("env") as worker,
    ):
        for peer in (one, other):
            assert isinstance(peer.ask(CreatePolicy(policy="p", spec=SPEC)).message, PolicyInfo)
        hello = Register(role="env", incarnation="i", pid=1, credit={"data": 1}, serves=("datasets",))
        assert isinstance(worker.ask(hello).message, Registered)
        with verdict("I3"):
            for _ in range(3):
                assert failed(one.ask(GetPolicy(policy=CURSED))).code is ErrorCode.INTERNAL
            worker.send(encode(Leaving(), id="l"))
            assert isinstance(worker.ask(hello).message, Registered | Failure)
        with verdict("I5"):
            for peer in (one, other):
                assert isinstance(peer.ask(GetPolicy(policy="p")).message, PolicyInfo)
            assert failed(other.ask(GetPolicy(policy="nobody"))).code is ErrorCode.NOT_FOUND
            assert master.process is not None
            assert master.process.poll() is None
        with verdict("I6"):
            logged = [line for line in master.log_text().splitlines() if "message_met_a_bug" in line]
            assert len(logged) == 2, "what met a bug is not tried again"
            assert "planted for tenants" in logged[0]
            assert "planted for workers" in logged[1]


@pytest.mark.case(37, "a setting with which a role cannot run")
@pytest.mark.parametrize(
    ("role", "setting"),
    [
        pytest.param("master", "JOYNEXUS_BEAT_MS", marks=pytest.mark.thorough),
        ("trainer", "JOYNEXUS_SLOT_BYTES"),
    ],
)
def test_wrong_setting_is_shown_at_once_and_nothing_is_started_again_and_again(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, setting: str
) -> None:
    monkeypatch.setenv(setting, "plenty")
    with (
        verdict("I3"),
        pytest.raises(ValueError, match=f"{role} cannot be started: .*{setting}='plenty'"),
        running(tmp_path / "cluster", launch.Options(backbone=BACKBONE, timeout_s=200)),
    ):
        pytest.fail("it came up")
    cluster = LocalCluster(tmp_path / "cluster")
    with verdict("I4"):
        assert cluster.all_running() == {}
    with verdict("I6"):
        said = cluster.log_file(role).read_text()
        assert said.count("cannot start: the setting") == 1
        assert "Traceback" not in said
