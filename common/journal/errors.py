"""What goes wrong with a journal.

In: a place and a reason. Out: exceptions with a sentence for an operator. Never: a secret of its address.
"""

from __future__ import annotations


class JournalError(OSError):
    """It could not be written or read; the message says why. Nothing of the batch to be written was kept."""


class JournalDamagedError(ValueError):
    """It does not hold what was written to it; the message names the place and what to do about it.

    Args:
        name: what people call the journal: its path, or its address without a password.
        how: the place and what is wrong with it, in a clause.
        remedy: what to do, in a clause.
    """

    def __init__(self, name: object, how: str, remedy: str) -> None:
        self.how = how
        super().__init__(f"the journal {name} is damaged ({remedy}): {how}")


class JournalTakenError(RuntimeError):
    """Another master has opened this journal since: whoever hears that must end, and answer nobody."""
