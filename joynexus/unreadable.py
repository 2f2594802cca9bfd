"""Which errors a decoder raises over bytes that are not what they should be.

In: nothing. Out: `UNREADABLE`, for the `except` around a decoder. Never: an error that says something else.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""The last over values nested without end, also in a field that is not looked at."""
