"""A host, against a master that is a list of answers; environments run in real worker processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from joynexus.client._blobs import LocalBlob
from joynexus.simulation import serve as serving
from joynexus.simulation.pool import Deadlines
from joynexus.simulation.process import Recycling
from joynexus.simulation.serve import EnvironmentHost, Serving
from joynexus.simulation.trajectories import unpack
from joynexus.wire import ErrorCode, JoyNexusError, Message, Packet, failure
from joynexus.wire.arrays import ArrayPacker
from joynexus.wire.back import Collect, DescribeSimulator, Rollout, RolloutDone
from joynexus.wire.frames import Header
from joynexus.wire.front import Act, Actions, BlobBegin, BlobChunk, BlobOffset, Done, Exploration
from joynexus.wire.hosted import (
    EnvironmentOffered,
    HostAct,
    HostDone,
    OfferEnvironment,
    PulledWork,
    PullWork,
    WithdrawEnvironment,
)
from tests.unit.hosted import environments
from tests.waiting import until

CONTRACT = environments.PointMass.contract


class FakeMaster:
    """Stands where a `Connection` does: gives work, acts with zeros, keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.blobs: dict[str, bytes] = {}
        self.work: list[Rollout | DescribeSimulator] = []
        self.cancelled: tuple[str, ...] = ()
        self.known = True
        self.refuse_blobs: JoyNexusError | None = None
        self.refuse_offers: list[JoyNexusError] = []
        self.hold_acts = threading.Event()
        self.hold_acts.set()
        self.ended = threading.Event()
        self.lock = threading.Lock()

    def ask(self, message: Message, convert: Callable[[Packet], Any], *, buffers: Any = (), **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            answer, frames = self._answer(message, buffers)
            packet = Packet(header=Header(kind="x", id="1"), message=answer, buffers=tuple(frames))
            future.set_result(convert(packet))
        except (JoyNexusError, KeyboardInterrupt) as error:
            future.set_exception(error)
        return future

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def _answer(self, message: Message, buffers: Any) -> tuple[Message, list[Any]]:
        with self.lock:
            self.heard.append(message)
        match message:
            case OfferEnvironment():
                if self.refuse_offers:
                    raise self.refuse_offers.pop()
                self.known = True
                return EnvironmentOffered(env=f"own/{message.name}"), []
            case PullWork():
                return self._pulled(message), []
            case HostAct():
                self.hold_acts.wait(30)
                return self._act(msgspec.msgpack.decode(message.act, type=Act))
            case BlobBegin():
                if self.refuse_blobs is not None:
                    raise self.refuse_blobs
                return BlobOffset(digest=message.digest, offset=0), []
            case BlobChunk():
                self.blobs[message.digest] = b"".join(map(bytes, buffers))
                return BlobOffset(digest=message.digest, offset=len(self.blobs[message.digest]), complete=True), []
            case _:
                return Done(), []

    def _pulled(self, pull: PullWork) -> PulledWork:
        if self.ended.is_set():
            raise KeyboardInterrupt
        if not self.known:
            raise JoyNexusError(failure(ErrorCode.NOT_REGISTERED, "offer it again"))
        have = {task for task, _ in pull.have}
        done = {message.rollout.task for message in self.of(HostDone) if message.rollout}
        done |= {message.described.task for message in self.of(HostDone) if message.described}
        news = next((work for work in self.work if work.task not in have | done), None)
        if news is None and not self.cancelled:
            self.ended.wait(0.01)
        rollout, describe = (news if isinstance(news, kind) else None for kind in (Rollout, DescribeSimulator))
        return PulledWork(rollout=rollout, describe=describe, cancelled=self.cancelled)

    def _act(self, act: Act) -> tuple[Message, list[Any]]:
        packer = ArrayPacker()
        rows = act.state.shape[0]
        actions = packer.add(np.zeros((rows, 2, 2), np.float32))
        drawn = None
        if act.explore:
            drawn = Exploration(
                sample=packer.add(np.zeros((rows, 2, 2), np.float32)),
                log_prob=packer.add(np.zeros((rows, 2, 2), np.float32)),
                value=packer.add(np.ones((rows, 1), np.float32)),
            )
        return Actions(version=3, actions=actions, exploration=drawn), packer.buffers


def rollout(task: str = "t", **changes: object) -> Rollout:
    page = Rollout(
        task=task,
        attempt=1,
        tenant="a",
        policy="p",
        version=3,
        contract=CONTRACT,
        chunk=2,
        env="own/e",
        seeds=(1, 2, 3),
        episode_limit=6,
    )
    return msgspec.structs.replace(page, **changes)


@pytest.fixture
def master() -> FakeMaster:
    return FakeMaster()


@pytest.fixture
def serve(master: FakeMaster) -> Iterator[Callable[..., list[str]]]:
    """Starts a host in a thread; returns what it says. It is interrupted at the end, as by Ctrl-C."""
    threads: list[threading.Thread] = []

    def start(function: str = "make_point", **options: Any) -> list[str]:
        said: list[str] = []
        target = f"{environments.__name__}:{function}"
        deadlines = Deadlines(step_s=options.pop("step_s", 60.0))
        serving = Serving(target=target, name="e", deadlines=deadlines, **options)
        host = EnvironmentHost(master, serving, said.append)  # type: ignore[arg-type]  # all of it that a host uses

        def run() -> None:
            with pytest.raises(KeyboardInterrupt):
                host.serve()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return said

    yield start
    master.ended.set()
    master.hold_acts.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def results(master: FakeMaster, count: int = 1) -> list[RolloutDone]:
    until(lambda: len(master.of(HostDone)) >= count, 60)
    return [message.rollout for message in master.of(HostDone)]


def test_page_is_run_and_answered_once(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.work = [rollout(trace="j7")]
    said = serve()
    (done,) = results(master)
    assert (done.task, done.attempt, done.error) == ("t", 1, None)
    until(lambda: any(line.endswith("s (job j7)") for line in said))
    assert [(episode.seed, episode.steps, episode.failure) for episode in done.episodes] == [
        (1, 6, "limit"), (2, 6, "limit"), (3, 6, "limit"),
    ]  # fmt: skip
    offer = master.of(OfferEnvironment)[0]
    assert (offer.name, offer.contract, offer.credit) == ("e", CONTRACT, 1)


def test_trajectories_are_uploaded_before_they_are_named(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.work = [rollout(collect=Collect(reward="dense", value=True), seeds=(1, 1), draws=(7, 8))]
    serve()
    (done,) = results(master)
    kept = unpack(master.blobs[done.trajectories])
    assert LocalBlob.of(master.blobs[done.trajectories]).digest == done.trajectories
    assert (kept.version, kept.seeds.tolist(), kept.draws.tolist()) == (3, [1, 1], [7, 8])
    assert np.array_equal(kept.last_value, np.ones((2, 1), np.float32))
    order = [type(message) for message in master.heard]
    assert order.index(BlobChunk) < order.index(HostDone)


def test_refused_upload_is_told_as_the_pages_failure(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.refuse_blobs = JoyNexusError(failure(ErrorCode.TOO_LARGE, "over the quota: delete what is not needed"))
    master.work = [rollout(collect=Collect(reward="dense", value=False), draws=(1, 2, 3))]
    said = serve()
    (done,) = results(master)
    assert done.error is not None
    assert done.error.code is ErrorCode.TOO_LARGE
    until(lambda: any("failed (over the quota" in line for line in said))


def test_description_has_statistics_of_random_actions(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.work = [DescribeSimulator(task="d", attempt=1, tenant="a", env="own/e", warmup_episodes=2, cameras=())]
    serve()
    until(lambda: master.of(HostDone), 60)
    described = master.of(HostDone)[0].described
    assert (described.contract, described.instruction) == (CONTRACT, "push the point to the middle")
    assert described.statistics.count == 120
    assert described.statistics.action.std == (1.0, 1.0)


def test_cancelled_page_is_never_answered(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.hold_acts.clear()
    master.work = [rollout("unwanted")]
    serve()
    until(lambda: master.of(HostAct), 60)
    master.work, master.cancelled = [], ("unwanted",)
    pulls = len(master.of(PullWork))
    until(lambda: len(master.of(PullWork)) > pulls + 1)
    master.cancelled = ()
    master.work = [rollout("wanted")]
    master.hold_acts.set()
    assert [done.task for done in results(master)] == ["wanted"]


def test_host_that_is_unknown_offers_again_as_the_same_incarnation(
    master: FakeMaster, serve: Callable[..., list[str]]
) -> None:
    serve()
    until(lambda: master.of(PullWork), 60)
    master.known = False
    until(lambda: len(master.of(OfferEnvironment)) == 2)
    first, second = master.of(OfferEnvironment)
    assert first == second


def test_host_outlives_a_master_that_goes_while_it_offers_again(
    master: FakeMaster, serve: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.01)
    said = serve()
    until(lambda: master.of(PullWork), 60)
    master.refuse_offers = [JoyNexusError(failure(ErrorCode.DEADLINE, "nobody answers"))]
    master.known = False
    until(lambda: master.known)
    master.work = [rollout()]
    assert [done.task for done in results(master)] == ["t"]
    assert [line for line in said if "answers" in line] == [
        "nobody answers; this host goes on asking",
        "the cluster answers again",
    ]


def test_page_that_nobody_wants_is_not_named_again_while_it_still_runs(
    master: FakeMaster, serve: Callable[..., list[str]]
) -> None:
    """The master answers at once whoever names one: the two would go round as fast as they can."""
    master.hold_acts.clear()
    master.work = [rollout("unwanted")]
    serve()
    until(lambda: master.of(HostAct), 60)
    until(lambda: master.of(PullWork)[-1].have == (("unwanted", 1),))
    master.work, master.cancelled = [], ("unwanted",)
    until(lambda: master.of(PullWork)[-1].have == ())
    assert len(master.of(HostAct)) == 1, "it still waits for its first actions"


def test_interrupted_host_says_goodbye(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    serve()
    until(lambda: master.of(PullWork), 60)
    master.ended.set()
    until(lambda: master.of(WithdrawEnvironment))
    assert master.of(WithdrawEnvironment)[0].incarnation == master.of(OfferEnvironment)[0].incarnation


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("make_raising", "failed to step: ZeroDivisionError: unstable physics"),
        ("make_hanging", "took longer than 0.5 s to step"),
        ("make_dying", "died in a step"),
        ("make_nan", "NaN or infinities"),
    ],
)
def test_environment_that_never_works_is_one_sentence_and_the_host_goes_on(
    master: FakeMaster, serve: Callable[..., list[str]], function: str, sentence: str
) -> None:
    master.work = [rollout("one", seeds=(1,)), rollout("two", seeds=(1,))]
    serve(function, environments=1, step_s=0.5)
    for done in results(master, 2):
        assert done.error is not None
        assert done.error.code is ErrorCode.BAD_DATA
        assert done.error.message.startswith("none of 1 episodes could be run: the simulator was lost 3 times: it ")
        assert sentence in done.error.message


def test_worker_process_is_replaced_between_pages_before_it_leaks_too_much(
    master: FakeMaster, serve: Callable[..., list[str]]
) -> None:
    master.work = [rollout(task) for task in ("one", "two", "three")]
    serve("make_telling", recycling=Recycling(episodes=6))
    pages = [{episode.reward / 6 for episode in done.episodes} for done in results(master, 3)]
    assert [len(pids) for pids in pages] == [1, 1, 1]
    assert pages[0] == pages[1] != pages[2]


def test_lanes_work_side_by_side(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    master.hold_acts.clear()
    master.work = [rollout("one"), rollout("two")]
    serve(processes=2)
    until(lambda: {message.task for message in master.of(HostAct)} == {"one", "two"}, 60)
    master.hold_acts.set()
    assert {done.task for done in results(master, 2)} == {"one", "two"}


def test_options_that_cannot_be_are_a_failure_of_the_page(master: FakeMaster, serve: Callable[..., list[str]]) -> None:
    cameras = environments.Seeing.contract.cameras
    master.work = [rollout(contract=msgspec.structs.replace(CONTRACT, cameras=cameras))]
    serve()
    (done,) = results(master)
    assert done.error is not None
    assert done.error.code is ErrorCode.INVALID
    assert "the environment has no camera 'left' 4x6" in done.error.message
