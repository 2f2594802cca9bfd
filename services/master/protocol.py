"""Which version of the protocol two sides speak with one another.

In: the range that a client or a worker speaks. Out: the newest version that both speak, or a sentence that says which
side has to change. Never: a guess what an unknown version may mean.
"""

from __future__ import annotations

from collections import OrderedDict

from joynexus.wire import ErrorCode, Failure, JoyNexusError, limits
from joynexus.wire.front import Hello
from services.master.events import BackMessage, FrontMessage, Peer
from services.master.outbox import refuse

_MOST_MISFITS = 10_000


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


class Misfits:
    """Connections of clients that have no version in common with the service: they hear that whatever they ask.

    A client that has lost its connection says hello and then, at once, all that was not answered: to a master that was
    upgraded meanwhile, those may be words of another meaning.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[Peer, Failure] = OrderedDict()

    def agree(self, asked: FrontMessage, hello: Hello) -> int:
        """Return the version to speak on a connection; JoyNexusError as `agree`."""
        self._refused.pop(asked.peer, None)
        try:
            return agree("client", hello.protocol_min, hello.protocol_max)
        except JoyNexusError as error:
            self._refused[asked.peer] = error.failure
            if len(self._refused) > _MOST_MISFITS:
                self._refused.popitem(last=False)
            raise

    def check(self, asked: FrontMessage | BackMessage) -> None:
        """Refuse what is no hello on a connection whose hello was refused.

        Raises:
            JoyNexusError: `UPGRADE_REQUIRED`.
        """
        refused = self._refused.get(asked.peer)
        if refused is not None and not isinstance(asked.message, Hello):
            raise JoyNexusError(refused)


def _range(oldest: int, newest: int) -> str:
    return f"protocol {oldest}" if oldest == newest else f"protocols {oldest} to {newest}"
