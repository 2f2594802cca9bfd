"""The env service as a real process: data sets prepared, batches drawn, episodes run with whoever answers to act."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("metaworld.env_dict")

from common.settings import EnvSettings
from joynexus.contract import Contract
from joynexus.datasets import DatasetManifest
from joynexus.seeds import derived_seed
from joynexus.simulation.interface import SimulatorOptions
from joynexus.simulation.trajectories import unpack
from joynexus.wire import ErrorCode, failure, rebuild
from joynexus.wire.arrays import ArrayPacker
from joynexus.wire.back import (
    Collect,
    DatasetPrepared,
    DescribeSimulator,
    IndicesDrawn,
    PrepareDataset,
    Rollout,
    RolloutDone,
    SampleIndices,
    SimulatorDescribed,
    WorkerAct,
)
from joynexus.wire.front import Act, Actions, Exploration, FileEntry
from services.env.simulators.metaworld import expert
from services.env.simulators.metaworld_tasks import contract as metaworld_contract
from services.env.simulators.registry import make_simulator
from tests.process.fake_master import FakeMaster
from tests.unit.env import sets
from tests.waiting import until

TASK = "metaworld/reach-v3"
CHUNK = 3
pytestmark = pytest.mark.slow


@contextmanager
def env_process(master: FakeMaster, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    values = master.settings(EnvSettings, "env")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JOYNEXUS_")}
    environment |= {
        "JOYNEXUS_CLUSTER_FILE": str(values.cluster_file),
        "JOYNEXUS_STATE_DIR": str(values.state_dir),
        "JOYNEXUS_CACHE_DIR": str(values.cache_dir),
        **settings,
    }
    child = subprocess.Popen([sys.executable, "-m", "services.env"], env=environment, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not master.registers:
            assert child.poll() is None, f"the env service ended with {child.returncode}"
            assert time.monotonic() < deadline, "the env service did not register in time"
            time.sleep(0.02)
        yield child
    finally:
        child.kill()
        child.wait(20)


def push(master: FakeMaster, folder: Path, task: str) -> DatasetPrepared:
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest, nbytes = master.store.put_file(path)
        files.append(FileEntry(path=path.relative_to(folder).as_posix(), digest=digest, nbytes=nbytes))
    master.give(PrepareDataset(task=task, attempt=1, tenant="a", dataset="arm", files=tuple(files)))
    answer = master.expect(DatasetPrepared).message
    assert isinstance(answer, DatasetPrepared)
    return answer


@contextmanager
def policy(master: FakeMaster, rows_seen: list[int]) -> Iterator[None]:
    """Answer with MetaWorld's expert, each action three times; every fifth request is answered at the second try.

    The value that it tells whoever explores is the first number of the state, the key the row's seed.
    """
    act_expert, stop, calls = expert("reach-v3"), threading.Event(), 0

    def answer() -> None:
        nonlocal calls
        while not stop.is_set():
            try:
                packet = master.expect(WorkerAct, timeout_s=0.2)
            except AssertionError:
                continue
            assert isinstance(packet.message, WorkerAct)
            calls += 1
            if calls % 5 == 0:
                again = failure(ErrorCode.UNAVAILABLE, "no inference worker is there", retry_after_ms=10)
                master.give(again, re=packet.header.id)
                continue
            act = msgspec.msgpack.decode(packet.message.act, type=Act)
            states = rebuild(act.state, packet.buffers)
            rows_seen.append(len(states))
            assert all(len(rebuild(image, packet.buffers)) == len(states) for image in act.images)
            packer = ArrayPacker()
            actions = packer.add(np.stack([act_expert(state)[None].repeat(CHUNK, 0) for state in states]))
            told = Exploration(
                sample=packer.add(np.array(act.seeds, np.float32)[:, None]),
                log_prob=actions,
                value=packer.add(states[:, :1]),
            )
            answer = Actions(version=1, actions=actions, exploration=told if act.explore else None)
            master.give(answer, packer.buffers, re=packet.header.id)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rollout(contract: Contract, task: str = "r1", **more: object) -> Rollout:
    fields = {"task": task, "attempt": 1, "tenant": "a", "policy": "arm", "version": 1, "chunk": CHUNK, "env": TASK}
    return msgspec.convert({**fields, "contract": contract, "seeds": (0, 1, 2), **more}, Rollout, from_attributes=True)


def done(master: FakeMaster) -> RolloutDone:
    answer = master.expect(RolloutDone, timeout_s=90).message
    assert isinstance(answer, RolloutDone)
    return answer


def test_data_sets_batches_and_episodes_come_from_one_process(tmp_path: Path) -> None:
    sets.write_v3(tmp_path / "mounted" / "Arm.v3")
    contract = metaworld_contract(SimulatorOptions())
    with FakeMaster(tmp_path) as master, env_process(master, JOYNEXUS_DATASETS_DIR=str(tmp_path / "mounted")) as child:
        (register,) = master.registers
        assert {"metaworld", "datasets", "sampler"} <= set(register.serves)
        assert register.mounted == ("arm-v3",)
        assert register.credit == {"simulator": 2, "data": 2}

        sound = push(master, sets.write_v2(tmp_path / "sound"), "d1")
        manifest = msgspec.msgpack.decode(master.store.path(sound.manifest).read_bytes(), type=DatasetManifest)
        assert manifest.steps == 15
        assert all(master.store.has(episode.blob) for episode in manifest.episodes)
        broken = sets.write_v2(tmp_path / "broken")
        (broken / "data/chunk-000/episode_000000.parquet").write_bytes(b"PAR1")
        assert "is truncated" in push(master, broken, "d2").faults[0].what

        sample = {"manifest": sound.manifest, "holdout_episodes": 0, "seed": 0, "batch_size": 4}
        master.give(SampleIndices(task="s1", attempt=1, tenant="a", first_step=0, steps=3, **sample))  # type: ignore[arg-type]  # mixed values
        drawn = master.expect(IndicesDrawn).message
        assert isinstance(drawn, IndicesDrawn)
        assert [len(batch) for batch in drawn.batches] == [4, 4, 4]

        rows: list[int] = []
        with policy(master, rows):
            master.give(rollout(contract, videos=(1,)))
            first = done(master)
            assert first.error is None
            assert [e.seed for e in first.episodes] == [0, 1, 2]
            assert all(e.success for e in first.episodes), first.episodes
            assert rows[0] == 3, "all live rows ask together"
            assert [bool(e.video) for e in first.episodes] == [False, True, False]
            assert master.store.read(first.episodes[1].video, 4, 4) == b"ftyp"
            assert first.contract_digest == contract.digest()
            assert first.software["metaworld"]
            assert first.busy_s > 0

            master.give(rollout(contract, task="r2", episode_limit=5))
            short = done(master)
            assert [(e.success, e.steps, e.failure) for e in short.episodes] == [(False, 5, "limit")] * 3

        other = msgspec.structs.replace(contract, gripper="+1_open_-1_close")
        master.give(rollout(other, task="r4"))
        refused = done(master).error
        assert refused is not None
        assert refused.code is ErrorCode.CONTRACT_MISMATCH
        assert "contract field 'gripper' differs" in refused.message
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


def test_a_simulator_worker_that_is_killed_costs_time_and_nothing_else(tmp_path: Path) -> None:
    blind = metaworld_contract(SimulatorOptions(cameras=()))
    with FakeMaster(tmp_path) as master, env_process(master):
        with policy(master, []):
            master.give(rollout(blind))
            undisturbed = done(master)
        rows: list[int] = []
        with policy(master, rows):
            master.give(rollout(blind, task="r2"))
            deadline = time.monotonic() + 60
            while len(rows) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            pids = simulator_pids()
            assert pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert done(master).episodes == undisturbed.episodes


def test_the_process_that_forks_simulators_costs_time_and_nothing_else_when_it_is_killed(tmp_path: Path) -> None:
    """While a page runs and while none does. Nobody waits for the page's deadline, which is some minutes away."""
    blind = metaworld_contract(SimulatorOptions(cameras=()))
    with FakeMaster(tmp_path) as master, env_process(master):
        rows: list[int] = []
        with policy(master, rows):
            master.give(rollout(blind))
            undisturbed = done(master)
            kill_nurseries()
            master.give(rollout(blind, task="r2"))
            assert done(master).episodes == undisturbed.episodes
            asked = len(rows)
            master.give(rollout(blind, task="r3"))
            until(lambda: len(rows) >= asked + 5, 60)
            kill_nurseries()
            assert done(master).episodes == undisturbed.episodes


