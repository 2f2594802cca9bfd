"""CPU time by role: children belong to their role, and no process counts twice."""

from __future__ import annotations

import pytest

from benchmarks import _roles


class Cluster:
    """Health (10) started the trainer (20) and env (30); env has a fork server (31) with a simulator (32)."""

    def all_running(self) -> dict[str, int]:
        return {"health": 10, "trainer": 20, "env-2": 30}


def stat(parent: int, own: int, ended_children: int) -> list[str]:
    fields = ["S", str(parent), *["0"] * 9, str(own), "0", str(ended_children), "0"]
    return [*fields, *["0"] * 30]


def test_children_count_for_their_role_and_roles_are_not_healths(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = {
        10: stat(1, 100, 0), 20: stat(10, 200, 0), 30: stat(10, 300, 50), 31: stat(30, 1, 0), 32: stat(31, 2, 0),
    }  # fmt: skip
    monkeypatch.setattr(_roles, "_stat", lambda pid: processes.get(pid, []))
    monkeypatch.setattr(_roles, "_children", lambda: {10: [20, 30], 30: [31], 31: [32]})
    monkeypatch.setattr(_roles, "_TICKS", 100)
    assert _roles.cpu_s(Cluster()) == {"health": 1.0, "trainer": 2.0, "env": 3.53}  # type: ignore[arg-type]
