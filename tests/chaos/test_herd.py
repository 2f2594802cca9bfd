"""The master is killed under many workers and tenants, who all come back at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._herd import Herd
from tests.chaos.verdict import Verdict
from tests.process.master_process import MasterProcess
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)  # they share the test's cores with their master

OPS = 5
LONG_S = 200.0


@pytest.mark.case(32, "the master is killed under many workers and tenants, who all come back")
@pytest.mark.parametrize(("workers", "clients"), [(10, 40), pytest.param(50, 200, marks=pytest.mark.thorough)])
def test_everybody_comes_back_to_a_restarted_master_and_no_op_is_lost_or_doubled(
    tmp_path: Path, verdict: Verdict, workers: int, clients: int
) -> None:
    with (
        MasterProcess(tmp_path, silent_s=120) as master,
        Herd(master.keyring, tmp_path, workers=workers, clients=clients) as herd,
    ):
        until(lambda: herd.registered() == workers, LONG_S)
        herd.order(OPS)
        until(lambda: not herd.under_way, LONG_S)
        herd.gate.clear()
        herd.order(OPS)
        until(lambda: herd.waiting() >= OPS * clients, LONG_S)
        master.kill()
        herd.order(OPS)  # nobody hears these
        master.start()
        herd.gate.set()
        with verdict("I4"):
            until(lambda: herd.registered() == workers, LONG_S)
        with verdict("I3"), verdict("I5"):
            until(lambda: not herd.under_way, LONG_S)
        with verdict("I1"):
            assert herd.wrong() == []
        with verdict("I6"):
            assert master.log_text().count("worker_joined") == 2 * workers
