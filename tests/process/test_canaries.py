"""Two tenants on one cluster: what one of them puts in, and what becomes of it, is in nothing that the other receives.

The first tenant writes a word into every place that takes one, and numbers that nobody else has; it trains, evaluates,
acts, serves an environment of its own, and fails in several ways, while a worker is killed. Meanwhile the second one
works on the same roles and asks whatever can be asked. Then all bytes that the second one received are searched.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import pytest

import joynexus
from joynexus import Client, JoyNexusError, SftPolicy, launch
from joynexus.client import _io
from joynexus.contract import Camera, Contract
from joynexus.keyring import Keyring
from joynexus.keys import ClusterFile
from joynexus.local import LocalCluster
from joynexus.specs import OptimizerSpec, PolicySpec, PpoSpec, RlPolicy, RlSpec
from joynexus.wire import ArrayPacker, Buffer, Failure, Message, Packet, decode
from joynexus.wire.front import (
    AcquireLease,
    Act,
    BlobRead,
    ClusterStatus,
    ForwardBackward,
    GetDataset,
    GetJob,
    GetPolicy,
    GetUsage,
    GetVersion,
    Hello,
    ListDatasets,
    ListJobs,
    ListPolicies,
    Ping,
    Status,
    SubmitJob,
    Welcome,
)
from joynexus.wire.messages import FRONT_REQUESTS, kind_of
from services.env.datasets.writer import LeRobotWriter
from tests.process.clusters import running
from tests.process.master_process import Peer
from tests.waiting import meanwhile, until
from tests.wire.samples import sample

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_environment" / "point_mass.py"
BACKBONE = "lite@64"  # loads in a second, which counts where roles are killed
WORD = "cnry"
"""Part of every word of the first tenant."""
TENANT, SFT, RL, LOOP, OWN = (f"{WORD}{what}" for what in ("tenant", "sft", "rl", "loop", "own"))
INSTRUCTION = f"{WORD}instruction fold the towel"
HOSTED_INSTRUCTION, ACT_INSTRUCTION = f"{WORD}hosted push it", f"{WORD}acted wave"
PAYLOAD = f"{WORD}payload"
"""In files that are no data set and no weights."""
NUMBER = 7531.8642
"""In every state of the first tenant."""
CONTRACT = Contract(
    robot=f"{WORD}robot",
    cameras=(Camera(name=f"{WORD}camera", height=32, width=32),),
    state_dim=4,
    action_dim=2,
    state_names=tuple(f"{WORD}state{index}" for index in range(4)),
    action_names=tuple(f"{WORD}action{index}" for index in range(2)),
    control_mode=f"{WORD}mode",
    gripper=f"{WORD}gripper",
    rotation=f"{WORD}rotation",
    rendering=(f"{WORD}=on",),
    rate_hz=10.0,
)
OTHERS = Contract(robot="toy", cameras=(Camera(name="front", height=32, width=32),), state_dim=4, action_dim=2)
PICTURE = np.random.default_rng(11).integers(0, 256, (32, 32, 3), dtype=np.uint8)
HOSTED = f"""
from msgspec.structs import replace
from point_mass import PointMass

class Hosted(PointMass):
    contract = replace(PointMass.contract, robot="{WORD}hostrobot", state_names=("{WORD}x", "{WORD}y", "{WORD}u", "v"))
    instruction = "{HOSTED_INSTRUCTION}"

class Broken(Hosted):
    def step_chunk(self, actions, **how):
        raise ZeroDivisionError("{WORD}exception")
"""
HOST = re.compile(
    r"Traceback \(most recent|File \"|site-packages|\.py\b|(?<![\w.:/~-])/(tmp|home|root|usr|opt|var|proc|etc|work)\b|"
    + re.escape(str(ROOT))
)
"""What only who sits at the service's machine should see."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy host a cluster starts in minutes


@dataclass
class Heard:
    """All that one tenant received, over all its connections."""

    frames: list[bytes] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def take(self, frames: Iterable[Buffer]) -> Packet:
        """Keep a message, and read it."""
        kept = [bytes(frame) for frame in frames]
        self.frames += kept
        packet = decode(kept)
        self.messages.append(packet.message)
        return packet


