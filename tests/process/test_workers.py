"""Trainer and inference as real processes on encrypted sockets, with the real `lite` backbone."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.exits import EXIT_CONFIG
from common.settings import InferenceSettings, TrainerSettings, WorkerSettings
from joynexus.vla.exported import export_policy
from joynexus.wire import rebuild
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import (
    OpenSlot,
    PredictDone,
    PredictGroup,
    PredictItem,
    SlotFailed,
    TrainDone,
    WeightsApplied,
    WeightsOffer,
    WeightsRefused,
)
from joynexus.wire.front import Act
from tests.process.fake_master import FakeMaster
from tests.unit.workers import Arrays, Group, opening, small_dataset

pytestmark = pytest.mark.slow

STEPS = 6
_tasks = itertools.count(2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted weights, shared by the processes of this module as by the roles of a host."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def process(
    master: FakeMaster, kind: type[WorkerSettings], role: str, cache: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A role in a process of its own; killed at the end if it still lives."""
    settings = master.settings(kind, role)
    registered = len(master.registers)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    environment |= {
        "JOYNEXUS_CLUSTER_FILE": str(settings.cluster_file),
        "JOYNEXUS_STATE_DIR": str(settings.state_dir),
        "JOYNEXUS_CACHE_DIR": str(cache),
    }
    child = subprocess.Popen([sys.executable, "-m", f"services.{role}"], env=environment, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(master.registers) == registered:
            assert child.poll() is None, f"the {role} ended with {child.returncode}"
            assert time.monotonic() < deadline, f"the {role} did not register in time"
            time.sleep(0.02)
        yield child
    finally:
        child.kill()
        child.wait(20)


def ops(manifest: str) -> Group:
    group = Group()
    for seq in range(1, STEPS + 1):
        group.steps("arm", seq, [seq, seq + 3, 2 * seq], manifest)
    group.train("arm", STEPS + 1, Arrays(5))
    return group.op("arm", STEPS + 2, "publish", version=1).op("arm", STEPS + 2, "checkpoint")


def part(group: Group, first: int, last: int, *openings: OpenSlot) -> Group:
    """Ops `first` to `last` (a checkpoint comes with the last)."""
    cut = Group(*openings)
    cut.items, cut.buffers = [item for item in group.items if first <= item.seq <= last], group.buffers
    return cut


def lite(slot: OpenSlot) -> OpenSlot:
    return msgspec.structs.replace(slot, spec=msgspec.structs.replace(slot.spec, backbone="lite"))


def train(master: FakeMaster, group: Group) -> list[TrainDone]:
    """Give a group and collect its answers."""
    master.give(group.message(f"t{next(_tasks)}"), group.buffers)
    answers: list[TrainDone] = []
    while not answers or not answers[-1].last:
        answer = master.expect(TrainDone, timeout_s=60).message
        assert isinstance(answer, TrainDone)
        assert answer.result.error is None, answer
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMaster]:
    with FakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def group(master: FakeMaster) -> Group:
    return ops(small_dataset(master.store))


@pytest.fixture(scope="module")
def undisturbed(master: FakeMaster, group: Group, cache: Path) -> list[TrainDone]:
    """What a trainer answers that nobody kills; before that, it survives a slot that it cannot open."""
    with process(master, TrainerSettings, "trainer", cache) as child:
        register = master.registers[-1]
        assert (register.role, register.credit, register.backbone_name) == ("trainer", {"train": 2}, "lite")
        assert register.detail["numerics"].startswith(("exact", "not exact"))
        lost = Group(lite(opening("arm", checkpoint="0" * 64, applied_seq=3))).train("arm", 4, Arrays(1))
        master.give(lost.message(f"t{next(_tasks)}"), lost.buffers)
        failed = master.expect(SlotFailed).message
        assert isinstance(failed, SlotFailed)
        assert failed.last
        assert "cannot be opened now" in failed.error.message
        answers = train(master, part(group, 1, STEPS + 2, lite(opening("arm"))))
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    return answers


def test_a_trainer_killed_in_its_work_is_replaced_and_every_bit_is_the_same(
    master: FakeMaster, group: Group, undisturbed: list[TrainDone], cache: Path
) -> None:
    with process(master, TrainerSettings, "trainer", cache) as child:
        half = part(group, 1, 3, lite(opening("arm"))).op("arm", 3, "checkpoint")
        saved = train(master, half)[-1]
        train(master, part(group, 4, 5))
        child.kill()
    with process(master, TrainerSettings, "trainer", cache):
        again = lite(opening("arm", checkpoint=saved.checkpoint, applied_seq=3))
        replayed = train(master, part(group, 4, STEPS + 2, again))
    assert [done.result for done in replayed] == [done.result for done in undisturbed[3:]]
    assert replayed[-1].checkpoint == undisturbed[-1].checkpoint
    # Features outlive processes: nobody forwards a picture that was forwarded before.
    assert sum(done.backbone_forwards for done in undisturbed) > 0
    assert sum(done.backbone_forwards for done in replayed) == 0


