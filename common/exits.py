"""How a role ends that cannot start, and whom another start could not help.

In: what is wrong. Out: one sentence on stderr, as the last words of its log, and an exit code. Never: a traceback for
what an operator did or has to do.
"""

from __future__ import annotations

import sys

EXIT_CONFIG = 78
"""Exit code (EX_CONFIG of sysexits.h) when only the operator can help: health says so, and does not try at once."""


def cannot_start(role: str, error: Exception) -> SystemExit:
    """Say why a role cannot start until its operator does something; return what ends it."""
    print(f"{role} cannot start: {error}", file=sys.stderr)
    return SystemExit(EXIT_CONFIG)