class Asker(Peer):
    """A tenant without a client library."""

    def __init__(self, cluster: ClusterFile, heard: Heard) -> None:
        super().__init__(cluster)
        self.heard = heard

    def receive(self, *, bulk: bool = False, timeout_s: float = 60.0) -> Packet:
        source = self.bulk if bulk else self.control
        assert source.poll(int(timeout_s * 1000)), "no answer"
        return self.heard.take(source.recv_multipart())


@dataclass(frozen=True)
class Story:
    """What there is to look at afterwards."""

    first: Heard
    second: Heard
    cluster: LocalCluster
    logs: str
    refusals: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("cluster")
    heard: defaultdict[threading.Thread, Heard] = defaultdict(Heard)
    options = launch.Options(backbone=BACKBONE, simulator_processes=2, timeout_s=300, log_level="debug")
    with pytest.MonkeyPatch.context() as patch, running(folder, options) as cluster:
        patch.setattr(_io, "decode", lambda frames: heard[threading.current_thread()].take(frames))
        keyring = Keyring(cluster.keys)
        first, second = keyring.issue(f"{WORD}key", tenant=TENANT), keyring.issue("other", tenant="other")
        with joynexus.connect(first) as a, joynexus.connect(second) as b:
            ours, theirs = heard[a._connection._thread], heard[b._connection._thread]
            refusals: list[str] = []
            with asking(second, theirs), working(b, tmp_path_factory.mktemp("other")):
                tell(a, first, ours, cluster, tmp_path_factory.mktemp(TENANT), refusals)
            ask_everything(second, theirs)
        logs = "\n".join(path.read_text(errors="replace") for path in sorted(cluster.run.rglob("*.log*")))
        yield Story(ours, theirs, cluster, logs, refusals)


# What the first tenant does


def tell(client: Client, key: Path, heard: Heard, cluster: LocalCluster, folder: Path, refusals: list[str]) -> None:
    """Use everything, with a word or a number of one's own wherever one can be."""
    push(client, folder / f"{WORD}dataset", CONTRACT, INSTRUCTION, NUMBER)
    create = SftPolicy(backbone=BACKBONE, chunk=4, seed=3)
    sft = client.sft(policy=SFT, dataset=f"{WORD}dataset", steps=40, batch_size=8, create=create, checkpoint_every=10)
    until(lambda: sft.info().done >= 5, 120)
    kill(cluster, "trainer")
    rl = client.submit(
        RlSpec(
            policy=RL,
            env="metaworld/reach-v3",
            algorithm=PpoSpec(epochs=1, minibatch=16),
            updates=1,
            episodes=4,
            episode_limit=24,
            create=RlPolicy(backbone=BACKBONE, chunk=4, seed=8),
            warmup_episodes=2,
        )
    )
    sft.wait(progress=False, timeout_s=240)
    act(client)
    client.policy(SFT).export(folder / "exported")
    client.evaluate_dataset(policy=SFT, dataset=f"{WORD}dataset", episodes=(0,)).wait(progress=False, timeout_s=120)
    fail(client, key, heard, folder, refusals)
    host(client, key, folder, refusals)
    rl.wait(progress=False, timeout_s=240)
    evaluation = client.evaluate(policy=RL, env="metaworld/reach-v3", episodes=3, episode_limit=24, videos=1)
    evaluation.wait(progress=False, timeout_s=240)
    evaluation.save_videos(folder / "videos")
    client.status()
    client.usage()
    client.jobs()
    client.policies()


def push(client: Client, folder: Path, contract: Contract, instruction: str, number: float) -> None:
    random = np.random.default_rng(len(instruction))
    with LeRobotWriter(folder, 10.0, contract, video=False) as writer:
        for _ in range(3):
            states = random.normal(size=(20, 4)).astype(np.float32)
            states[:, 2] = number
            images = random.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
            writer.add_episode(states, np.tanh(states[:, :2]), {contract.cameras[0].name: images}, instruction)
    info = client.datasets.push(folder.name, folder, progress=False)
    assert info.state == "ready", info.faults


def kill(cluster: LocalCluster, role: str) -> None:
    pid = cluster.running(role)
    os.kill(pid, signal.SIGKILL)
    until(lambda: cluster.running(role) not in (0, pid), 120)


def act(client: Client) -> None:
    state = np.array([0.5, -0.25, NUMBER, NUMBER], np.float32)
    for seed in range(4):
        picture = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        client.policy(SFT).act({f"{WORD}camera": picture}, ACT_INSTRUCTION, state, timeout_s=120)
    client.policy(SFT).act({f"{WORD}camera": PICTURE}, INSTRUCTION, state, timeout_s=120)


