"""The core that a master's settings ask for.

In: settings, and what the shell lends the core. Out: a core, with ids and secrets that are random. Never: a decision.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Mapping

from common.settings import MasterSettings
from services.master.commands import Sources
from services.master.config import CoreConfig
from services.master.core import MasterCore


def make_core(
    settings: MasterSettings,
    sources: Sources,
    now: float,
    counts: Callable[[], Mapping[str, int]] = dict,
    key_is_valid: Callable[[str], bool] = lambda key: True,
) -> MasterCore:
    """Make the core that these settings ask for."""
    config = CoreConfig(
        beat_ms=settings.beat_ms,
        silent_s=settings.silent_s,
        batch_rows=settings.batch_rows,
        batch_wait_s=settings.batch_wait_ms / 1000,
        max_inflight_ops=settings.max_inflight_ops,
        quota_bytes=settings.quota_bytes,
        max_policies=settings.max_policies,
        kills=settings.max_kills,
    )
    prefix, numbers = os.urandom(8).hex(), itertools.count(1)
    return MasterCore(
        config,
        new_id=lambda: f"{prefix}{next(numbers):016x}",
        new_secret=lambda: secrets.token_hex(16),
        sources=sources,
        now=now,
        counts=counts,
        key_is_valid=key_is_valid,
    )
