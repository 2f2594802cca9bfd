"""RL jobs under every fault: whoever dies whenever, the job ends, each page is trained on once, and none is too old.

A failure names its seed or its step; `play(seed)` plays it again.
"""

from __future__ import annotations

import random

import pytest

from common.journal.records import PageRecord
from joynexus.specs import PpoSpec, RlSpec
from joynexus.wire.back import Leaving
from joynexus.wire.front import JobInfo
from services.master.config import CoreConfig
from tests.unit.master.actors import FakeEnv, FakeInference, FakeTrainer, new_incarnation
from tests.unit.master.jobs import info, push, sft, submit
from tests.unit.master.rl import check, rl, versions
from tests.unit.master.world import FakeWorker, World

CONFIG = CoreConfig(kills=10_000, kept_replies=4, rollout_episodes=4)
JOBS = {"a": "rl-1", "b": "sft-1"}
SMALL = rl(updates=3, episodes=6, checkpoint_every=2)


class Crew:
    """A master and its workers, each of which may die and be replaced."""

    def __init__(self, world: World, envs: int = 2) -> None:
        self.world = world
        self.makers = {
            "trainer": FakeTrainer,
            "inference": FakeInference,
            **{f"env{number}": FakeEnv for number in range(envs)},
        }
        self._turn = 0
        self.workers: dict[str, FakeWorker] = {name: self.make(name) for name in self.makers}

    def make(self, name: str) -> FakeWorker:
        worker: FakeWorker = self.makers[name](self.world, new_incarnation(), key=name)
        return worker

    def kill(self, victim: str) -> None:
        """kill -9, and start another one in its place."""
        if victim == "master":
            self.world.crash()
            for worker in self.workers.values():
                worker.connect()
            return
        self.workers[victim].die()
        self.world.wait(2.5 * CONFIG.beat_ms / 1000)
        self.beat(but=victim)
        self.workers[victim] = self.make(victim)

    def beat(self, but: str = "") -> None:
        for name, worker in self.workers.items():
            if name != but:
                worker.beat()

    def turn(self) -> int:
        """Have one worker do one piece of work, by turns; 0 if nobody has any."""
        for _ in self.workers:
            self._turn = (self._turn + 1) % len(self.workers)
            if list(self.workers.values())[self._turn].work(1):
                return 1
        return 0

    def finish(self) -> None:
        while self.turn():
            pass


def final(world: World) -> str:
    return str(max(versions(world), key=lambda version: version.version).digest)


def finished(world: World, spec: RlSpec) -> JobInfo:
    done = info(world, "rl-1")
    assert (done.state, done.done) == ("succeeded", spec.updates), done.message
    assert [point.update for point in done.updates] == list(range(spec.updates))
    assert all(point.episodes == spec.episodes for point in done.updates)
    assert all(0 <= point.staleness <= spec.max_staleness for point in done.updates)
    check(world, spec)
    assert not world.journal.of(PageRecord)
    assert [version.version for version in versions(world)] == [1, spec.updates + 1]
    assert not [log for log in world.logs if log.event in ("replay_differs", "op_out_of_order")]
    return done


def run_with(victim: str, moment: int, spec: RlSpec) -> tuple[World, int]:
    """Run a job, and kill somebody after so many turns; return how many it took."""
    world = World(CONFIG)
    crew = Crew(world)
    submit(world, spec)
    turns = 0
    while True:
        if turns == moment:
            crew.kill(victim)
        if not crew.turn() and turns > moment:
            return world, turns
        turns += 1


