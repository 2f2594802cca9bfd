"""What several tests of processes share."""

from __future__ import annotations

from joynexus.vla import numerics

numerics.configure(1)  # as roles do: some tests compare their numbers with a role's

# torch may only be imported after `configure`, and others than this file do.
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from tests.process.door import Door  # noqa: E402


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.close()