def act(arrays: Arrays) -> tuple[bytes, list[Buffer]]:
    packer = ArrayPacker()
    message = Act(
        policy="arm",
        state=packer.add(arrays.state),
        images=tuple(packer.add(image) for image in arrays.images),
        instructions=tuple(arrays.instructions),
    )
    return msgspec.msgpack.encode(message), packer.buffers


def predict(master: FakeMaster, digest: str, requests: Sequence[Arrays]) -> list[np.ndarray]:
    items, buffers = [], []
    for number, arrays in enumerate(requests):
        body, own = act(arrays)
        items.append(
            PredictItem(
                request=f"r{number}",
                tenant="of-arm",
                policy="arm",
                version=1,
                digest=digest,
                act=body,
                first_buffer=len(buffers),
                buffers=len(own),
            )
        )
        buffers += own
    master.give(PredictGroup(task=f"p{next(_tasks)}", attempt=1, items=tuple(items)), buffers)
    packet = master.expect(PredictDone, timeout_s=60)
    assert isinstance(packet.message, PredictDone)
    answers = []
    for answer in packet.message.items:
        assert answer.error is None, answer
        assert answer.version == 1
        assert answer.actions is not None
        answers.append(rebuild(answer.actions, packet.buffers).copy())
    return answers


EXPORTED = """
import sys
from joynexus.vla.exported import load_policy
from pathlib import Path
policy = load_policy(sys.argv[1], cache_dir=Path(sys.argv[2]))
import numpy as np
given = np.load(sys.argv[3])
actions = policy.act([given["image"]], str(given["instruction"]), given["state"])
np.savez(sys.argv[4], actions=actions, bit_equal=policy.numerics.bit_equal, reason=policy.numerics.reason)
"""


def test_a_served_version_acts_as_its_export_does_without_the_cluster(
    master: FakeMaster, undisturbed: list[TrainDone], tmp_path: Path, cache: Path
) -> None:
    requests = [Arrays(seed, rows=1) for seed in range(3)]
    digest = undisturbed[-2].result.digest
    with process(master, InferenceSettings, "inference", cache) as child:
        bad = WeightsOffer(tenant="of-arm", policy="arm", version=2, digest="0" * 64, nbytes=1)
        master.give(bad)
        assert "version 2 cannot be fetched now" in master.expect(WeightsRefused).message.error.message
        master.give(msgspec.structs.replace(bad, version=1, digest=digest))
        assert master.expect(WeightsApplied).message.version == 1
        served = predict(master, digest, requests)
        alone = [predict(master, digest, [request])[0] for request in requests]
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    export_policy(master.store.path(digest), tmp_path / "exported")
    for mine, theirs in zip(served, alone, strict=True):
        assert np.array_equal(mine, theirs)
    given, result = tmp_path / "given.npz", tmp_path / "result.npz"
    first = requests[0]
    np.savez(given, image=first.images[0][0], instruction=first.instructions[0], state=first.state[0])
    subprocess.run(
        [sys.executable, "-c", EXPORTED, tmp_path / "exported", cache, given, result],
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    answer = np.load(result)
    assert answer["bit_equal"], answer["reason"]
    assert np.array_equal(answer["actions"], served[0][0])


WRONG = {
    "backbone": ({"JOYNEXUS_BACKBONE": "no-such-backbone"}, "no-such-backbone"),
    "value": ({"JOYNEXUS_THREADS": "none"}, "JOYNEXUS_THREADS"),
    "misspelt name": ({"JOYNEXUS_THREDS": "1"}, "JOYNEXUS_THREDS"),
}


@pytest.mark.parametrize(
    ("role", "what"),
    [("trainer", "backbone"), ("inference", "backbone"), ("trainer", "value"), ("inference", "misspelt name")],
)
def test_a_role_that_cannot_start_says_why_in_one_sentence(
    master: FakeMaster, cache: Path, role: str, what: str
) -> None:
    wrong, sentence = WRONG[what]
    settings = master.settings(TrainerSettings, "trainer")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    environment |= {"JOYNEXUS_CLUSTER_FILE": str(settings.cluster_file), "JOYNEXUS_CACHE_DIR": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{role}"],
        env=environment | wrong,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert ended.returncode == EXIT_CONFIG
    assert "cannot start" in ended.stderr
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
