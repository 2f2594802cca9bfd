"""A master that writes nothing down: what the journal costs is the difference to the real one. For benchmarks only."""

from __future__ import annotations

from collections.abc import Sequence

from common.journal.journal import Journal
from common.journal.records import Record
from services.master.__main__ import main


def _forget(self: Journal, records: Sequence[Record]) -> None:
    """Keep nothing."""


if __name__ == "__main__":
    Journal.append = _forget  # type: ignore[method-assign]  # the whole point
    main()
