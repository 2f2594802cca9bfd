"""Pictures for all viewers: one question a second for each scope that is watched, whoever and how many watch it.

In: sessions, answers of a `Source`. Out: for each scope (a tenant, or the whole cluster) its newest picture, and a
wake-up whenever there is another. Never: a picture for a session that the master has not vouched for, or a queue that
a slow viewer can fill: whoever wakes late sees the newest picture.

A scope's sessions take turns in asking, so that one that the master has ended is noticed within `VOUCHED_S`. While the
master is away the last picture stays, and says how old it is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.telemetry import get_logger
from joynexus.wire import ErrorCode, JoyNexusError
from services.health.dashboard.curves import JobPicture
from services.health.dashboard.news import aloud, news
from services.health.dashboard.rates import Rates

if TYPE_CHECKING:
    from joynexus.wire.back import ClusterView
    from services.health.dashboard.source import Source

log = get_logger(__name__)

PERIOD_S = 1.0
VOUCHED_S = 10.0
FRESH_S = 1.5
"""A picture younger than this is shown to whoever opens a page, without another question."""
NEWS_S = 8.0
"""What is said aloud is said so seldom at most."""
SESSIONS = 4096
STRANGERS_A_MINUTE = 600
"""Questions for sessions that nobody has vouched for yet, all together."""


class EndedError(Exception):
    """The master does not know the session, or no longer."""


class AwayError(Exception):
    """The master does not answer, and there is no older picture to show."""


class GoneError(Exception):
    """There is no such job, as far as the session may know."""


class Watch:
    """One stream that is open."""


class Scope:
    """What the viewers of one tenant (or all operators) see.

    Attributes:
        tenant, operator: whose.
        view: the newest picture.
        at: when it came, by the hub's clock.
        away: why there is no newer one; empty if the master answers.
        sessions: when each was last vouched for.
        watching: streams that are open, by session; one that is not among them any more is over, even if its session
            comes again.
        jobs: pictures of the jobs that are watched, by tenant and name.
        shots: counts wake-ups; what was rendered for one is good until the next.
        rendered: what the renderer keeps until then.
        said: what is said aloud, and its number.
        poll: asks, while somebody watches.
    """

    def __init__(self, view: ClusterView, at: float) -> None:
        self.tenant, self.operator = view.tenant, view.operator
        self.view, self.at = view, at
        self.away = ""
        self.sessions: dict[str, float] = {}
        self.watching: dict[str, set[Watch]] = {}
        self.jobs: dict[tuple[str, str], JobPicture] = {}
        self.shots = 0
        self.rendered: dict[object, str] = {}
        self.said: tuple[int, str] = (0, "")
        self.poll: asyncio.Task[None] | None = None
        self._unsaid: list[str] = []
        self._said_at = -math.inf
        self._woken = asyncio.Event()

    def show(self, view: ClusterView, at: float) -> None:
        """Take in a newer picture."""
        self.tell(news(self.view, view), at)
        self.view, self.at, self.away = view, at, ""
        self.rendered.clear()

    def tell(self, sentences: list[str], at: float) -> None:
        """Say something aloud, now or with what follows soon."""
        self._unsaid += sentences
        if self._unsaid and at >= self._said_at + NEWS_S:
            self.said = (self.said[0] + 1, aloud(self._unsaid))
            self._said_at, self._unsaid = at, []

    def wake(self) -> None:
        """Tell all streams that there is something new."""
        self.shots += 1
        self.rendered.clear()
        self._woken.set()
        self._woken = asyncio.Event()

    async def woken(self, timeout_s: float) -> None:
        """Wait for the next wake-up, or for so long."""
        try:
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        except TimeoutError:
            return

    def watches(self, session: str, watch: Watch) -> bool:
        """Return whether a stream is still one that is kept up to date."""
        return watch in self.watching.get(session, ())

    def due(self) -> list[str]:
        """Return the sessions that ask this time: so many, the longest unheard first, that each has its turn in time.

        Half of `VOUCHED_S` is kept for answers that are late.
        """
        turns = max(1.0, VOUCHED_S / 2 / PERIOD_S)
        watching = sorted(self.watching, key=lambda session: self.sessions[session])
        return watching[: math.ceil(len(watching) / turns)]


class Hub:
    """All scopes, and the sessions that belong to them.

    Args:
        source: answers.
        clock: seconds, monotonic.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._scopes: dict[tuple[str, bool], Scope] = {}
        self._of: OrderedDict[str, Scope] = OrderedDict()  # by session, the one used last at the end
        self._strangers = Rates(each=STRANGERS_A_MINUTE, all=STRANGERS_A_MINUTE)

    @property
    def watchers(self) -> int:
        """Streams that are open."""
        return sum(len(watches) for scope in self._scopes.values() for watches in scope.watching.values())

    @property
    def scopes(self) -> int:
        """Scopes of which there is a picture."""
        return len(self._scopes)

    def knows(self, session: str) -> Scope | None:
        """Return the scope that a session was found to have; None if it has none, or no longer."""
        return self._of.get(session)

    async def enter(self, session: str, *, vouched: bool = False) -> Scope:
        """Return the scope of a session, with a fresh picture if the master answers.

        Args:
            session: whose.
            vouched: the master has just given it out, so it waits in no line of strangers.

        Raises:
            EndedError: if the session is not valid.
            AwayError: if nobody can tell, or there is nothing to show.
        """
        now = self._clock()
        scope = self._of.get(session)
        if scope is not None and scope.sessions[session] > now - VOUCHED_S and scope.at > now - FRESH_S:
            self._of.move_to_end(session)
            return scope
        if scope is None and not vouched and not self._strangers.take("", now):
            raise AwayError("too many sessions at once: try again in a moment")
        await self._ask(session)
        scope = self._of.get(session)
        if scope is None:
            raise EndedError
        return scope

    async def job(self, session: str, tenant: str, job: str) -> JobPicture:
        """Return a job's newest picture.

        Raises:
            EndedError, AwayError: as `enter`.
            GoneError: if the session may see no such job.
        """
        scope = await self.enter(session)
        watched = scope.jobs.get((tenant, job))
        if watched is not None and watched.at > self._clock() - FRESH_S:
            return watched
        picture = watched or JobPicture(tenant, job)
        await self._look_at(session, picture)
        if not picture.known:
            raise GoneError
        return picture

    @contextmanager
    def watching(self, session: str, scope: Scope, job: JobPicture | None = None) -> Iterator[Watch]:
        """Keep a scope's picture, and a job's, fresh while a session looks."""
        watch = Watch()
        if self._of.get(session) is scope:  # else it has left already, and this is over before it began
            scope.watching.setdefault(session, set()).add(watch)
        if job is not None:
            job = scope.jobs.setdefault((job.tenant, job.name), job)
            job.watchers += 1
        if scope.poll is None or scope.poll.done():
            scope.poll = asyncio.create_task(self._poll(scope))
        try:
            yield watch
        finally:
            if scope.watches(session, watch):
                scope.watching[session].remove(watch)
                if not scope.watching[session]:
                    del scope.watching[session]
            if job is not None:
                job.watchers -= 1
                if not job.watchers:
                    scope.jobs.pop((job.tenant, job.name), None)

    def leave(self, session: str) -> None:
        """Forget a session: its streams end."""
        scope = self._of.pop(session, None)
        if scope is None:
            return
        del scope.sessions[session]
        scope.watching.pop(session, None)
        if not scope.sessions:
            self._scopes.pop((scope.tenant, scope.operator), None)
        scope.wake()

    async def close(self) -> None:
        """End all questions."""
        polls = [scope.poll for scope in self._scopes.values() if scope.poll is not None]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    # Inside

    async def _poll(self, scope: Scope) -> None:
        while scope.watching:
            began = self._clock()
            try:
                await self._turn(scope)
            except Exception as error:  # a bug must not leave a page that looks alive and stands still
                log.exception("picture_failed", tenant=scope.tenant)
                scope.away = f"the dashboard failed ({type(error).__name__})"
                scope.wake()
            await asyncio.sleep(max(0.01, PERIOD_S - (self._clock() - began)))

    async def _turn(self, scope: Scope) -> None:
        """Ask for a newer picture of a scope and of the jobs watched in it; wake whoever watches."""
        was = scope.away
        answered = await asyncio.gather(*(self._ask(session) for session in scope.due()))
        if any(answered):
            scope.away = ""
        if bool(scope.away) != bool(was):
            scope.tell(["The master does not answer." if scope.away else "The master answers again."], self._clock())
        if any(answered):
            asking = next(iter(scope.watching), "")
            await asyncio.gather(*(self._try_job(asking, picture) for picture in list(scope.jobs.values())))
        scope.wake()

    async def _ask(self, session: str) -> bool:
        """Have the master vouch for a session, and take in what it shows; return whether it did.

        Raises:
            AwayError: if it does not answer, and never did for this session.
        """
        try:
            view = await self._source.view(session)
        except JoyNexusError as error:
            if error.code is ErrorCode.FORBIDDEN:
                self.leave(session)
                return False
            scope = self._of.get(session)
            if scope is None:  # also one that just left
                raise AwayError(str(error)) from error
            scope.away = str(error)
            scope.rendered.clear()
            return False
        now = self._clock()
        key = (view.tenant, view.operator)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(view, now)
        if self._of.get(session, scope) is not scope:
            self.leave(session)
        if view.at >= scope.view.at or view.server != scope.view.server or scope.away:
            scope.show(view, now)
        scope.sessions[session] = now
        self._of[session] = scope
        self._of.move_to_end(session)
        while len(self._of) > SESSIONS:
            self.leave(next(iter(self._of)))
        return True

    async def _look_at(self, session: str, picture: JobPicture) -> None:
        try:
            await picture.follow(self._source, session, self._clock)
        except JoyNexusError as error:
            if error.code is ErrorCode.FORBIDDEN:
                self.leave(session)
                raise EndedError from error
            if error.code is ErrorCode.NOT_FOUND:
                raise GoneError from error
            if not picture.known:
                raise AwayError(str(error)) from error

    async def _try_job(self, session: str, picture: JobPicture) -> None:
        try:
            await self._look_at(session, picture)
        except (EndedError, GoneError, AwayError):
            return  # its page says what it knew; the next page that is opened says what there is now