def fail(client: Client, key: Path, heard: Heard, folder: Path, refusals: list[str]) -> None:
    """Be refused in as many ways as there are parts of the service."""

    def refused(ask: Callable[[], object]) -> None:
        with pytest.raises(JoyNexusError) as caught:
            ask()
        refusals.append(str(caught.value))

    def op(future: Future[Any]) -> None:
        refused(lambda: future.result(120))

    broken = folder / f"{WORD}broken"
    shutil.copytree(folder / f"{WORD}dataset", broken)
    for number, path in enumerate(sorted(path for path in broken.rglob("*.parquet"))):
        path.write_bytes(f"{PAYLOAD}{number}".encode())
    (broken / f"{WORD}file.parquet").write_bytes(b"PAR1" + PAYLOAD.encode() + b"PAR1")
    with suppress(JoyNexusError):
        info = client.datasets.push(broken.name, broken, progress=False)
        assert info.state == "faulty"
        refusals.extend(fault.what for fault in info.faults)
    refused(lambda: client.policy(f"{WORD}absent").info())
    refused(lambda: client.policy(f"{WORD}absent").act({}, ACT_INSTRUCTION, np.zeros(4, np.float32)))
    missing = np.full(4, np.nan, np.float32)
    refused(lambda: client.policy(SFT).act({f"{WORD}camera": PICTURE}, ACT_INSTRUCTION, missing))
    refused(lambda: client.create_policy(f"{WORD}odd", PolicySpec(backbone=f"{WORD}bone", contract=CONTRACT)))
    for changed in ({"head": f"{WORD}head"}, {"head_config": {f"{WORD}key": f"{WORD}value"}}, {"chunk": 10**6}):
        refused(functools.partial(_created, client, changed))
    refused(lambda: client.evaluate(policy=SFT, env=f"metaworld/{WORD}-v3").wait(progress=False, timeout_s=120))
    refused(lambda: client.sft(policy=f"{WORD}x", dataset=f"{WORD}none", steps=1).wait(progress=False, timeout_s=60))
    blob = client.policy(SFT).version().digest
    with client.create_policy(LOOP, dataset=f"{WORD}dataset", backbone=BACKBONE, chunk=4, seed=5) as policy:
        policy.forward_backward(batch(np.float32(NUMBER))).result(120)
        policy.optim_step().result(120)
        policy.save_state(f"{WORD}saved").result(120)
        op(policy.load_state(f"{WORD}unsaved"))
        policy.forward_backward(batch(np.float32(np.inf)))
        op(policy.optim_step())
        (folder / "weights.safetensors").write_bytes(PAYLOAD.encode() * 9)
        op(policy.load_weights(folder / "weights.safetensors"))
        policy.publish().result(120)
    with Asker(ClusterFile.load(key), heard) as asker:
        asker.ask(Hello(protocol_min=1, protocol_max=1, client=f"{WORD}client"), id=f"{WORD}id")
        for message in (
            SubmitJob(key=f"{WORD}jobkey", spec=RlSpec(policy=f"{WORD}y", env=f"own/{WORD}nowhere", updates=1)),
            AcquireLease(policy=LOOP, holder=f"{WORD}holder"),
            ForwardBackward(policy=LOOP, lease=f"{WORD}lease", seq=1, payload=blake3.blake3(b"absent").hexdigest()),
            BlobRead(digest=blob, offset=0, length=1 << 16),
        ):
            asker.ask(message, bulk=isinstance(message, BlobRead))
        for more in ({"instructions": (ACT_INSTRUCTION * 1000,)}, {"contract": f"{WORD}contract"}, {"version": 77}):
            packer = ArrayPacker()
            state, picture = packer.add(np.zeros((1, 4), np.float32)), packer.add(PICTURE[None])
            fields = {"policy": SFT, "state": state, "images": (picture,), "instructions": (ACT_INSTRUCTION,), **more}
            assert isinstance(asker.ask(Act(**fields), packer.buffers).message, Failure)


def _created(client: Client, changed: dict[str, Any]) -> None:
    """Create a policy that cannot be, or have the trainer find that out."""
    fields = {"backbone": BACKBONE, "contract": CONTRACT, "normalization": "none", "chunk": 4, **changed}
    client.create_policy(f"{WORD}odd{len(str(changed))}", PolicySpec(**fields)).publish().result(120)