@pytest.mark.parametrize("victim", ["trainer", "inference", "env0", "env1", "master"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_whoever_is_killed_at_whatever_step_the_job_ends_as_if_nothing_had_been(victim: str, staleness: int) -> None:
    spec = RlSpec(**{field: getattr(SMALL, field) for field in SMALL.__struct_fields__} | {"max_staleness": staleness})
    undisturbed, turns = run_with(victim, -1, spec)
    expected = finished(undisturbed, spec)
    assert turns > 15
    for moment in range(turns):
        world, _ = run_with(victim, moment, spec)
        try:
            done = finished(world, spec)
        except AssertionError as error:
            raise AssertionError(f"run_with({victim!r}, {moment}, …) fails: {error}") from error
        if not staleness:  # then nothing depends on who was how fast
            assert final(world) == final(undisturbed)
            assert done.updates == expected.updates


NEIGHBOUR = sft(steps=40, checkpoint_every=7)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    """The loss curve of another tenant's job when nothing else runs and nobody dies."""
    world = World(CONFIG)
    crew = Crew(world)
    push(world, tenant="b")
    job = submit(world, NEIGHBOUR, tenant="b")
    crew.finish()
    return info(world, job.job, tenant="b").losses


class Play:
    """Chance plays with a master, a trainer, an inference worker and two env workers.

    An RL job runs, and beside it another tenant's SFT job.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(CONFIG)
        self.crew = Crew(self.world)
        self.spec = rl(
            updates=self.chance.randint(2, 8),
            episodes=self.chance.choice((2, 4, 7)),
            algorithm=PpoSpec(epochs=2),
            checkpoint_every=self.chance.randint(1, 3),
            max_staleness=self.chance.choice((0, 0, 1, 3)),
        )
        submit(self.world, self.spec)
        push(self.world, tenant="b")
        submit(self.world, NEIGHBOUR, tenant="b")
        self.moves = {
            self.somebody_works: 30,
            self.somebody_dies: 2,
            self.somebody_is_declared_dead_but_lives: 1,
            self.a_connection_breaks: 2,
            self.an_env_worker_leaves: 1,
            self.journal_falls_behind: 3,
            self.journal_catches_up: 4,
            self.disk_is_full_for_a_while: 1,
            self.disk_has_room_again: 2,
        }

    def move(self) -> None:
        (move,) = self.chance.choices(list(self.moves), list(self.moves.values()))
        move()

    def somebody(self) -> str:
        return self.chance.choice(list(self.crew.workers))

    def somebody_works(self) -> None:
        self.crew.workers[self.somebody()].work(self.chance.randint(1, 3))

    def somebody_dies(self) -> None:
        self.crew.kill(self.chance.choice([*self.crew.workers, "master"]))

    def somebody_is_declared_dead_but_lives(self) -> None:
        name = self.somebody()
        for _ in range(8):
            self.world.wait(1)
            self.crew.beat(but=name)
        self.crew.workers[name].work(1)  # its late results count for nothing
        self.crew.workers[name].connect()

    def a_connection_breaks(self) -> None:
        self.crew.workers[self.somebody()].connect()

    def an_env_worker_leaves(self) -> None:
        name = self.chance.choice(("env0", "env1"))
        self.world.say(self.crew.workers[name].peer, Leaving())
        self.crew.workers[name].work()
        self.crew.kill(name)

    def journal_falls_behind(self) -> None:
        self.world.auto_persist = False
        for _ in range(min(self.chance.randint(0, 3), len(self.world.unwritten))):
            self.world.write()

    def journal_catches_up(self) -> None:
        self.world.auto_persist = True
        self.world.settle()

    def disk_is_full_for_a_while(self) -> None:
        self.world.journal.full = True
        self.world.wait(0.5)

    def disk_has_room_again(self) -> None:
        if self.world.journal.full:
            self.world.journal.full = False
            self.world.wait(2)

    def calm_down(self) -> None:
        """Let everything settle: the job ends."""
        self.world.journal.full = False
        self.world.auto_persist = True
        self.world.settle()
        for worker in self.crew.workers.values():
            worker.connect()
        for _ in range(40):
            self.crew.finish()
            self.world.wait(1)
            self.crew.beat()
            if {info(self.world, job, tenant=tenant).state for tenant, job in JOBS.items()} == {"succeeded"}:
                break
        self.crew.finish()


def play(seed: int, alone: tuple[float, ...], moves: int = 100) -> Play:
    game = Play(seed)
    for _ in range(moves):
        game.move()
    game.calm_down()
    finished(game.world, game.spec)
    assert info(game.world, JOBS["b"], tenant="b").losses == alone
    return game


@pytest.mark.parametrize("block", range(8))
def test_no_page_is_lost_repeated_or_too_old_and_no_neighbour_disturbed_whatever_happens(
    block: int, alone: tuple[float, ...]
) -> None:
    for seed in range(20 * block, 20 * block + 20):
        try:
            play(seed, alone)
        except AssertionError as error:
            raise AssertionError(f"play({seed}) fails: {error}") from error


def test_the_games_are_not_idle(alone: tuple[float, ...]) -> None:
    games = [play(seed, alone) for seed in range(1000, 1010)]
    assert sum(log.event == "worker_lost" for game in games for log in game.world.logs) > 10
    stale = [point.staleness for game in games for point in info(game.world, "rl-1").updates]
    assert max(stale) >= 1