def test_what_is_collected_is_what_a_plain_loop_would_see(tmp_path: Path) -> None:
    seeds, draws, limit = (5, 6, 5), (1, 1, 2), 20
    act_expert, blind = expert("reach-v3"), SimulatorOptions(cameras=(), episode_limit=limit, end_at_success=False)
    with FakeMaster(tmp_path) as master, env_process(master), policy(master, []):
        collect = Collect(reward="dense", value=True)
        master.give(rollout(metaworld_contract(blind), seeds=seeds, draws=draws, episode_limit=limit, collect=collect))
        page = done(master)
        assert page.error is None, page.error
        blob = master.store.path(page.trajectories).read_bytes()
        assert page.trajectories_nbytes == len(blob)
        t = unpack(blob)
        simulator = make_simulator(TASK, blind)
        row = 0
        for episode, (seed, draw) in enumerate(zip(seeds, draws, strict=True)):
            observation, step = simulator.reset(seed), 0
            for _ in range(t.lengths[episode]):
                assert np.array_equal(t.state[row], observation.state)
                assert t.value[row] == observation.state[0]
                assert t.sample[row] == np.float32(derived_seed("rollout", draw, step))
                count = min(CHUNK, limit - step)
                result = simulator.step_chunk(act_expert(observation.state)[None].repeat(count, 0))
                assert t.rewards[row].tolist() == result.rewards.tolist() + [0.0] * (CHUNK - count)
                assert t.executed[row] == count
                observation, row, step = result.observation, row + 1, step + result.steps
            assert step == limit, "dense rewards are paid to the end"
            assert t.last_value[episode] == observation.state[0]
        assert not t.terminated.any()

        master.give(
            rollout(
                metaworld_contract(SimulatorOptions()),
                task="r2",
                seeds=(0, 1),
                collect=Collect(reward="success", value=True),
            )
        )
        page = done(master)
        t = unpack(master.store.path(page.trajectories).read_bytes())
        assert t.images[0].shape == (len(t.executed), 64, 64, 3)
        assert t.images[0].std() > 10
        assert t.rewards.sum() == t.success.sum() == t.terminated.sum() == 2
        assert not t.last_value.any()


