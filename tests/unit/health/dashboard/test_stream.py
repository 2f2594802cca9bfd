"""A viewer is sent what changed, the newest of it, and no more than it reads."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import pytest

from joynexus.wire import ErrorCode
from services.health.dashboard import hub as hub_module
from services.health.dashboard import stream as stream_module
from services.health.dashboard.hub import Hub, Scope
from services.health.dashboard.listing import Query
from services.health.dashboard.render import SECTIONS, Asked, Renderer
from services.health.dashboard.stream import Stream, event
from tests.unit.health.dashboard.pictures import AT, FakeSource, cluster, refused, sft

PATIENCE_S = 20.0


class Viewer:
    """The other end of a stream; `reads` says whether it takes what comes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        self.texts.append(message["body"].decode())

    async def until(self, text: str, *, after: int = 0) -> str:
        async def wait() -> str:
            while text not in (sent := "".join(self.texts[after:])):
                await asyncio.sleep(0.001)
            return sent

        return await asyncio.wait_for(wait(), PATIENCE_S)


Setting = tuple[Hub, FakeSource, Renderer]


def run(test: Callable[[Setting], Awaitable[None]]) -> None:
    async def main() -> None:
        source = FakeSource()
        hub = Hub(source)
        try:
            await test((hub, source, Renderer()))
        finally:
            await hub.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD_S", 0.001)
    monkeypatch.setattr(hub_module, "NEWS_S", 0.0)


async def watch(setting: Setting, session: str, asked: Asked) -> tuple[Viewer, asyncio.Task[None], Scope]:
    hub, _, renderer = setting
    scope = await hub.enter(session)
    viewer = Viewer()
    stream = Stream(hub, renderer, session, scope, asked, lambda: 0.0)
    return viewer, asyncio.create_task(stream.run(viewer.receive, viewer.send)), scope


def test_all_sections_come_first_and_then_only_what_changed() -> None:
    async def test(setting: Setting) -> None:
        _, source, _ = setting
        viewer, task, scope = await watch(setting, "operator", Asked("overview"))
        first = await viewer.until('id="s-recent"')
        assert first.count("event: section") == len(SECTIONS["overview"])
        sent, shots = len(viewer.texts), scope.shots
        recent = (msgspec.structs.replace(source.whole.recent[0], text="something new"),)
        source.whole = msgspec.structs.replace(source.whole, at=AT + 1, recent=recent)
        later = await viewer.until("something new", after=sent)
        assert 'id="s-roles"' not in later
        assert 'id="s-queues"' not in later
        assert scope.shots > shots
        viewer.left.set()
        await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_loss_that_falls_is_sent_to_who_looks_at_the_job() -> None:
    async def test(setting: Setting) -> None:
        hub, source, _ = setting
        picture = await hub.job("arm", "arm-lab", "job-1000")
        viewer, task, _ = await watch(setting, "arm", Asked("job", job=picture))
        await viewer.until("700 / 2,000 steps")
        source.jobs["arm-lab", "job-1000"] = sft(812)
        await viewer.until("812 / 2,000 steps")
        viewer.left.set()
        await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_section_is_rendered_once_for_all_who_see_it() -> None:
    async def test(setting: Setting) -> None:
        _, source, renderer = setting
        viewers = [await watch(setting, "operator", Asked("overview")) for _ in range(30)]
        for viewer, _, _ in viewers:
            await viewer.until('id="s-recent"')
        scope = viewers[0][2]
        shots, rendered = scope.shots, renderer.sections_rendered
        source.whole = cluster(AT + 5)
        for viewer, _, _ in viewers:
            await viewer.until("20 min", after=1)
        turns = scope.shots - shots + 1
        assert renderer.sections_rendered - rendered <= turns * len(SECTIONS["overview"])
        for viewer, task, _ in viewers:
            viewer.left.set()
            await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_viewers_with_other_filters_have_their_own_rows_and_share_the_rest() -> None:
    async def test(setting: Setting) -> None:
        failed, failed_task, _ = await watch(setting, "operator", Asked("jobs", Query(state="failed")))
        waiting, waiting_task, _ = await watch(setting, "operator", Asked("jobs", Query(state="waiting")))
        assert "it waits for an env worker" not in await failed.until("no episode that can be read")
        assert "no episode that can be read" not in await waiting.until("it waits for an env worker")
        for viewer, task in ((failed, failed_task), (waiting, waiting_task)):
            viewer.left.set()
            await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_slow_viewer_gets_the_newest_of_what_it_missed_and_holds_up_nobody() -> None:
    async def test(setting: Setting) -> None:
        _, source, _ = setting
        slow, slow_task, scope = await watch(setting, "operator", Asked("jobs"))
        quick, quick_task, _ = await watch(setting, "operator", Asked("jobs"))
        await slow.until('id="s-jobs"')
        slow.reads.clear()
        for step in range(1, 6):
            source.whole = msgspec.structs.replace(cluster(AT + step), jobs_total=10_000 + step)
            await quick.until(f"10,00{step}")
        sent = len(slow.texts)
        slow.reads.set()
        missed = await slow.until("10,005", after=sent)
        assert missed.count("event: section") <= 2  # what it was being sent when it stopped reading, and the newest
        for viewer, task in ((slow, slow_task), (quick, quick_task)):
            viewer.left.set()
            await asyncio.wait_for(task, PATIENCE_S)
        assert not scope.watching

    run(test)


