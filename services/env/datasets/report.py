"""What was found in a data set: a list of faults and a summary.

In: findings, one by one, while a data set is read. Out: `Report`, and `DatasetError` when reading cannot go on. Never:
a fault without the file, column or field where it is.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from joynexus.datasets import Fault

_MOST_FAULTS = 200  # a set that is wrong in every episode says so this often, not a million times
_MOST_CHARS = 500  # a fault quotes what somebody sent, which may be megabytes; the report must fit into a message


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a data set holds, as far as it could be read.

    Attributes:
        source_format: `lerobot-v2.0`, `lerobot-v2.1`, `lerobot-v3.0`, `libero-hdf5`, `robomimic-hdf5`.
        robot: name of the embodiment.
        episodes, steps: how many of each.
        fps: steps per second.
        state_dim, action_dim: lengths of the vectors.
        cameras: names, in order.
        instructions: distinct task texts, sorted.
    """

    source_format: str
    robot: str
    episodes: int
    steps: int
    fps: float
    state_dim: int
    action_dim: int
    cameras: tuple[str, ...]
    instructions: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found; `summary` is None if errors kept the set from being understood."""

    faults: tuple[Fault, ...] = ()
    summary: Summary | None = None

    @property
    def errors(self) -> tuple[Fault, ...]:
        """Return the faults that make the set unusable."""
        return tuple(fault for fault in self.faults if fault.severity == "error")


class DatasetError(ValueError):
    """A data set cannot be used; the first sentence says why, `report` has every fault that was found."""

    def __init__(self, report: Report) -> None:
        errors = report.errors
        more = f" ({len(errors) - 1} more errors: see the report)" if len(errors) > 1 else ""
        super().__init__(f"{errors[0].where}: {errors[0].what}{more}")
        self.report = report


class Findings:
    """Collects faults while a set is read."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._failed = False
        self._repeated: dict[str, tuple[str, int]] = {}  # what -> first place, how often

    def warn_often(self, where: str, what: str) -> None:
        """Note a warning that may hold for every episode: the report has it once, with the first place and a count."""
        first, count = self._repeated.get(what, (where, 0))
        if count or len(self._repeated) < _MOST_FAULTS:
            self._repeated[what] = (first, count + 1)

    def warn(self, where: str, what: str) -> None:
        """Note something that was read anyway."""
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(_fault("warning", where, what))

    def error(self, where: str, what: str) -> None:
        """Note something that makes the set unusable, and read on to find more."""
        if len(self._faults) < _MOST_FAULTS or not self._failed:
            self._faults.append(_fault("error", where, what))
        self._failed = True

    def fail(self, where: str, what: str) -> DatasetError:
        """Note an error after which nothing more can be read; returns the exception to raise."""
        self.error(where, what)
        return DatasetError(self.report())

    def stop_if_failed(self) -> None:
        """Raise DatasetError if an error was noted."""
        if self._failed:
            raise DatasetError(self.report())

    def report(self, summary: Summary | None = None) -> Report:
        """Return what was found so far, errors first."""
        repeated = [
            _fault("warning", where, what if count == 1 else f"{what} (in {count} episodes)")
            for what, (where, count) in self._repeated.items()
        ]
        ordered = sorted(self._faults + repeated, key=lambda fault: fault.severity != "error")
        return Report(faults=tuple(ordered), summary=summary)


def _fault(severity: Literal["error", "warning"], where: str, what: str) -> Fault:
    return Fault(severity=severity, where=_clip(where), what=_clip(what))


def _clip(text: str) -> str:
    half = _MOST_CHARS // 2 - 2
    return text if len(text) <= _MOST_CHARS else f"{text[:half]} … {text[-half:]}"
