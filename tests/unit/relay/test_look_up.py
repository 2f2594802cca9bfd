"""A damaged registry lets nobody in, and says so in few lines however many messages come."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import refusals
from joynexus.keys import KeyEntry, KeyPair, KeyRegistry
from services.master.doors import look_up


def test_a_damaged_registry_is_logged_in_few_lines_and_lets_all_in_again_once_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Lines:
        def warning(self, event: str, **values: object) -> None:
            lines.append(f"{event}: {values['why']}")

    monkeypatch.setattr(refusals, "log", Lines())
    registry, public = KeyRegistry(tmp_path / "registry.json"), KeyPair.generate().public
    registry.add(KeyEntry(name="lab", public=public, domain="tenant", tenant="lab"))
    sound = (tmp_path / "registry.json").read_bytes()
    (tmp_path / "registry.json").write_bytes(b"{broken")
    assert all(look_up(registry, public) is None for _ in range(500))
    assert 0 < len(lines) < 15
    assert "registry_unreadable: the key registry" in lines[0]
    (tmp_path / "registry.json").write_bytes(sound)
    entry = look_up(registry, public)
    assert entry is not None
    assert entry.tenant == "lab"
