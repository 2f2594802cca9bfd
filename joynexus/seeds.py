"""Seeds made from seeds: how everything that is drawn is derived.

In: what a draw may depend on, in a fixed order. Out: a seed. Never: a generator, a clock, or torch: the env service and
tenants derive seeds too.
"""

from __future__ import annotations

import blake3
import msgspec


def derived_seed(*parts: int | str) -> int:
    """Mix parts into a seed from 0 to 2**63 - 1; other parts, or the same in another order, give another one."""
    digest: bytes = blake3.blake3(msgspec.msgpack.encode(parts)).digest(8)
    return int.from_bytes(digest, "little") >> 1