def test_session_that_ends_is_told_and_gets_nothing_more() -> None:
    async def test(setting: Setting) -> None:
        _, source, _ = setting
        viewer, task, _ = await watch(setting, "arm", Asked("overview"))
        await viewer.until('id="s-recent"')
        del source.sessions["arm"]
        sent = len(viewer.texts)
        await asyncio.wait_for(task, PATIENCE_S)
        assert "event: ended" in "".join(viewer.texts[sent:])

    run(test)


def test_absence_of_the_master_is_a_section_like_any_other() -> None:
    async def test(setting: Setting) -> None:
        _, source, _ = setting
        viewer, task, _ = await watch(setting, "operator", Asked("overview"))
        await viewer.until('id="s-recent"')
        source.failing = refused(ErrorCode.DEADLINE, "no answer")
        text = await viewer.until("The master does not answer.</strong>")
        assert "event: news\ndata: The master does not answer." in text
        sent = len(viewer.texts)
        source.failing = None
        await viewer.until("The master answers again.", after=sent)
        viewer.left.set()
        await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_quiet_stream_is_kept_open_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "QUIET_S", 0.01)
    monkeypatch.setattr(hub_module, "PERIOD_S", 1000.0)

    async def test(setting: Setting) -> None:
        viewer, task, _ = await watch(setting, "operator", Asked("overview"))
        await viewer.until(": \n\n")
        viewer.left.set()
        await asyncio.wait_for(task, PATIENCE_S)

    run(test)


def test_packed_stream_can_be_read_as_it_comes_and_what_comes_again_takes_little() -> None:
    async def test(setting: Setting) -> None:
        hub, source, renderer = setting
        source.whole = cluster(jobs=200)
        scope = await hub.enter("operator")
        stream = Stream(hub, renderer, "operator", scope, Asked("jobs"), lambda: 0.0, gzip=True)
        reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        sizes: list[tuple[int, int]] = []
        texts: list[str] = []
        left = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            text = reader.decompress(message["body"]).decode()
            sizes.append((len(message["body"]), len(text)))
            texts.append(text)
            source.whole = msgspec.structs.replace(cluster(AT + len(texts), jobs=200), jobs_total=200 + len(texts))

        task = asyncio.create_task(stream.run(receive, send))
        async with asyncio.timeout(PATIENCE_S):
            while sum("s-jobs" in text for text in texts) < 4:
                await asyncio.sleep(0.001)
        left.set()
        await asyncio.wait_for(task, PATIENCE_S)
        assert all(text.endswith("\n\n") for text in texts)  # whole events each time
        packed, plain = sizes[-1]
        assert packed < plain / 10

    run(test)


def test_event_of_several_lines_is_one_event() -> None:
    assert event("section", "<p>\na\r\n</p>") == "event: section\ndata: <p>\ndata: a\ndata: </p>\n\n"
