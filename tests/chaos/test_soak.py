"""Roles are killed at random for a while, all but one: the same numbers as without, and memory that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster import chaotic
from tests.chaos.soak import KILLS, USUAL, soak
from tests.chaos.tenants import LAST_S
from tests.chaos.verdict import Verdict


@pytest.mark.case(34, "roles are killed at random for a while, all but one")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(USUAL.seconds + 4 * LAST_S)
def test_random_kills_change_no_number_and_leave_nothing(verdict: Verdict, tmp_path: Path) -> None:
    with chaotic(tmp_path, **KILLS) as cluster:
        print(soak(cluster, USUAL, tmp_path, verdict).figures())
