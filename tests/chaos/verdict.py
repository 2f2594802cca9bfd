"""What a case found: which invariants it checked, and which did not hold.

In: blocks of assertions, each under the name of an invariant. Out: a word for the table. Never: a failure that is
swallowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Invariant = Literal["I1", "I2", "I3", "I4", "I5", "I6"]

MEANING: dict[Invariant, str] = {
    "I1": "each acknowledged mutation applied exactly once; numbers of an undisturbed run, bit for bit",
    "I2": "nothing of one tenant reaches another",
    "I3": "every request ends in a reply or at its deadline",
    "I4": "nothing is left: work, slots, connections, files go back to what they were",
    "I5": "other tenants lose no op and go on",
    "I6": "a log line or a report names the cause",
}


class Verdict:
    """Of one case."""

    def __init__(self) -> None:
        self._held: dict[Invariant, bool] = {}

    @contextmanager
    def __call__(self, invariant: Invariant) -> Iterator[None]:
        """Assertions within this block are the check of an invariant."""
        self._held.setdefault(invariant, True)
        try:
            yield
        except BaseException:
            self._held[invariant] = False
            raise

    def __str__(self) -> str:
        return " ".join(name if held else f"{name}:BROKEN" for name, held in sorted(self._held.items()))
