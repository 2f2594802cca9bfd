"""Roles are killed at random for a while, all but one: the same numbers as without, and memory that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster import chaotic
from tests.chaos.killer import Plan
from tests.chaos.soak import KILLS, LONG, SHORT, soak
from tests.chaos.tenants import LAST_S
from tests.chaos.verdict import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LONG.seconds + 4 * LAST_S)]


@pytest.mark.case(34, "roles are killed at random for a while, all but one")
@pytest.mark.parametrize("plan", [SHORT, pytest.param(LONG, marks=pytest.mark.thorough)], ids=["short", "long"])
def test_random_kills_change_no_number_and_leave_nothing(plan: Plan, verdict: Verdict, tmp_path: Path) -> None:
    with chaotic(tmp_path, **KILLS) as cluster:
        print(soak(cluster, plan, tmp_path, verdict).figures())
