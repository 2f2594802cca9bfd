"""Health's shell, without processes or a master."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from joynexus.local import LocalCluster
from services.health.core import Ended, HealthCore
from services.health.service import Health


class Supervisor:
    """Starts nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, name: str) -> int:
        self.started.append(name)
        return 1

    def ended(self) -> list[Ended]:
        return []


def test_full_disk_does_not_end_who_looks_after_the_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.run.mkdir()
    runtime: Any = SimpleNamespace(progress=SimpleNamespace(advance=lambda: None), ask=lambda *_, **__: Future())
    supervisor: Any = Supervisor()
    health = Health(cluster, HealthCore({"master": "master"}), supervisor, runtime)

    def full(report: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(cluster, "save_health", full)
    health.turn()
    assert supervisor.started == ["master"]
    monkeypatch.undo()
    health.turn()
    report = cluster.load_health()
    assert report is not None
    assert [instance.name for instance in report.instances] == ["master"]
