"""Who looks at the dashboard: codes that let somebody in once, and the sessions of those who are in.

In: requests of tenants for a code, codes and sessions that the dashboard hands on. Out: whose work may be seen. Never:
a session that outlives its key or the master, a code that is good twice, or as many of either as somebody likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from joynexus.wire import ErrorCode
from joynexus.wire.back import BeatAck, CloseSession, RedeemCode, Viewer
from joynexus.wire.front import DashboardCode, OpenDashboard
from services.master.events import BackMessage, FrontMessage
from services.master.outbox import Outbox, refuse
from services.master.roster import Roster

CODE_S = 60.0
SESSION_S = 12 * 3600.0
_CODES, _SESSIONS = 16, 64
"""Of one tenant; with one more, its oldest one ends."""


class Pass(msgspec.Struct, frozen=True):
    """What a code or a session is good for, and until when.

    Attributes:
        key: public half of the key that asked for it.
    """

    tenant: str
    operator: bool
    key: str
    until: float


class Viewers:
    """All codes and sessions.

    Args:
        new_secret: gives words that nobody can guess.
        key_is_valid: tells whether a key (by its public half) has been neither revoked nor replaced.
    """

    def __init__(
        self,
        outbox: Outbox,
        roster: Roster,
        new_secret: Callable[[], str],
        key_is_valid: Callable[[str], bool],
    ) -> None:
        self._outbox = outbox
        self._roster = roster
        self._new_secret = new_secret
        self._key_is_valid = key_is_valid
        self._codes: OrderedDict[str, Pass] = OrderedDict()
        self._sessions: OrderedDict[str, Pass] = OrderedDict()

    # Messages

    def on_open(self, asked: FrontMessage, message: OpenDashboard) -> None:
        """Give a tenant a code."""
        code = self._new_secret()
        seen = Pass(asked.tenant, asked.operator, asked.key, self._outbox.now + CODE_S)
        self._add(self._codes, code, seen, most=_CODES)
        self._outbox.answer(asked, DashboardCode(code=code, url=self._url(), valid_s=CODE_S))

    def on_redeem(self, said: BackMessage, message: RedeemCode) -> None:
        """Let in whoever has a code."""
        self._roster.of(said)
        seen = self._valid(self._codes, message.code)
        if seen is None:
            raise refuse(ErrorCode.NOT_FOUND, "this code was used or is too old: run `joynexus dashboard` again")
        del self._codes[message.code]
        session = self._new_secret()
        self._add(
            self._sessions, session, msgspec.structs.replace(seen, until=self._outbox.now + SESSION_S), most=_SESSIONS
        )
        self._outbox.log("info", "dashboard_opened", tenant=seen.tenant, operator=seen.operator)
        viewer = Viewer(session=session, tenant=seen.tenant, operator=seen.operator, valid_s=SESSION_S)
        self._outbox.answer(said, viewer)

    def on_close(self, said: BackMessage, message: CloseSession) -> None:
        """End a session."""
        self._roster.of(said)
        self._sessions.pop(message.session, None)
        self._outbox.answer(said, BeatAck())

    # For other parts

    def of(self, session: str) -> Pass:
        """Return what a session may see.

        Raises:
            JoyNexusError: `FORBIDDEN`: there is no such session (any more).
        """
        seen = self._valid(self._sessions, session)
        if seen is None:
            raise refuse(ErrorCode.FORBIDDEN, "this session is over: run `joynexus dashboard` again")
        return seen

    # Inside

    def _valid(self, passes: OrderedDict[str, Pass], word: str) -> Pass | None:
        seen = passes.get(word)
        if seen is None:
            return None
        if seen.until <= self._outbox.now or not self._key_is_valid(seen.key):
            del passes[word]
            return None
        return seen

    def _add(self, passes: OrderedDict[str, Pass], word: str, seen: Pass, *, most: int) -> None:
        """Add one; what is over goes, and the oldest of a tenant that has too many."""
        while passes and next(iter(passes.values())).until <= self._outbox.now:  # all last equally long
            passes.popitem(last=False)
        mine = [word for word, other in passes.items() if other.tenant == seen.tenant]
        for old in mine[: len(mine) - most + 1]:
            del passes[old]
        passes[word] = seen

    def _url(self) -> str:
        """Return where the dashboard is, as it says itself; empty if there is none."""
        urls = (worker.register.detail.get("url", "") for worker in self._roster.living("dashboard"))
        return next(filter(None, urls), "")
