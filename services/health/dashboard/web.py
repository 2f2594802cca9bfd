"""The dashboard's addresses.

    /                     overview            /jobs, /policies      tables: state, kind, tenant, sort, page
    /jobs/TENANT/JOB      one job             /events?page=…        the stream that keeps a page up to date
    /login?code=…         a one-time code     /logout (POST)        the cookie's end
    /healthz /readyz /metrics                 for machines

In: requests with a session in a cookie. Out: pages. Never: a right decided here: a session is handed to the master,
which shows what it may see; a cookie that a script or another site can use.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from common.telemetry import get_logger
from joynexus.wire import ErrorCode, JoyNexusError
from services.health.dashboard.guard import Guard, same_origin
from services.health.dashboard.hub import AwayError, EndedError, GoneError, Hub, Scope
from services.health.dashboard.listing import Query
from services.health.dashboard.metrics import Counts
from services.health.dashboard.rates import Rates
from services.health.dashboard.render import STATIC, Asked, Renderer
from services.health.dashboard.stream import Stream

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as Connection

    from services.health.dashboard.source import Source

log = get_logger(__name__)

STREAMS = 512
"""Streams at once; whoever comes then is told to come again."""
STREAMS_OF_ONE = 16
"""Those of one session."""
LOGINS = 256
"""Codes that are looked at at once. Nobody is counted by its address: behind one proxy all have the same, and whoever
guesses would shut out whoever has a code. A code of 128 bits needs no such lock."""
LOOKS_A_MINUTE, ALL_LOOKS_A_MINUTE = 600, 6000
"""Pages that are opened, by one tenant (or by operators) and by all together: each takes some 10 ms."""

AWAY = "The master does not answer, so there is nothing to show yet: {}."
LATER = {"retry-after": "5"}


class Web:
    """Answers requests.

    Args:
        source: answers for sessions.
        hosts: names by which browsers may call, beside the loopback's.
        https: browsers reach it by https.
        cookie: name of the cookie; different for each dashboard of a host, as cookies know no ports.
        unready: says why it cannot serve; empty if it can.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: Source,
        *,
        hosts: tuple[str, ...] = (),
        https: bool = False,
        cookie: str = "joynexus",
        unready: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hub = Hub(source, clock)
        self.renderer = Renderer()
        self.counts = Counts()
        self._source, self._unready, self._clock = source, unready, clock
        self._https = https
        self._cookie = f"__Host-{cookie}" if https else cookie
        self._looks = Rates(each=LOOKS_A_MINUTE, all=ALL_LOOKS_A_MINUTE)
        self._logins = 0
        self.app: ASGIApp = Guard(self._routes(), hosts=hosts, https=https, count=self.counts.answered)

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._page("overview")),
                Route("/jobs", self._page("jobs")),
                Route("/policies", self._page("policies")),
                Route("/jobs/{tenant}/{job}", self._page("job")),
                Route("/events", self._events),
                Route("/login", self._login),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Mount("/static", _Static(directory=STATIC)),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)],
            exception_handlers={HTTPException: self._http_problem, Exception: self._bug},
        )

    # Pages

    def _page(self, page: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await self._entered(request, lambda session: self._show(request, session, page))

        return answer

    async def _show(self, request: Request, session: str, page: str) -> Response:
        scope = await self._look(session)
        asked = await self._asked(session, page, dict(request.query_params) | request.path_params)
        params = {**vars(asked.query), "page": page, "number": asked.query.page if asked.query.page > 1 else ""}
        if asked.job is not None:
            params |= {"tenant": asked.job.tenant, "job": asked.job.name}
        events = "/events?" + urlencode({name: value for name, value in params.items() if value != ""})
        return HTMLResponse(self.renderer.page(scope, asked, events=events, age_s=self._age(scope)))

    async def _look(self, session: str) -> Scope:
        """Return what a session may see, if its tenant does not open pages too often."""
        scope = await self.hub.enter(session)
        if not self._looks.take(scope.tenant, self._clock()):
            raise HTTPException(429)
        return scope

    async def _asked(self, session: str, page: str, params: dict[str, str]) -> Asked:
        if page != "job":
            return Asked(page, Query.of(params))
        return Asked(page, job=await self.hub.job(session, params.get("tenant", ""), params.get("job", "")))

    async def _events(self, request: Request) -> Response:
        params = dict(request.query_params)
        page, params["page"] = params.get("page", ""), params.get("number", "1")
        if page not in ("overview", "jobs", "policies", "job"):
            raise HTTPException(404)

        async def follow(session: str) -> Response:
            scope = await self._look(session)
            asked = await self._asked(session, page, params)
            if self.hub.watchers >= STREAMS or len(scope.watching.get(session, ())) >= STREAMS_OF_ONE:
                return PlainTextResponse("too many pages are open\n", 503, LATER)
            packed = "gzip" in request.headers.get("accept-encoding", "")
            age_s = functools.partial(self._age, scope)
            stream = Stream(self.hub, self.renderer, session, scope, asked, age_s, gzip=packed)
            return _EventStream(stream, packed=packed)

        return await self._entered(request, follow)

    async def _entered(self, request: Request, show: Callable[[str], Awaitable[Response]]) -> Response:
        """Show something to whoever has a session; say why if that is not possible."""
        session = request.cookies.get(self._cookie, "")[:256]
        if not session:
            return self._door("", 200 if request.url.path == "/" else 403)
        try:
            return await show(session)
        except EndedError:
            if request.url.path == "/events":
                return PlainTextResponse("this session is over\n", 403)  # the page, loaded anew, says why
            answer = self._door("You are no longer in: the key was revoked, or the master was started anew.", 403)
            return self._with_cookie(answer, "", 0)
        except GoneError:
            return self._problem(404, "There is no such job", "Or it is not yours to see.")
        except AwayError as error:
            return self._problem(503, "The cluster does not answer", AWAY.format(error), again=True)

    # In and out

    async def _login(self, request: Request) -> Response:
        code = request.query_params.get("code", "").strip()
        if not code:
            return self._door("")
        if request.method == "HEAD" or "prefetch" in request.headers.get("sec-purpose", ""):
            return self._door("", 503)  # the code is good once: the person who typed it shall have it
        if away := self._unready():
            return self._problem(503, "The cluster does not answer", AWAY.format(away), again=False)
        if self._logins >= LOGINS:
            raise HTTPException(429)
        self._logins += 1
        try:
            viewer = await self._source.redeem(code)
        except JoyNexusError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return self._door("This code is wrong, was used, or is older than a minute. Ask for another one.", 403)
            return self._problem(503, "The cluster does not answer", AWAY.format(error), again=False)
        finally:
            self._logins -= 1
        with suppress(AwayError, EndedError):  # its first page asks again
            await self.hub.enter(viewer.session, vouched=True)
        log.info("viewer_entered", tenant=viewer.tenant, operator=viewer.operator)
        # Not a redirect: a browser that came from another site would follow it without the cookie (SameSite=Strict).
        answer = HTMLResponse(self.renderer.plain("entered.html", title="You are in"))
        return self._with_cookie(answer, viewer.session, int(viewer.valid_s))

    async def _logout(self, request: Request) -> Response:
        if not same_origin(request.headers):
            return self._problem(403, "Not from here", "This form belongs to another page.")
        session = request.cookies.get(self._cookie, "")[:256]
        self.hub.leave(session)
        try:
            await self._source.close(session)
        except JoyNexusError as error:
            log.info("session_not_closed", why=str(error))  # it ends by itself; this browser has forgotten it
        return self._with_cookie(RedirectResponse("/login", 303), "", 0)

    def _with_cookie(self, answer: Response, session: str, valid_s: int) -> Response:
        """Have the browser keep a session; for 0 seconds: forget it."""
        answer.set_cookie(
            self._cookie, session, max_age=valid_s, path="/", secure=self._https, httponly=True, samesite="strict"
        )
        return answer

    # For machines

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        why = self._unready()
        return PlainTextResponse(f"{why or 'ready'}\n", 503 if why else 200)

    async def _metrics(self, request: Request) -> Response:
        text = self.counts.text(
            streams=self.hub.watchers,
            scopes=self.hub.scopes,
            sections=self.renderer.sections_rendered,
            ready=not self._unready(),
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # Inside

    def _age(self, scope: Scope) -> float:
        return max(0.0, self._clock() - scope.at)

    def _door(self, problem: str, status: int = 200) -> HTMLResponse:
        return HTMLResponse(self.renderer.plain("login.html", title="Log in", problem=problem), status)

    def _problem(self, status: int, title: str, problem: str, *, again: bool = False) -> HTMLResponse:
        html = self.renderer.plain("problem.html", title=title, problem=problem, again=again)
        return HTMLResponse(html, status, LATER if status == 503 else None)

    async def _http_problem(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 404:
            return self._problem(404, "There is no such page", f"Nothing is at {quote(request.url.path)[:200]}.")
        if status == 429:
            return self._problem(429, "Too many pages at once", "Wait a moment.", again=True)
        return self._problem(status, "This is not possible", "The request makes no sense here.")

    async def _bug(self, request: Request, error: Exception) -> Response:
        log.error("page_failed", path=request.url.path[:200], exc_info=error)
        return self._problem(500, "The dashboard failed", "It is in its log. The cluster is not touched by it.")


class _EventStream(Response):
    """An answer that goes on until its viewer is gone."""

    def __init__(self, stream: Stream, *, packed: bool) -> None:
        headers = {"x-accel-buffering": "no", "vary": "accept-encoding"}
        super().__init__(media_type="text/event-stream", headers=headers)
        if packed:
            self.headers["content-encoding"] = "gzip"
        self._stream = stream

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await self._stream.run(receive, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Static(StaticFiles):
    """Files whose address holds their digest: kept by browsers for good."""

    async def get_response(self, path: str, scope: Connection) -> Response:
        answer = await super().get_response(path, scope)
        if b"v=" in scope["query_string"]:
            answer.headers["cache-control"] = "public, max-age=31536000, immutable"
        return answer
