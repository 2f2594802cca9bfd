"""A real master in a temporary folder, for benchmarks; workers and clients are stubs beside it.

In: settings. Out: a running master process, its CPU time, keys to dial it. Never: anything left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.runtime import WorkerRuntime
from common.settings import WorkerSettings
from joynexus.client import Client, connect
from joynexus.contract import Camera, Contract
from joynexus.keyring import Addresses, Keyring
from joynexus.launch import free_addresses
from joynexus.specs import PolicySpec
from joynexus.wire import Packet
from joynexus.wire.back import Register, TrainDone, TrainGroup
from joynexus.wire.front import OpResult

STATE, ACTION, CHUNK, SIDE = 7, 7, 10, 224
SPEC = PolicySpec(
    backbone="stub",
    normalization="none",
    chunk=CHUNK,
    contract=Contract(
        robot="stub",
        cameras=(Camera(name="left", height=SIDE, width=SIDE), Camera(name="right", height=SIDE, width=SIDE)),
        state_dim=STATE,
        action_dim=ACTION,
    ),
)
"""Two 224x224 uint8 pictures and a state in, a chunk of 10 x 7 out."""


class Master:
    """A running master.

    Attributes:
        folder: its temporary folder.
        keyring: its keys; tenant `bench` has the key `bench`.
    """

    def __init__(self, folder: Path, module: str, settings: dict[str, object]) -> None:
        self.folder = folder
        self.keyring = Keyring(folder / "keys")
        addresses = free_addresses(folder / "keys")
        self.keyring.prepare(addresses)
        self.keyring.issue("bench", tenant="bench")
        values = {
            **{name: getattr(addresses, name) for name in Addresses.__struct_fields__},
            "keys_dir": folder / "keys",
            "state_dir": folder / "state",
            "log_level": "warning",
            "max_requests_per_s": 1_000_000,  # one tenant finds out how many there can be
            **settings,
        }
        self._command = [sys.executable, "-m", module]
        self._env = {**os.environ, **{f"JOYNEXUS_{name.upper()}": str(value) for name, value in values.items()}}
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.process = subprocess.Popen(self._command, env=self._env, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        """CPU seconds of the master so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self, timeout_s: float = 30.0) -> Client:
        """Connect as tenant `bench`."""
        return connect(self.keyring.cluster_file("bench"), timeout_s=timeout_s)

    def worker(self, role: str) -> WorkerRuntime:
        """Make (not start) the runtime of a stub worker."""
        settings = WorkerSettings(cluster_file=self.keyring.cluster_file(role), cache_dir=self.folder / role)
        return WorkerRuntime(settings, signals=False)


@contextmanager
def running_master(module: str = "services.master", **settings: object) -> Iterator[Master]:
    """Run a master until the block ends."""
    with tempfile.TemporaryDirectory(prefix="jnx-bench") as folder:
        master = Master(Path(folder), module, settings)
        try:
            yield master
        finally:
            master.kill()


def registration(runtime: WorkerRuntime, role: str, **credit: int) -> Register:
    """Make a stub worker's registration."""
    assert role in ("trainer", "inference")
    return Register(
        role=role,  # type: ignore[arg-type]  # one of its literals, as asserted
        incarnation=runtime.incarnation,
        pid=os.getpid(),
        credit=credit,
        backbone="stub",
        backbone_name="stub",
        batch_key="stub",
    )


def train(runtime: WorkerRuntime, packet: Packet) -> None:
    """Answer a training group without training."""
    group = packet.message
    if not isinstance(group, TrainGroup):
        return
    for index, item in enumerate(group.items):
        digest = runtime.blobs.put_bytes(f"{item.policy}-{item.seq}".encode()) if item.kind == "publish" else ""
        checkpoint = runtime.blobs.put_bytes(b"checkpoint") if item.kind == "checkpoint" else ""
        result = OpResult(policy=item.policy, seq=item.seq, metrics={"loss": 0.0}, version=item.version, digest=digest)
        done = TrainDone(
            task=group.task,
            attempt=group.attempt,
            tenant=item.tenant,
            policy=item.policy,
            seq=item.seq,
            kind=item.kind,
            result=result,
            checkpoint=checkpoint,
            nbytes=10,
            step=1,
            last=index == len(group.items) - 1,
        )
        runtime.send(done)


def publish(master: Master, name: str) -> None:
    """Create a policy and publish a version of it, through a stub trainer."""
    with master.worker("trainer") as runtime, master.connect() as client:
        runtime.register(registration(runtime, "trainer", train=1))
        policy = client.create_policy(name, SPEC)
        published = policy.publish()
        while not published.done():
            packet = runtime.next_work(0.1)
            if packet is not None:
                train(runtime, packet)
        published.result()


def observation() -> tuple[list[np.ndarray], np.ndarray]:  # type: ignore[type-arg]  # shapes say more
    """Two pictures and a state, the same every time."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8) for _ in range(2)], rng.random(STATE, np.float32)
