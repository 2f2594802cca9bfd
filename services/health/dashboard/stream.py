"""One viewer's stream of server-sent events: the sections that changed since it was last sent something.

In: a page's sections, rendered for all. Out: events `section` (HTML), `news` (a sentence to be said aloud) and `ended`.
Never: a queue: a viewer that reads slowly gets the newest of what it missed. (One that does not read at all is hung up
on by the web server, see `service`.)
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, MutableMapping
from typing import Any

from services.health.dashboard.hub import Hub, Scope, Watch
from services.health.dashboard.render import SECTIONS, Asked, Renderer

QUIET_S = 15.0
"""Without anything new a comment is sent, so that the connection is not taken for dead."""
RETRY_MS = 2000
"""How long a browser waits before it comes again."""

Receive = Callable[[], Any]
Send = Callable[[MutableMapping[str, Any]], Any]


class Stream:
    """Keeps one page up to date.

    Args:
        hub: whose pictures.
        renderer: makes sections.
        session: who looks.
        scope: what it sees.
        asked: the page.
        age_s: says how old the picture is.
        gzip: pack what is sent. A section that is sent again is mostly what was sent before, so little is left of it.
    """

    def __init__(
        self,
        hub: Hub,
        renderer: Renderer,
        session: str,
        scope: Scope,
        asked: Asked,
        age_s: Callable[[], float],
        *,
        gzip: bool = False,
    ) -> None:
        self._hub, self._renderer, self._session = hub, renderer, session
        self._scope, self._asked, self._age_s = scope, asked, age_s
        self._sent: dict[str, int] = {}
        self._said = scope.said[0]
        self._watch = Watch()
        self._packer = zlib.compressobj(level=4, wbits=zlib.MAX_WBITS | 16) if gzip else None

    async def run(self, receive: Receive, send: Send) -> None:
        """Send until the viewer or its session is gone."""
        left = asyncio.create_task(_left(receive))
        try:
            with self._hub.watching(self._session, self._scope, self._asked.job) as self._watch:
                seen, text = self._scope.shots, f"retry: {RETRY_MS}\n\n{self.events()}"
                while not left.done():
                    if text:
                        body = self._packed(text.encode())
                        message = {"type": "http.response.body", "body": body, "more_body": True}
                        await send(message)
                    if not self.valid:
                        return
                    if self._scope.shots == seen:  # else something came while this was on its way
                        await self._wait(left)
                    text = self.events() if self._scope.shots != seen else ": \n\n"
                    seen = self._scope.shots
        except OSError:
            return  # it is gone
        finally:
            left.cancel()

    @property
    def valid(self) -> bool:
        """Return whether this is still kept up to date; not if its session has left, even if that came again."""
        return self._scope.watches(self._session, self._watch)

    def events(self) -> str:
        """Return what changed since the last call."""
        if not self.valid:
            return event("ended", "")
        texts: list[str] = []
        age_s = self._age_s()
        for name in SECTIONS[self._asked.page]:
            html = self._renderer.section(self._scope, self._asked, name, age_s=age_s)
            if self._sent.get(name) != hash(html):
                self._sent[name] = hash(html)
                texts.append(event("section", html))
        number, sentence = self._scope.said
        if number != self._said:
            self._said = number
            texts.append(event("news", sentence))
        return "".join(texts)

    def _packed(self, body: bytes) -> bytes:
        if self._packer is None:
            return body
        return self._packer.compress(body) + self._packer.flush(zlib.Z_SYNC_FLUSH)  # all of it can be read now

    async def _wait(self, left: asyncio.Task[None]) -> None:
        woken = asyncio.create_task(self._scope.woken(QUIET_S))
        try:
            await asyncio.wait({woken, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()


def event(name: str, text: str) -> str:
    """Return a server-sent event. Source: the HTML standard, 9.2.6 (a line of data for each line of the text)."""
    lines = text.replace("\r", "").split("\n")
    return "".join([f"event: {name}\n", *(f"data: {line}\n" for line in lines), "\n"])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
