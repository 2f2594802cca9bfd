"""A master that cannot work any more ends by itself, so that whoever supervises it starts another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.progress import EXIT_WEDGED
from joynexus.wire.front import CreatePolicy, GetPolicy, Ping, PolicyInfo, Pong
from services.master.service import EXIT_THREAD
from tests.process.master_process import PATIENCE_S, MasterProcess
from tests.process.test_master import SPEC


@pytest.fixture
def master(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MasterProcess]:
    """With settings, if the test has a parameter for it."""
    (tmp_path / "faults").mkdir()
    with MasterProcess(tmp_path, failpoints=tmp_path / "faults", **getattr(request, "param", {})) as master:
        yield master


def strike(master: MasterProcess, place: str, fault: str) -> None:
    """Have the next process that comes by a failpoint fail there."""
    new = master.folder / "new-fault"
    new.write_text(fault)
    new.rename(master.folder / "faults" / place)


def exit_code(master: MasterProcess) -> int:
    assert master.process is not None
    return master.process.wait(PATIENCE_S)


@pytest.mark.parametrize("master", [{"stall_s": 5}], indirect=True)
def test_a_master_whose_loop_hangs_ends_itself_and_the_next_one_goes_on(master: MasterProcess) -> None:
    with master.tenant() as peer:
        assert isinstance(peer.ask(CreatePolicy(policy="p", spec=SPEC)).message, PolicyInfo)
        strike(master, "master.look_around", "hang")
        assert exit_code(master) == EXIT_WEDGED
        assert "no progress" in master.log_text()
        master.kill()
        master.start()
        assert isinstance(peer.ask(GetPolicy(policy="p")).message, PolicyInfo)


def test_a_master_that_would_let_nobody_in_any_more_ends_itself(master: MasterProcess) -> None:
    with master.tenant("early") as early:
        assert isinstance(early.ask(Ping()).message, Pong)
        strike(master, "master.let_in", "error")
        with master.tenant("late") as late:
            assert exit_code(master) == EXIT_THREAD
            assert "thread_failed" in master.log_text()
            master.kill()
            master.start()
            assert isinstance(late.ask(Ping()).message, Pong)


def test_a_handshake_that_meets_a_fault_of_the_disk_costs_nobody_else_anything(master: MasterProcess) -> None:
    with master.tenant("early") as early:
        assert isinstance(early.ask(Ping()).message, Pong)
        strike(master, "master.let_in", "eio")
        with master.tenant("unlucky"), master.tenant("lucky") as lucky, master.tenant("other") as other:
            answered = [peer for peer in (lucky, other) if isinstance(peer.ask(Ping()).message, Pong)]
        assert len(answered) == 2
        assert isinstance(early.ask(Ping()).message, Pong)
