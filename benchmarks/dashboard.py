"""What the dashboard takes with 200 jobs and many viewers, and whether a page that changes every second stays fluid.

In: made-up pictures, another one each second. Out: milliseconds and bytes of each page and of its update; CPU share of
the process by viewers; where there is a Chromium, the gaps between two frames of a page that is kept up to date. Never:
a figure of the master's part: asking it is a message a second for each tenant that is watched.

    python -m benchmarks.dashboard [--quick]
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import sys
import time
from collections.abc import Sequence

from benchmarks import _report
from services.health.dashboard.hub import Hub
from services.health.dashboard.render import SECTIONS, Asked, Renderer
from services.health.dashboard.stream import Stream
from services.health.dashboard.web import Web
from tests.browser.conftest import ARGS, Shown, chromium, missing, serving
from tests.unit.health.dashboard.pictures import AT, FakeSource, cluster

JOBS = 200
GAPS = """
(seconds) => new Promise((done) => {
  const gaps = [], start = performance.now();
  let last = start;
  const frame = (now) => {
    gaps.push(now - last);
    last = now;
    if (now - start < 1000 * seconds) requestAnimationFrame(frame); else done(gaps);
  };
  requestAnimationFrame(frame);
})
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all of it."""
    options = _report.arguments("dashboard", "The dashboard with 200 jobs.", argv)
    rows = asyncio.run(pages(5 if options.quick else 40))
    rows += [asyncio.run(streams(viewers, 5 if options.quick else 20)) for viewers in (1, 100)]
    if missing():
        print(f"frames of a page are left out: {missing()}")
    else:
        rows += frames(5 if options.quick else 20)
    _report.write("dashboard", options, rows)
    return 0


async def pages(repeats: int) -> list[_report.Row]:
    """Render each page, and what of it is sent when everything in it has changed."""
    source, renderer = FakeSource(), Renderer()
    hub = Hub(source)
    rows: list[_report.Row] = []
    for page in ("overview", "jobs", "policies"):
        asked, times, update = Asked(page), [], ""
        for step in range(repeats):
            source.whole = cluster(AT + step, jobs=JOBS)
            scope = await hub.enter("operator")
            scope.show(source.whole, time.monotonic())
            start = time.perf_counter()
            update = "".join(renderer.section(scope, asked, name, age_s=0.0) for name in SECTIONS[page])
            times.append(1000 * (time.perf_counter() - start))
        whole = renderer.page(scope, asked, events="/events", age_s=0.0)
        packed = len(gzip.compress(update.encode()))
        rows.append(
            {
                "table": "rendering",
                "page": page,
                "render_ms": _report.spread(times, 2),
                "page_kb": round(len(whole) / 1000, 1),
                "update_kb": round(len(update) / 1000, 1),
                "update_gzip_kb": round(packed / 1000, 1),
            }
        )
    return rows


async def streams(viewers: int, seconds: int) -> _report.Row:
    """Keep pages of jobs up to date for many viewers of one scope."""
    source, renderer = FakeSource(), Renderer()
    hub = Hub(source)
    source.whole = cluster(jobs=JOBS)
    scope = await hub.enter("operator")
    sent = 0

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, object]) -> None:
        nonlocal sent
        sent += 1

    def stream() -> Stream:
        return Stream(hub, renderer, "operator", scope, Asked("jobs"), lambda: 0.0)

    tasks = [asyncio.create_task(stream().run(receive, send)) for _ in range(viewers)]
    await asyncio.sleep(1.5)
    sent, cpu, start = 0, time.process_time(), time.monotonic()
    for step in range(seconds):
        source.whole = cluster(AT + 1 + step, jobs=JOBS)
        await asyncio.sleep(1.0)
    share = (time.process_time() - cpu) / (time.monotonic() - start)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await hub.close()
    return {"table": "streams", "viewers": viewers, "updates_sent": sent, "cpu_share": round(share, 4)}


def frames(seconds: int) -> list[_report.Row]:
    """Measure gaps between frames of the page of jobs, still and kept up to date."""
    from playwright.sync_api import sync_playwright

    rows: list[_report.Row] = []
    source = FakeSource()
    source.whole = cluster(jobs=JOBS)
    web = Web(source, cookie="bench")
    with serving(web) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGS))
        shown = Shown(url, source, web, browser)
        for changing in (False, True):
            with shown.page(path="/jobs") as page:
                view = source.view
                steps = itertools.count(1)

                async def changed(session: str, steps: itertools.count[int] = steps) -> object:
                    source.whole = cluster(AT + next(steps), jobs=JOBS)
                    return source.whole

                source.view = changed if changing else view  # type: ignore[method-assign,assignment]
                gaps = page.evaluate(GAPS, seconds)[1:]
                source.view = view  # type: ignore[method-assign]
            rows.append(
                {
                    "table": "frames",
                    "page": "changes each second" if changing else "still",
                    "frames": len(gaps),
                    "gap_ms_p50": round(_report.percentile(gaps, 0.5), 1),
                    "gap_ms_p95": round(_report.percentile(gaps, 0.95), 1),
                    "gap_ms_max": round(max(gaps), 1),
                }
            )
        browser.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
