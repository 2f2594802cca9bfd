"""Base of all messages."""

from __future__ import annotations

import msgspec


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: map-encoded, unknown fields skipped, so that a newer side may add fields with defaults."""
