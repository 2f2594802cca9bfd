"""What each request has to pass, and what each answer says to browsers.

In: an ASGI application. Out: the same, behind checks of the Host header and the method. Never: a private page in a
cache, in a frame, or with a script or style that is not a file of ours.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_TO_MACHINES = ("/healthz", "/readyz", "/metrics")
"""Asked by whatever name or address a probe has; they tell nothing about anybody."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'self'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none at all, browsers would hide a form's origin from us too
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """Checks requests and marks answers.

    Args:
        app: what answers.
        hosts: names by which browsers may call it, beside the loopback's. Another name is refused: a page elsewhere
            could have its own name lead here (DNS rebinding), and read what its visitor may see.
        https: browsers reach it by https.
        count: called with each answer's status.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: tuple[str, ...], https: bool, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self._app, self._https, self._count = app, https, count
        self._hosts = frozenset(host.lower() for host in (*hosts, *LOOPBACK))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]

        async def marked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if self._https:
                    headers["strict-transport-security"] = "max-age=31536000"
                self._count(message["status"])
            await send(message)

        app = self._app
        if refusal := self._refusal(path, scope["method"], Headers(scope=scope)):
            app = PlainTextResponse(refusal[1] + "\n", refusal[0])
        await app(scope, receive, marked)

    def _refusal(self, path: str, method: str, headers: Headers) -> tuple[int, str] | None:
        if path not in OPEN_TO_MACHINES and host_of(headers.get("host", "")) not in self._hosts:
            return (
                421,
                "the dashboard does not go by this name: set JOYNEXUS_DASHBOARD_URL, or JOYNEXUS_DASHBOARD_HOSTS",
            )
        if method not in ("GET", "HEAD") and not (method == "POST" and path == "/logout"):
            return 405, "this can only be read"
        return None


def host_of(header: str) -> str:
    """Return a Host header's name without its port, in lower case; empty if it makes no sense."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
    return f"[{name}]" if ":" in name else name


def same_origin(headers: Headers) -> bool:
    """Return whether a form was sent by a page of ours."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == headers.get("host", "")
