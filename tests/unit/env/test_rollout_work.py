"""Promises of a page: whole or not at all, under the policy's contract, with a record of what made its numbers."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from joynexus.contract import Contract
from joynexus.simulation.asking import Answer, Asker
from joynexus.simulation.episodes import Actions
from joynexus.simulation.interface import Picture, SimulatorOptions
from joynexus.simulation.trajectories import unpack
from joynexus.simulation.work import describe_simulator, options_of, run_rollout
from joynexus.wire import ErrorCode, JoyNexusError
from joynexus.wire.back import Collect, DescribeSimulator, Rollout, RolloutDone
from tests.unit.env.exploring import CHUNK, VERSION, explore
from tests.unit.env.fakes import CountingSimulator
from tests.unit.env.test_rollout import FakePool

SOFTWARE = {"counter": "1.0"}


class Pool(FakePool):
    """Rows of a task."""

    instruction = "count"

    def __init__(self, rows: int, losses: dict[int, int] | None = None) -> None:
        super().__init__(rows, losses)
        self.contract: Contract = CountingSimulator(SimulatorOptions()).contract
        self._cpu_s = 0.0

    def cpu_s(self) -> float:
        self._cpu_s += 2.0
        return self._cpu_s


class Store:
    """Keeps what is put, or is full."""

    def __init__(self, full: str = "") -> None:
        self.blobs: list[bytes] = []
        self.videos: list[int] = []
        self._full = full

    def put_bytes(self, data: bytes) -> str:
        self._fill("bytes")
        self.blobs.append(data)
        return f"blob {len(self.blobs)}"

    def put_video(self, frames: tuple[Picture, ...], fps: float) -> tuple[str, int]:
        self._fill("video")
        self.videos.append(len(frames))
        return f"video {len(self.videos)}", 10 * len(frames)

    def _fill(self, what: str) -> None:
        if self._full == what:
            raise OSError(errno.ENOSPC, "the disk is full")


class FakeAsker(Asker):
    """Explores without a master: what it draws depends on the row."""

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []

    def __call__(
        self,
        states: Actions,
        images: Sequence[Any],
        instructions: Sequence[str],
        seeds: Sequence[int],
    ) -> Answer:
        self.asked.append(instructions)
        assert [len(image) for image in images] == [len(states)]
        rows = [_Row(state, seed) for state, seed in zip(states, seeds, strict=True)]
        return explore(rows)  # type: ignore[arg-type]  # all of a question that it looks at


class _Row:
    def __init__(self, state: Actions, draw: int) -> None:
        self.seed, self.step, self.draw = int(state[0]), 0, draw
        self.observation = self
        self.state = state


def rollout(collect: Collect | None = None, **more: Any) -> Rollout:
    contract = CountingSimulator(SimulatorOptions()).contract
    fields: dict[str, Any] = {
        "task": "t",
        "attempt": 2,
        "tenant": "a",
        "policy": "arm",
        "version": VERSION,
        "chunk": CHUNK,
    }
    fields |= {"env": "metaworld/reach-v3", "contract": contract, "seeds": (3, 60, 1), "collect": collect, **more}
    return Rollout(**fields)


def run(message: Rollout, pool: Pool | None = None, store: Store | None = None) -> RolloutDone:
    return run_rollout(message, pool or Pool(2), FakeAsker(), store or Store(), software=SOFTWARE)


def test_a_page_has_its_episodes_its_record_and_no_trajectories_unless_they_are_wanted() -> None:
    store = Store()
    done = run(rollout(videos=(60,)), store=store)
    assert [(e.seed, e.success, e.failure, e.video) for e in done.episodes] == [
        (3, True, "", ""),
        (60, False, "limit", "video 1"),
        (1, True, "", ""),
    ]
    assert (done.task, done.attempt, done.error, done.trajectories) == ("t", 2, None, "")
    assert done.contract_digest == Pool(1).contract.digest()
    assert done.software == SOFTWARE
    assert done.videos == (("video 1", 10 * store.videos[0]),)
    assert not store.blobs


def test_collected_episodes_are_one_blob() -> None:
    store = Store()
    policy = msgspec.structs.replace(Pool(1).contract, gripper="unspecified")  # of a data set that does not say it
    message = rollout(Collect(reward="dense", value=True), contract=policy, draws=(1, 2, 3))
    done = run(message, store=store)
    assert (done.trajectories, done.trajectories_nbytes) == ("blob 1", len(store.blobs[0]))
    t = unpack(store.blobs[0])
    assert (t.seeds.tolist(), t.draws.tolist(), t.version) == ([3, 60, 1], [1, 2, 3], VERSION)
    assert (t.contract, t.instruction) == (policy.digest(), "count")
    assert t.last_value[1, 0] != 0
    assert [e.reward for e in done.episodes] == pytest.approx(
        [float(part.sum()) for part in np.split(t.rewards, np.cumsum(t.lengths)[:-1])], rel=1e-5
    )


def test_the_reward_that_is_told_is_the_one_that_is_trained_on() -> None:
    store = Store()
    done = run(rollout(Collect(reward="success", value=False), draws=(1, 2, 3)), store=store)
    assert [e.reward for e in done.episodes] == [1.0, 0.0, 1.0]
    assert unpack(store.blobs[0]).rewards.sum() == 2


def test_episodes_that_could_not_be_run_are_told_and_not_trained_on() -> None:
    store = Store()
    done = run(rollout(Collect(reward="dense", value=True)), Pool(2, {60: 99}), store)
    assert [bool(e.failure) for e in done.episodes] == [False, True, False]
    assert "the simulator was lost 3 times" in done.episodes[1].failure
    assert unpack(store.blobs[0]).seeds.tolist() == [3, 1]
    done = run(rollout(Collect(reward="dense", value=True)), Pool(2, dict.fromkeys((3, 60, 1), 99)), store)
    assert (done.error, done.trajectories, len(done.episodes)) == (None, "", 3)


@pytest.mark.parametrize("what", ["bytes", "video"])
def test_a_full_disk_has_the_page_done_again(what: str) -> None:
    with pytest.raises(JoyNexusError, match=r"the disk is full.*done again later") as caught:
        run(rollout(Collect(reward="dense", value=True), videos=(60,)), store=Store(full=what))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.failure.retry_after_ms > 0, "the master takes it for a fault of the page otherwise"


def test_another_contract_is_refused_with_the_field_before_anything_is_run() -> None:
    pool = Pool(2)
    other = msgspec.structs.replace(pool.contract, gripper="+1_open_-1_close")
    done = run(rollout(contract=other), pool)
    assert done.error is not None
    assert done.error.code is ErrorCode.CONTRACT_MISMATCH
    assert "contract field 'gripper' differs" in done.error.message
    assert not pool.resets
    limited = msgspec.structs.replace(pool.contract, episode_limit=7)  # whoever runs episodes chooses that
    assert run(rollout(contract=limited), pool).error is None


def test_episodes_without_an_end_are_refused() -> None:
    pool = Pool(2)
    pool.contract = msgspec.structs.replace(pool.contract, episode_limit=0)
    with pytest.raises(ValueError, match="have no end: set episode_limit"):
        run(rollout(), pool)
    message = DescribeSimulator(task="t", attempt=1, tenant="a", env="own/mine", warmup_episodes=2)
    with pytest.raises(ValueError, match="have no end: set episode_limit"):
        describe_simulator(message, pool, software=SOFTWARE)


def test_environments_are_made_as_the_policy_sees_them_and_run_on_where_each_step_is_paid() -> None:
    contract = msgspec.structs.replace(Pool(1).contract, cameras=(), episode_limit=40)
    for collect, ends in (
        (None, True),
        (Collect(reward="success", value=True), True),
        (Collect(reward="dense", value=True), False),
    ):
        options = options_of(rollout(collect, contract=contract))
        assert options == SimulatorOptions(cameras=(), episode_limit=40, end_at_success=ends)
    assert options_of(rollout(contract=contract, episode_limit=9)).episode_limit == 9
    describe = DescribeSimulator(task="t", attempt=1, tenant="a", env="metaworld/reach-v3", episode_limit=9)
    assert options_of(describe) == SimulatorOptions(cameras=None, episode_limit=9)


def test_a_page_that_nobody_wants_any_more_ends_between_two_chunks() -> None:
    class NoLongerWantedError(Exception):
        pass

    calls = 0

    def alive() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise NoLongerWantedError

    asker = FakeAsker()
    with pytest.raises(NoLongerWantedError):
        run_rollout(rollout(), Pool(2), asker, Store(), software=SOFTWARE, alive=alive)
    assert len(asker.asked) == 2
