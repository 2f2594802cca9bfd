"""Who was refused what: counted for operators, and logged without a flood of lines.

In: refusals met by one thread. Out: counts by reason; a log line for the 1st, 2nd, 4th, 8th, … of each reason and key.
Never: a secret, or memory that grows with the number of strangers.
"""

from __future__ import annotations

from collections import Counter

from common.telemetry import get_logger
from joynexus.keys import KeyEntry

log = get_logger(__name__)

_MOST_KEYS = 1000
"""Keys with lines of their own."""


class Refusals:
    """What one thread refused.

    Args:
        event: name of its log lines.
        counts: what to count in, by reason; a counter of its own if left out.
    """

    def __init__(self, event: str, counts: Counter[str] | None = None) -> None:
        self._event = event
        self._by_key: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter() if counts is None else counts

    def note(self, reason: str, key: str, why: str) -> None:
        """Count one.

        Args:
            reason: a short word.
            key: whose it was (`name_of`).
            why: in a sentence.
        """
        self.counts[reason] += 1
        if (reason, key) not in self._by_key and len(self._by_key) >= _MOST_KEYS:
            key = "others"
        self._by_key[reason, key] += 1
        count = self._by_key[reason, key]
        if count & (count - 1) == 0:
            log.warning(self._event, reason=reason, key=key, why=why, count=count)


def name_of(entry: KeyEntry | None, public: str) -> str:
    """Name a key for the log: by its name, or by the beginning of its public half if nobody knows it."""
    return entry.name if entry is not None else f"unknown ({public[:8]}…)"


def owner_of(entry: KeyEntry | None, public: str) -> str:
    """Name whose connections and requests count together: a tenant's, or those of a key that is no tenant's."""
    return f"tenant {entry.tenant}" if entry is not None and entry.tenant else name_of(entry, public)
