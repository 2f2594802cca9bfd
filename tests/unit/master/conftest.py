"""A master that has just begun, and a loop that drives its first policy, for files that make none of their own."""

from __future__ import annotations

import pytest

from tests.unit.master.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def lease(world: World) -> str:
    world.create()
    return world.lease()