def test_a_simulator_is_described_with_statistics_or_in_a_sentence_why_it_is_not(tmp_path: Path) -> None:
    def described(master: FakeMaster, task: str, **more: object) -> SimulatorDescribed:
        fields = {"task": task, "attempt": 1, "tenant": "a", "env": TASK, "cameras": (), "episode_limit": 30, **more}
        master.give(msgspec.convert(fields, DescribeSimulator))
        answer = master.expect(SimulatorDescribed, timeout_s=90).message
        assert isinstance(answer, SimulatorDescribed)
        return answer

    with FakeMaster(tmp_path) as master, env_process(master):
        found = described(master, "d1", warmup_episodes=4, seed=9)
        assert found.error is None, found.error
        assert found.contract == metaworld_contract(SimulatorOptions(cameras=(), episode_limit=30))
        assert "goal" in found.instruction
        assert found.software["metaworld"]
        assert found.statistics is not None
        assert found.statistics.count == 4 * 30
        assert described(master, "d2", warmup_episodes=4, seed=9).statistics == found.statistics
        assert described(master, "d3").statistics is None
        unknown = described(master, "d4", env="metaworld/reech-v3").error
        assert unknown is not None
        assert (unknown.code, "metaworld/reach-v3" in unknown.message) == (ErrorCode.INVALID, True)


def test_a_worker_that_is_told_to_leave_finishes_its_page(tmp_path: Path) -> None:
    rows: list[int] = []
    with FakeMaster(tmp_path) as master, env_process(master) as child, policy(master, rows):
        master.give(rollout(metaworld_contract(SimulatorOptions(cameras=()))))
        until(lambda: rows)
        child.send_signal(signal.SIGTERM)
        assert master.left.wait(20)
        assert all(episode.success for episode in done(master).episodes)
        assert child.wait(20) == 0


def kill_nurseries() -> None:
    nurseries = family_tree()
    assert nurseries
    for pid in nurseries:
        os.kill(pid, signal.SIGKILL)


def simulator_pids() -> list[int]:
    return [worker for workers in family_tree().values() for worker in workers]


def family_tree() -> dict[int, list[int]]:
    """Worker processes by nursery, below this process."""
    parents: dict[int, list[int]] = {}
    nurseries = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
            if b"joynexus.simulation.nursery" in command:
                nurseries.append(int(entry.name))
    ours = {os.getpid()}
    for _ in range(4):
        ours |= {child for parent in ours for child in parents.get(parent, [])}
    forked = {
        pid for nursery in nurseries for pid in parents.get(nursery, [])
    }  # they have their nursery's command line
    return {nursery: parents.get(nursery, []) for nursery in nurseries if nursery in ours - forked}
