"""Pictures of the dashboard for the documents: a real cluster, four tenants at work at the same time.

In: nothing. Out: PNG files in docs/images. Never: a picture of made-up figures; what they show is what this run did.

    python -m tests.browser.screenshots        or: make screenshots
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import joynexus
from joynexus import launch
from joynexus.cli._dashboard import address_of
from joynexus.contract import Camera
from joynexus.keyring import Keyring
from joynexus.local import LocalCluster
from joynexus.specs import (
    EvaluateSpec,
    ExplorationSpec,
    JobSpec,
    OptimizerSpec,
    PipelineSpec,
    PpoSpec,
    RlPolicy,
    RlSpec,
    SftPolicy,
    SftSpec,
)
from joynexus.wire.front import JobInfo
from services.env.producers.demos import write_demonstrations
from tests.browser.conftest import ARGS, chromium, missing

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
BACKBONE = "lite@64"
REACH, BUTTON = "metaworld/reach-v3", "metaworld/button-press-topdown-v3"
CAMERA = Camera(name="corner2", height=64, width=64, rotation_deg=180)
PATIENCE_S = 900.0
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def jobs() -> dict[str, JobSpec]:
    """Each tenant's job."""

    def imitation(policy: str, steps: int, head: str) -> SftSpec:
        create = SftPolicy(backbone=BACKBONE, head=head, chunk=8, optimizer=OptimizerSpec(lr=1e-3, warmup_steps=50))
        return SftSpec(policy=policy, dataset="button", steps=steps, batch_size=32, create=create)

    def learning(policy: str, env: str) -> RlSpec:
        return RlSpec(
            policy=policy,
            env=env,
            algorithm=PpoSpec(epochs=4, minibatch=64),
            updates=200,
            episodes=8,
            reward_scale=0.1,
            episode_limit=80,
            exploration=ExplorationSpec(std=0.5),
            create=RlPolicy(backbone=BACKBONE, head="oft", chunk=8, cameras=(CAMERA,)),
        )

    return {
        "arm-lab": imitation("button-press", 4000, "groot"),
        "kitchen": learning("reach", REACH),
        "warehouse": learning("button-press", BUTTON),
        "wheels": PipelineSpec(
            policy="button-press",
            stages=(
                imitation("button-press", 150, "oft"),
                EvaluateSpec(policy="button-press", env=BUTTON, episodes=2000, episode_limit=80),
            ),
        ),
    }


def main() -> int:
    """Take them; return the exit code."""
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore", module="metaworld")
    with tempfile.TemporaryDirectory(prefix="jnx-shots") as name, ExitStack() as stack:
        folder = Path(name)
        write_demonstrations(folder / "data", BUTTON, 12)
        options = launch.Options(backbone=BACKBONE, simulator_processes=2, env_workers=2, timeout_s=600)
        cluster = launch.up(folder / "cluster", options, print)
        stack.callback(launch.down, cluster.folder)
        running: dict[str, Callable[[], JobInfo]] = {}
        for tenant, spec in jobs().items():
            client = stack.enter_context(joynexus.connect(Keyring(cluster.keys).issue(tenant, tenant=tenant)))
            if tenant in ("arm-lab", "wheels"):
                client.datasets.push("button", folder / "data")
            running[tenant] = client.submit(spec).info
        until(lambda: running["kitchen"]().done >= 3 and running["warehouse"]().done >= 2)
        os.kill(cluster.running("env-2"), signal.SIGKILL)  # so that there is a restart, with its reason
        until(lambda: running["kitchen"]().done >= 4 and len(running["arm-lab"]().losses) >= 300)
        shoot(cluster, {tenant: ask().job for tenant, ask in running.items()})
    return 0


def until(condition: Callable[[], bool]) -> None:
    """Wait for the work to be so far."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the work did not get so far in time")
        time.sleep(0.5)


def shoot(cluster: LocalCluster, names: dict[str, str]) -> None:
    """Take the pictures, as the operator and as one tenant."""
    from playwright.sync_api import sync_playwright

    def enter(file: Path) -> str:
        with joynexus.connect(file) as client:
            return address_of(client.open_dashboard())

    IMAGES.mkdir(exist_ok=True)
    loss, tenant = f"/jobs/arm-lab/{names['arm-lab']}", Keyring(cluster.keys).cluster_file("arm-lab")
    views = (
        ("overview-dark", cluster.client_file, "/", WIDE, "dark"),
        ("overview-phone", cluster.client_file, "/", PHONE, "dark"),
        ("job-loss", tenant, loss, WIDE, "light"),
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGS))
        for name, file, path, size, scheme in views:
            context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]  # one of two
            page = context.new_page()
            address = enter(file)
            page.goto(address)
            page.wait_for_url(address.partition("/login")[0] + "/")
            page.goto(address.partition("/login")[0] + path)
            page.wait_for_function("() => stream?.readyState === EventSource.OPEN")
            page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
            context.close()
            _shrink(IMAGES / f"{name}.png")
        browser.close()


def _shrink(file: Path) -> None:
    """Leave out what is far below, and colours that nobody sees."""
    from PIL import Image

    with Image.open(file) as image:
        shown = image.convert("RGB").crop((0, 0, image.width, min(image.height, max(1500, 2 * image.width))))
    shown.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
