"""Hosts of tests: one that pulls, works and says what it is told to, and jobs that need one."""

from __future__ import annotations

from joynexus.specs import EvaluateSpec
from joynexus.wire import Message
from joynexus.wire.back import DescribeSimulator, Rollout, RolloutDone
from joynexus.wire.front import EpisodeResult, GetJob, JobInfo, SubmitJob
from joynexus.wire.hosted import EnvironmentOffered, HostDone, OfferEnvironment, PulledWork, PullWork
from services.master.config import CoreConfig
from tests.unit.master.actors import new_incarnation
from tests.unit.master.world import CONTRACT, World

CONFIG = CoreConfig()


class FakeHost:
    """A host that does what the test says, step by step."""

    def __init__(
        self, world: World, *, tenant: str = "a", name: str = "mine", credit: int = 1, offer: bool = True
    ) -> None:
        self.world, self.tenant = world, tenant
        self.incarnation = new_incarnation()
        self.peer = world.new_peer("front")
        self.offering = OfferEnvironment(
            name=name, incarnation=self.incarnation, credit=credit, contract=CONTRACT, instruction="go"
        )
        self.have: dict[tuple[str, int], Rollout | DescribeSimulator] = {}
        self.asked = ""
        if offer:
            self.ask(self.offering, EnvironmentOffered)

    def ask(self, message: Message, expect: type) -> Message:
        return self.world.ask(message, expect, tenant=self.tenant, peer=self.peer)

    def pull(self) -> None:
        """Ask for work, and take it as soon as it comes (`take`)."""
        message = PullWork(incarnation=self.incarnation, have=tuple(sorted(self.have)))
        self.asked = self.world.tell(message, tenant=self.tenant, peer=self.peer)

    def take(self) -> list[Rollout | DescribeSimulator]:
        """Take in the answer to the last pull, if there is one."""
        taken = []
        for answer in self.world.answers(self.asked):
            assert isinstance(answer, PulledWork), answer
            for task in answer.cancelled:
                self.have = {key: work for key, work in self.have.items() if key[0] != task}
            for work in (answer.rollout, answer.describe):
                if work is not None and (work.task, work.attempt) not in self.have:
                    self.have[work.task, work.attempt] = work
                    taken.append(work)
        return taken

    def work(self) -> int:
        """Pull, and do everything that comes."""
        done = 0
        while True:
            self.pull()
            if not self.take():
                return done
            for work in list(self.have.values()):
                self.finish(work)
                done += 1

    def answer(self, work: Rollout) -> RolloutDone:
        episodes = tuple(
            EpisodeResult(
                seed=seed, success=seed % 2 == 0, steps=10, reward=1.0, failure="" if seed % 2 == 0 else "limit"
            )
            for seed in work.seeds
        )
        return RolloutDone(task=work.task, attempt=work.attempt, episodes=episodes, contract_digest="c", busy_s=9e9)

    def finish(self, work: Rollout, done: RolloutDone | None = None) -> Message:
        """Give a result; return what the master says to it."""
        message = HostDone(incarnation=self.incarnation, rollout=done or self.answer(work))
        self.have.pop((work.task, work.attempt), None)
        answers = self.world.answers(self.world.tell(message, tenant=self.tenant, peer=self.peer))
        assert len(answers) == 1
        return answers[0]


def evaluate(world: World, *, tenant: str = "a", key: str = "k", env: str = "own/mine", episodes: int = 10) -> JobInfo:
    spec = EvaluateSpec(policy="p", env=env, episodes=episodes)
    return world.ask(SubmitJob(key=key, spec=spec), JobInfo, tenant=tenant)


def info(world: World, job: JobInfo, *, tenant: str = "a") -> JobInfo:
    return world.ask(GetJob(job=job.job), JobInfo, tenant=tenant)


def solved(world: World, job: JobInfo) -> None:
    ended = info(world, job)
    assert ended.state == "succeeded", ended.message
    assert ended.evaluation is not None
    assert [episode.seed for episode in ended.evaluation.results] == list(range(10))
    assert ended.evaluation.successes == 5


def one_page(world: World) -> tuple[FakeHost, JobInfo, Rollout]:
    host = FakeHost(world)
    job = evaluate(world)
    host.pull()
    (work,) = host.take()
    assert isinstance(work, Rollout)
    return host, job, work
