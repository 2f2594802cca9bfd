"""Failpoints: strike once, where asked, and nowhere else."""

from __future__ import annotations

import ast
import errno
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import failpoints
from common.failpoints import NAMES, VARIABLE, FailpointError, arm, failpoint
from common.settings import refuse_unknown

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm({})


def test_nothing_fails_that_was_not_asked_for() -> None:
    arm({VARIABLE: "master.append=error"})
    failpoint("trainer.optim_step")
    arm({})
    failpoint("master.append")


def test_strikes_at_the_time_asked_for_and_only_then() -> None:
    arm({VARIABLE: "master.append = enospc; trainer.optim_step = 2*eio"})
    with pytest.raises(OSError, match="No space") as full:
        failpoint("master.append")
    assert full.value.errno == errno.ENOSPC
    failpoint("master.append")
    failpoint("trainer.optim_step")
    with pytest.raises(OSError, match="Input/output"):
        failpoint("trainer.optim_step")
    failpoint("trainer.optim_step")


def test_raises_what_a_library_would_raise() -> None:
    arm({VARIABLE: "trainer.optim_step=raise:threading.BrokenBarrierError"})
    with pytest.raises(threading.BrokenBarrierError, match=r"failpoint trainer\.optim_step"):
        failpoint("trainer.optim_step")


def test_kill_ends_the_process_at_once() -> None:
    program = "import os; from common import failpoints as f; f.arm(os.environ); f.failpoint('master.append'); print(1)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={VARIABLE: "master.append=kill"}, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL
    assert not ended.stdout


def test_fault_in_a_folder_strikes_once_in_all_processes_together(tmp_path: Path) -> None:
    arm({VARIABLE: str(tmp_path)})
    failpoint("env.before_blob")
    (tmp_path / "env.before_blob").write_text("2*error")
    failpoint("env.before_blob")
    with pytest.raises(FailpointError, match=r"env\.before_blob"):
        failpoint("env.before_blob")
    failpoint("env.before_blob")
    assert [path.name for path in tmp_path.iterdir()] == ["env.before_blob.struck"]


@pytest.mark.parametrize("value", ["master.appendix=kill", "master.append=explode", "master.append=0*kill"])
def test_misspelt_fault_is_refused_in_one_sentence(value: str) -> None:
    with pytest.raises(ValueError, match="append") as refused:
        arm({VARIABLE: value})
    assert "\n" not in str(refused.value)


def test_the_variable_is_no_unknown_setting() -> None:
    refuse_unknown({VARIABLE: "master.append=kill"})


def test_every_name_has_one_place() -> None:
    places: Counter[str] = Counter()
    for path in (*ROOT.glob("common/**/*.py"), *ROOT.glob("services/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                assert isinstance(node.args[0], ast.Constant), path
                places[str(node.args[0].value)] += 1
    assert places == dict.fromkeys(NAMES, 1)


def test_a_place_without_a_fault_is_a_look_into_an_empty_dictionary() -> None:
    arm({})
    assert failpoints._places == {}
