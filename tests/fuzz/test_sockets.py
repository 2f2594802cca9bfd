"""A minute of what an hour of `make fuzz` does to a real master, while a tenant works and a trainer works for it."""

from __future__ import annotations

import os
import random

import pytest

from tests.fuzz import decoder, sockets

SECONDS = float(os.environ.get("FUZZ_S", "60"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_comes_to_its_ports_a_master_goes_on_and_its_tenant_loses_nothing() -> None:
    seed = random.randrange(1, 10**6)
    print(f"seed {seed}")
    report = sockets.run(SECONDS, seed=seed, findings=decoder.ROOT / "runs" / "fuzz")
    assert not report.findings, report
    assert report.live_ops > 10
    assert sum(report.acts.values()) > 50
    assert report.refused.get("malformed"), "something came through the doors, to be refused there"
