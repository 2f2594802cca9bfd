"""What several tests of processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from joynexus.launch import reproducible_kernels
from tests.process.door import Door

# Read when torch is loaded, whoever does that first: some tests compare their numbers with a role's.
os.environ.setdefault("MKL_CBWR", reproducible_kernels())


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.close()
