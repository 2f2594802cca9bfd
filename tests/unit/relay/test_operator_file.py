"""An operator's file: taken over when it changes; one that cannot be read switches nothing off, nor does a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from joynexus.tenants import TenantLimits, parse_limits
from services.master import operator_file
from services.master.operator_file import OperatorFile

GOOD, DAMAGED = b'{"lab": {"budget": 7.0}}', b'{"lab": {"budget": "seven"}}'
SEVEN = {"lab": TenantLimits(budget=7.0)}


class Operator:
    """Somebody who writes the file, before and after starts of the master."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys" / "limits.json"
        self.path.parent.mkdir()
        self.copy = folder / "state" / "limits.json"
        self.said: list[str] = []

    def start(self) -> OperatorFile[dict[str, TenantLimits]]:
        """Return what a master started now looks at, and does so for the first time."""
        file = OperatorFile(self.path, self.copy.parent, parse_limits, none={}, unreadable=self.said.append)
        file.changed()
        return file


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_each_change_is_noticed_once(operator: Operator) -> None:
    file = operator.start()
    assert (file.value, file.changed()) == ({}, False)
    operator.path.write_bytes(GOOD)
    assert [file.changed(), file.changed()] == [True, False]
    assert file.value == SEVEN
    operator.path.unlink()
    assert [file.changed(), file.changed()] == [True, False]
    assert file.value == {}
    assert not operator.said


def test_a_damaged_file_is_said_once_and_what_held_before_goes_on(operator: Operator) -> None:
    operator.path.write_bytes(GOOD)
    file = operator.start()
    operator.path.write_bytes(DAMAGED)
    assert [file.changed(), file.changed()] == [False, False]
    assert file.value == SEVEN
    assert len(operator.said) == 1
    assert operator.said[0].endswith("mend or remove it; until then what held before goes on")
    operator.path.write_bytes(b'{"lab": {"budget": 80.0}}')
    assert file.changed()
    assert file.value == {"lab": TenantLimits(budget=80.0)}


@pytest.mark.parametrize("damaged", [DAMAGED, b"", GOOD[:-3], b"[" * 100_000])
def test_after_a_restart_the_last_good_copy_of_a_damaged_file_holds(operator: Operator, damaged: bytes) -> None:
    operator.path.write_bytes(GOOD)
    operator.start()
    operator.path.write_bytes(damaged)
    for starts in (1, 2):
        file = operator.start()
        assert file.value == SEVEN
        assert len(operator.said) == starts
        assert "until then the last good copy of it holds" in operator.said[-1]
        assert not file.changed()
    operator.path.write_bytes(b'{"lab": {"budget": 80.0}}')
    assert file.changed()
    assert operator.start().value == {"lab": TenantLimits(budget=80.0)}


def test_a_file_that_cannot_be_opened_is_no_file_that_was_removed(operator: Operator) -> None:
    operator.path.write_bytes(GOOD)
    operator.start()
    operator.path.unlink()
    operator.path.mkdir()
    assert operator.start().value == SEVEN


def test_a_file_that_could_not_be_opened_is_read_once_it_can_be_though_nobody_changed_it(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(error: OSError) -> None:
        def read(path: Path) -> bytes:
            raise error

        monkeypatch.setattr(Path, "read_bytes", read)

    operator.path.write_bytes(GOOD)
    for first in (True, False):
        if first:
            refuse(PermissionError(13, "Permission denied"))
            file = operator.start()
        else:
            operator.path.write_bytes(b"{}")
            refuse(OSError(24, "Too many open files"))
        assert [file.changed(), file.changed()] == [False, False]
        assert len(operator.said) == 1, "once, however often it is tried"
        operator.said.clear()
        monkeypatch.undo()
        assert [file.changed(), file.changed()] == [True, False]
        assert file.value == (SEVEN if first else {})
    operator.path.write_bytes(DAMAGED)
    refuse(PermissionError(13, "Permission denied"))
    assert [file.changed(), file.changed()] == [False, False]
    monkeypatch.undo()
    assert [file.changed(), file.changed()] == [False, False]
    assert len(operator.said) == 2, "it can be opened, and is damaged"


def test_a_file_that_is_removed_means_none_and_nothing_of_it_comes_back(operator: Operator) -> None:
    operator.path.write_bytes(GOOD)
    file = operator.start()
    assert operator.copy.read_bytes() == GOOD
    operator.path.unlink()
    assert file.changed()
    assert not operator.copy.exists()
    operator.path.write_bytes(DAMAGED)
    assert operator.start().value == {}
    assert "no copy of it was ever kept" in operator.said[-1]


def test_a_file_that_was_removed_while_the_master_was_down_means_none(operator: Operator) -> None:
    operator.path.write_bytes(GOOD)
    operator.start()
    operator.path.unlink()
    assert operator.start().value == {}
    assert not operator.copy.exists()


def test_a_copy_that_cannot_be_read_either_is_said(operator: Operator) -> None:
    operator.path.write_bytes(DAMAGED)
    operator.copy.parent.mkdir()
    operator.copy.write_bytes(b"{")
    assert operator.start().value == {}
    assert "cannot be used either" in operator.said[-1]


def test_a_disk_that_takes_no_copy_keeps_no_change_from_acting(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    operator.path.write_bytes(GOOD)
    monkeypatch.setattr(operator_file, "write_private", full)
    assert operator.start().value == SEVEN
    assert not operator.said
