"""Which version of the protocol two sides speak with one another.

In: the range that a client or a worker speaks, hellos. Out: the newest version that both speak, or a sentence that says
which side has to change. Never: a guess what an unknown version may mean.
"""

from __future__ import annotations

from collections import OrderedDict

from joynexus.wire import ErrorCode, Failure, JoyNexusError, limits
from joynexus.wire.front import Hello, Ping, Pong, Welcome
from services.master.config import CoreConfig
from services.master.events import BackMessage, FrontMessage, Peer
from services.master.limits import Limits
from services.master.outbox import Outbox, refuse

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


class Greetings:
    """Hellos of clients. Those that have no version in common with the service hear that whatever they ask.

    A client that has lost its connection says hello and then, at once, all that was not answered: to a master that was
    upgraded meanwhile, those may be words of another meaning.
    """

    def __init__(self, outbox: Outbox, config: CoreConfig, tenants: Limits) -> None:
        self._outbox = outbox
        self._config = config
        self._tenants = tenants
        self._refused: OrderedDict[Peer, Failure] = OrderedDict()

    def on_hello(self, asked: FrontMessage, message: Hello) -> None:
        """Welcome a client."""
        self._outbox.answer(
            asked,
            Welcome(
                protocol=self._agree(asked, message),
                server=self._config.server,
                tenant=asked.tenant,
                scope=asked.scope,
                inline_bytes=limits.INLINE_BYTES,
                max_inflight_ops=self._tenants.max_inflight_ops(asked.tenant),
                operator=asked.operator,
            ),
        )

    def on_ping(self, asked: FrontMessage, message: Ping) -> None:
        """Tell a client that the master is there."""
        self._outbox.answer(asked, Pong())

    def check(self, asked: FrontMessage | BackMessage) -> None:
        """Refuse what is no hello on a connection whose hello was refused.

        Raises:
            JoyNexusError: `UPGRADE_REQUIRED`.
        """
        refused = self._refused.get(asked.peer)
        if refused is not None and not isinstance(asked.message, Hello):
            raise JoyNexusError(refused)

    def _agree(self, asked: FrontMessage, hello: Hello) -> int:
        """Return the version to speak on a connection; JoyNexusError as `agree`."""
        self._refused.pop(asked.peer, None)
        try:
            return agree("client", hello.protocol_min, hello.protocol_max)
        except JoyNexusError as error:
            self._refused[asked.peer] = error.failure
            if len(self._refused) > _MOST_MISFITS:
                self._refused.popitem(last=False)
            raise


def _range(oldest: int, newest: int) -> str:
    return f"protocol {oldest}" if oldest == newest else f"protocols {oldest} to {newest}"
