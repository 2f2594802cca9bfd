"""The rows of one trainer's backbone on two devices: the numbers of one device, and one end for all.

Two processes of `torch.distributed` (gloo) stand for two devices; a third would be found by the same code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.settings import TrainerSettings, load_settings
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.backbones.spread import DeviceLost
from joynexus.vla.feature import Observation
from joynexus.vla.numerics import configure, probe
from joynexus.wire.back import TrainDone
from services.trainer.core import TrainerEngine
from services.trainer.followers import Followers
from tests.unit.trainer.rollouts import PPO, RlLoop
from tests.unit.workers import Arrays, Bench, Group, opening, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BACKBONE = "tiny-qwen3vl"
STEPS = 20
ROWS = {"one": 1, "three": 3, "five": 5}


@dataclass
class Two:
    """The same backbone alone and spread, its followers, and what these said they took."""

    alone: Backbone
    spread: Backbone
    followers: Followers
    ended: list[int] = field(default_factory=list)
    end: threading.Event = field(default_factory=threading.Event)
    busy: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    cache = tmp_path_factory.mktemp("cache")
    configure(1)
    alone = load_backbone(BACKBONE, cache_dir=cache)
    ended, end, busy = list[int](), threading.Event(), list[float]()

    def lost(code: int) -> None:
        ended.append(code)
        end.set()

    with pytest.MonkeyPatch.context() as variables:
        for name in [name for name in os.environ if name.startswith("JOYNEXUS_")]:
            variables.delenv(name)
        variables.setenv("JOYNEXUS_BACKBONE", BACKBONE)
        variables.setenv("JOYNEXUS_CACHE_DIR", str(cache))
        variables.setenv("JOYNEXUS_DEVICES", "cpu,cpu")
        with Followers(load_settings(TrainerSettings), end=lost) as followers:
            spread = followers.share(alone, busy.append)
            yield Two(alone, spread, followers, ended, end, busy)


class Ranked(Bench):
    """A bench with a backbone of one's choice; without a store, so that every op goes through it."""

    def __init__(self, folder: Path, backbone: Backbone) -> None:
        self._chosen = backbone
        super().__init__(folder, keep_features=False)

    def fresh(self) -> None:
        self.backbone = self._chosen
        self.engine = TrainerEngine(
            self._chosen,
            None,
            lambda digest: self.open_blob(digest),
            lambda path: self.put_blob(path),
            scratch=self.folder / "scratch",
        )


def imitate(bench: Bench) -> list[TrainDone]:
    """Three policies with 1, 3 and 5 samples a step, in one group each."""
    answers = []
    for seq in range(1, STEPS + 1):
        group = Group(*(opening(name, spec(seed=rows)) for name, rows in ROWS.items() if seq == 1))
        for name, rows in ROWS.items():
            group.train(name, seq, Arrays(100 * rows + seq, rows))
        answers += bench.done(group)
    return answers


def reinforce(bench: Bench) -> list[TrainDone]:
    """An update from rewards, then one more step of imitation."""
    loop = RlLoop(bench, spec(seed=9), PPO, name="rl", limit=4, episodes=6)
    loop.start()
    loop.update(0, loop.roll(loop.acting, 0))
    loop.op("train_step", Group().train("rl", loop.seq + 1, Arrays(5)))
    return loop.answers


def numbers(answers: list[TrainDone]) -> list[Any]:
    """What must be equal: all but what it took, and digests of files that hold the day's date."""
    return [
        (done.policy, done.seq, done.kind, done.step, done.samples, done.backbone_forwards, done.result.metrics)
        for done in answers
    ]


def test_two_devices_give_the_bits_of_one(two: Two, tmp_path: Path) -> None:
    assert probe(two.spread).exact == probe(two.alone).exact
    assert two.spread.take_far_busy() == 0.0, "a trial is nobody's work"
    work = [imitate, reinforce]
    one = [numbers(each(Ranked(tmp_path / "one", two.alone))) for each in work]
    two.busy.clear()
    answers = [each(Ranked(tmp_path / "two", two.spread)) for each in work]
    assert [numbers(each) for each in answers] == one
    assert len({done.result.metrics["loss"] for done in answers[0]}) > STEPS, "nothing was learned"
    # And whoever had the follower work pays for that, too.
    assert len(two.busy) >= STEPS
    assert all(taken > 0 for taken in two.busy)
    paid = sum(done.busy_s for each in answers for done in each)
    assert paid > sum(two.busy)


def test_a_sample_at_fault_is_told_from_its_neighbours_on_whichever_device_it_is(two: Two) -> None:
    """The follower's forward fails (it is given what passes no check); its answer is the leader's exception."""
    view = np.zeros((64, 64, 3), np.uint8)
    good, bad = Observation((view,), "go"), Observation((view,), "x" * 9000)
    for layers in ((-1,), (0, -1)):
        with pytest.raises(RuntimeError, match="characters"):
            two.spread._forward([good, bad], layers)
        assert len(two.spread.forward([good] * 3, layers)) == 3, "and the two go on understanding each other"


def test_signals_that_ask_the_trainer_to_finish_end_no_follower(two: Two) -> None:
    (follower,) = two.followers.processes
    for number in (signal.SIGTERM, signal.SIGINT):
        follower.send_signal(number)
    assert len(two.spread.forward([Observation((), "go")] * 3)) == 3
    assert follower.poll() is None


def test_who_has_lost_a_follower_ends_as_it_ended(two: Two) -> None:
    """Last in this file: nothing is left of the two."""
    (follower,) = two.followers.processes
    assert not two.ended
    os.kill(follower.pid, signal.SIGKILL)
    assert two.end.wait(60)
    assert two.ended == [-signal.SIGKILL]
    with pytest.raises(DeviceLost, match="the follower on cpu is gone"):
        two.spread.forward([Observation((), "go")] * 4)
    assert issubclass(DeviceLost, torch.AcceleratorError), "which no op is blamed for: the process starts anew"
