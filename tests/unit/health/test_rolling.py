"""Which processes a rolling restart takes, and in which order."""

from __future__ import annotations

import pytest

from joynexus.rolling import chosen

NAMES = {"master": "master", "trainer": "trainer", "trainer-2": "trainer", "inference": "inference", "env": "env"}


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ((), ["trainer", "trainer-2", "inference", "env", "master", "health"]),
        (("master", "env"), ["env", "master"]),
        (("trainer",), ["trainer", "trainer-2"]),
        (("trainer-2", "trainer-2"), ["trainer-2"]),
        (("health", "inference"), ["inference", "health"]),
    ],
)
def test_workers_go_first_then_the_master_and_health_last(which: tuple[str, ...], expected: list[str]) -> None:
    assert chosen(NAMES, which) == expected


def test_an_unknown_role_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'trainer-3' is no role of this cluster: it has master, trainer, trainer-2"):
        chosen(NAMES, ["env", "trainer-3"])
