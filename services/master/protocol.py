"""Which version of the protocol two sides speak with one another.

In: the range that a client or a worker speaks. Out: the newest version that both speak, or a sentence that says which
side has to change. Never: a guess what an unknown version may mean.
"""

from __future__ import annotations

from joynexus.wire import ErrorCode, limits
from services.master.outbox import refuse


def agree(who: str, oldest: int, newest: int) -> int:
    """Return the version to speak with `who`, which speaks `oldest` to `newest`.

    Raises:
        JoyNexusError: `UPGRADE_REQUIRED` if there is none.
    """
    protocol = min(newest, limits.PROTOCOL)
    if protocol >= max(oldest, limits.PROTOCOL_MIN):
        return protocol
    change = (
        f"install a newer {who}"
        if newest < limits.PROTOCOL_MIN
        else f"upgrade the service, or install an older {who}"
        if oldest > limits.PROTOCOL
        else f"a range goes from low to high, so mend the {who}"
    )
    raise refuse(
        ErrorCode.UPGRADE_REQUIRED,
        f"the {who} speaks {_range(oldest, newest)}, the service {_range(limits.PROTOCOL_MIN, limits.PROTOCOL)}: "
        f"{change}",
    )


def _range(oldest: int, newest: int) -> str:
    return f"protocol {oldest}" if oldest == newest else f"protocols {oldest} to {newest}"
