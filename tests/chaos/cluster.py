"""A whole cluster whose processes fail where they are told to.

In: a folder. Out: a cluster that is up, its owner's connection, and its failpoints. Never: a fault that strikes twice,
or one that waits for the next case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import joynexus
from common.failpoints import VARIABLE
from joynexus import Client, launch
from joynexus.local import InstanceHealth, LocalCluster
from tests.process.clusters import running
from tests.waiting import until

BACKBONE = "lite@64"  # loads in a second, which counts where roles are killed again and again


class Points:
    """The failpoints of a cluster's processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def arm(self, name: str, fault: str) -> None:
        """Have whoever comes by there struck, once."""
        self._struck(name).unlink(missing_ok=True)
        new = self.folder / f"{name}.new"
        new.write_text(fault)
        new.rename(self.folder / name)  # whole at once: processes come by all the time

    def struck(self, name: str) -> bool:
        """Somebody was."""
        return self._struck(name).exists()

    def disarm(self) -> None:
        """Nobody is struck any more."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)

    def _struck(self, name: str) -> Path:
        return self.folder / f"{name}.struck"


@dataclass(frozen=True)
class Cluster:
    """A cluster, its owner's connection, and its failpoints."""

    local: LocalCluster
    client: Client
    points: Points

    def log(self, role: str) -> str:
        """What a role has logged."""
        return self.local.log_file(role).read_text(errors="replace")

    def health_of(self, role: str) -> InstanceHealth:
        """What health knows of a role."""
        report = self.local.load_health()
        assert report is not None
        return next(instance for instance in report.instances if instance.name == role)

    def pid(self, role: str) -> int:
        """A role's process, waited for: health may just be starting it again."""
        until(lambda: self.local.running(role))
        return self.local.running(role)

    def idle(self) -> bool:
        """No work waits or is under way."""
        return not any(lane.waiting or lane.running for lane in self.client.status().lanes)


@contextmanager
def chaotic(folder: Path, *, env_workers: int = 1, **environment: str) -> Iterator[Cluster]:
    """A cluster with failpoints; `environment` are more variables of its processes."""
    points = Points(folder / "points")
    options = launch.Options(backbone=BACKBONE, simulator_processes=2, env_workers=env_workers, timeout_s=300)
    with pytest.MonkeyPatch.context() as variables:
        for name, value in {VARIABLE: str(points.folder), **environment}.items():
            variables.setenv(name, value)
        with running(folder, options) as local, joynexus.connect(local.client_file) as client:
            yield Cluster(local, client, points)