def batch(number: np.float32) -> joynexus.Batch:
    return joynexus.Batch(
        state=np.full((4, 4), NUMBER, np.float32),
        action=np.full((4, 4, 2), number, np.float32),
        images=[np.stack([PICTURE] * 4)],
        instructions=INSTRUCTION,
    )


def host(client: Client, key: Path, folder: Path, refusals: list[str]) -> None:
    """Serve environments of one's own: one that works, one that does not."""
    shutil.copy(EXAMPLE, folder)
    (folder / "hosted.py").write_text(HOSTED)
    sys.path.insert(0, str(folder))
    try:
        from hosted import Hosted  # type: ignore[import-not-found]  # just written
    finally:
        sys.path.pop(0)
    spec = PolicySpec(backbone=BACKBONE, contract=Hosted.contract, normalization="none", chunk=2, seed=1)
    with client.create_policy(OWN, spec) as policy:
        policy.publish().result(120)
    with served(key, folder, "hosted:Hosted", f"{WORD}env"):
        client.evaluate(policy=OWN, env=f"own/{WORD}env", episodes=2).wait(progress=False, timeout_s=120)
    with served(key, folder, "hosted:Broken", f"{WORD}brokenenv"):
        job = client.evaluate(policy=OWN, env=f"own/{WORD}brokenenv", episodes=2)
        with pytest.raises(JoyNexusError) as caught:
            job.wait(progress=False, timeout_s=240)
        refusals.append(str(caught.value))


@contextmanager
def served(key: Path, folder: Path, target: str, name: str) -> Iterator[None]:
    command = [sys.executable, "-m", "joynexus", "env", "serve", target, "--config", str(key), "--name", name]
    environment, nowhere = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere
    ) as process:
        try:
            yield
        finally:
            process.kill()


# What the second tenant does meanwhile


@contextmanager
def asking(key: Path, heard: Heard) -> Iterator[None]:
    """Ask again and again how everything is."""

    def ask(done: threading.Event) -> None:
        with Asker(ClusterFile.load(key), heard) as asker:
            while not done.wait(0.1):
                for message in (Status(), ListPolicies(), ListJobs(), ListDatasets(), GetUsage()):
                    asker.ask(message)

    with meanwhile(ask):
        yield


@contextmanager
def working(client: Client, folder: Path) -> Iterator[None]:
    """Train and act on the same roles, until the first tenant is done."""
    push(client, folder / "toy", OTHERS, "follow the rule", 1.0)
    create = SftPolicy(backbone=BACKBONE, chunk=4, seed=4, optimizer=OptimizerSpec(lr=1e-4))
    sft = client.sft(policy="mine", dataset="toy", steps=20, batch_size=8, create=create, publish_initial=True)

    def work(done: threading.Event) -> None:
        with client.create_policy("loop", dataset="toy", backbone=BACKBONE, chunk=4, seed=6) as policy:
            while not done.wait(0.2):  # leaves the first one some of the machine
                policy.forward_backward(dataset="toy", indices=range(8)).result(240)
                policy.optim_step().result(240)
                if not policy.info().versions:
                    policy.publish().result(240)
                picture = np.random.default_rng(5).integers(0, 256, (32, 32, 3), dtype=np.uint8)
                policy.act({"front": picture}, "follow the rule", np.zeros(4, np.float32), timeout_s=240)

    with meanwhile(work):
        yield
    sft.wait(progress=False, timeout_s=240)
    client.policy("mine").export(folder / "exported")
    evaluation = client.evaluate(policy="mine", env="metaworld/reach-v3", episodes=1)
    with pytest.raises(JoyNexusError):
        evaluation.wait(progress=False, timeout_s=240)
    with pytest.raises(JoyNexusError):
        client.sft(policy="none", dataset="none", steps=1).wait(progress=False, timeout_s=60)


def ask_everything(key: Path, heard: Heard) -> None:
    """Say every request there is: about what is one's own, and about what nobody has."""
    with Asker(ClusterFile.load(key), heard) as asker:

        def ask(message: Message, *buffers: Buffer) -> Message:
            return asker.ask(message, buffers, bulk=isinstance(message, BLOBS), timeout_s=120).message

        for type_ in FRONT_REQUESTS:
            ask(sample(kind_of_type(type_)), b"abc")
        for message in (Ping(), Status(), GetUsage(), ListPolicies(), ListJobs(), ListDatasets()):
            ask(message)
        for name in ("mine", "loop", "none", ""):
            ask(GetPolicy(policy=name))
            ask(GetVersion(policy=name))
            ask(GetDataset(dataset=name))
            ask(GetJob(job=name))


BLOBS = tuple(type_ for type_ in FRONT_REQUESTS if type_.__name__.startswith("Blob"))


def kind_of_type(type_: type[Message]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type_.__name__).lower()


# What must not be found


def canaries(story: Story) -> dict[str, bytes]:
    """All that only the first tenant knows: its words, its numbers, and what the service told it alone."""
    found = {WORD: WORD.encode()}
    for number in (NUMBER, float(np.float32(NUMBER))):
        found[f"{number!r} as a number"] = struct.pack(">d", number)
        found[f"{number!r} as text"] = f"{number!r}"[:7].encode()
    found["a state"] = np.full(2, NUMBER, np.float32).tobytes()
    found["a picture"] = PICTURE.tobytes()[:64]
    for message in story.first.messages:
        if not isinstance(message, ClusterStatus | Welcome):  # what all tenants are told of the cluster
            for value in leaves(msgspec.to_builtins(message)):
                if isinstance(value, str):
                    found |= {each: each.encode() for each in re.findall(r"\b[0-9a-f]{16,}\b", value)}
                elif isinstance(value, float) and len(repr(value)) > 12:
                    found[repr(value)] = struct.pack(">d", value)
    for path in features(story):
        found[f"feature {path}"] = path.encode()
    return found


def features(story: Story) -> list[str]:
    """Names of stored features in the first tenant's scope."""
    scope = blake3.blake3(f"tenant:{TENANT}".encode()).hexdigest()[:16]
    return [path.name.split(".")[0] for path in story.cluster.folder.rglob(f"*{scope}*/*") if path.is_file()]


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (*leaves(key), *leaves(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def test_nothing_of_one_tenant_is_in_anything_that_another_receives(story: Story) -> None:
    sought = canaries(story)
    assert len(sought) > 100, "the first tenant was told little"
    heard = b"\0".join(story.second.frames)
    assert {name for name, bytes_ in sought.items() if bytes_ in heard} == set()


def test_the_search_finds_what_is_there(story: Story) -> None:
    """The first tenant itself was told its words and numbers, and the second one has heard of all that is its own."""
    heard = b"\0".join(story.first.frames)
    assert {name for name, bytes_ in canaries(story).items() if bytes_ not in heard} <= {
        "a state", "a picture", f"{NUMBER!r} as a number", *(f"feature {path}" for path in features(story)),
    }  # fmt: skip
    assert features(story)
    answered = {kind_of(message) for message in story.second.messages}
    assert {"policy_info", "job_info", "dataset_info", "version_info", "usage_report", "cluster_status", "actions",
            "blob_data", "failure", "op_result"} <= answered  # fmt: skip


def test_no_secret_instruction_or_payload_is_logged(story: Story) -> None:
    secrets = [
        value
        for path in story.cluster.keys.rglob("*.toml")
        for name, value in tomllib.loads(path.read_text()).items()
        if "secret" in name
    ]
    assert len(secrets) >= 6
    assert SFT in story.logs, "these are not the logs"
    for what in (*secrets, INSTRUCTION, HOSTED_INSTRUCTION, ACT_INSTRUCTION, PAYLOAD, str(NUMBER)[:7]):
        assert what not in story.logs


def test_errors_tell_no_path_and_no_traceback_of_the_service(story: Story) -> None:
    assert len(story.refusals) >= 10
    told = [*story.refusals]
    for message in (*story.first.messages, *story.second.messages):
        told += [value for value in leaves(msgspec.to_builtins(message)) if isinstance(value, str)]
    assert [sentence for sentence in told if HOST.search(sentence) or str(story.cluster.folder) in sentence] == []


@pytest.mark.parametrize(
    "said", ["it is in /tmp/x", 'File "a", line 3', "/usr/lib/python3", "see model.py", "(/proc/1)"]
)
def test_a_path_of_the_host_would_be_seen(said: str) -> None:
    assert HOST.search(said)
