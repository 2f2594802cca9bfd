"""Chance plays with all that is pure, put together: clients' cores, the master's core, and workers' sessions.

Between them is a network that loses, repeats and reorders what clients say (as changing connections do), breaks
workers' connections, and delivers late what dead workers have said. Anything may die; disks fill up; time jumps.
After each step and in the end the promises are checked, with hypothesis looking for the shortest play that breaks one.
"""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from joynexus.client._events import Tick
from joynexus.wire.front import Accepted, GetPolicy, OpResult, PolicyInfo
from services.master.events import Tick as MasterTick
from tests.unit.master.machine import CONFIG, PATIENCE_S, TENANTS, Ledger, Link, Loop, Trainer, policy_of, reference
from tests.unit.master.world import World


class Cluster(RuleBasedStateMachine):
    """Two tenants, one master, two trainers, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.world = World(CONFIG, self.ledger)
        for tenant in TENANTS:
            self.world.create(policy_of(tenant), tenant=tenant)
        self.loops = {tenant: Loop(self.world, tenant) for tenant in TENANTS}
        self.trainers = [Trainer(self.world, f"t{number}") for number in range(2)]
        self.late: list[Link] = []  # of those that are gone: what they said may arrive yet
        self.spent = 0.0
        self.read = 0  # of what tenants were told

    # Tenants

    @rule(
        tenant=st.sampled_from(TENANTS),
        kinds=st.lists(
            st.sampled_from(["forward_backward", "optim_step", "optim_step", "publish", "save_state"]),
            min_size=1,
            max_size=3,
        ),
    )
    def order(self, tenant: str, kinds: list[str]) -> None:
        for kind in kinds:
            self.loops[tenant].order(kind)

    @rule(tenant=st.sampled_from(TENANTS), index=st.integers(0, 2), again=st.booleans())
    def master_hears_a_client(self, tenant: str, index: int, again: bool) -> None:
        link = self.loops[tenant].link
        if index < len(link.up):
            frames = link.up[index]
            link.deliver(index)
            if again:
                link.receive(frames)

    @rule(tenant=st.sampled_from(TENANTS), index=st.integers(0, 2))
    def client_hears(self, tenant: str, index: int) -> None:
        loop = self.loops[tenant]
        if index < len(loop.link.down):
            loop.hear(index)

    @rule(tenant=st.sampled_from(TENANTS), up=st.booleans(), index=st.integers(0, 2))
    def message_is_lost(self, tenant: str, up: bool, index: int) -> None:
        link = self.loops[tenant].link
        queue = link.up if up else link.down
        if index < len(queue):
            del queue[index]

    @rule(tenant=st.sampled_from(TENANTS))
    def clients_connection_breaks(self, tenant: str) -> None:
        loop = self.loops[tenant]
        self._gone(loop.link)
        loop.connect()

    # Trainers

    @rule(which=st.integers(0, 1), up=st.integers(0, 4), down=st.integers(0, 4))
    def trainer_and_master_talk(self, which: int, up: int, down: int) -> None:
        trainer = self.trainers[which]
        for _ in range(min(up, len(trainer.link.up))):
            trainer.link.deliver()
        for _ in range(min(down, len(trainer.link.down))):
            trainer.hear()

    @rule(which=st.integers(0, 1), count=st.integers(1, 3))
    def trainer_works(self, which: int, count: int) -> None:
        self.trainers[which].work(count)

    @rule(which=st.integers(0, 1))
    def trainers_connection_breaks(self, which: int) -> None:
        trainer = self.trainers[which]
        self._gone(trainer.link)
        trainer.connect()

    @rule(which=st.integers(0, 1))
    def trainer_dies(self, which: int) -> None:
        self._gone(self.trainers[which].link)
        self.trainers[which] = Trainer(self.world, f"t{which}")

    @precondition(lambda self: self.late)
    @rule()
    def late_words_arrive(self) -> None:
        link = self.late[0]
        link.deliver()
        if not link.up:
            self.late.pop(0)

    # The master, its disk, and time

    @precondition(lambda self: self.spent < PATIENCE_S)
    @rule()
    def master_dies(self) -> None:
        self.world.auto_persist = True
        self.late.clear()  # connections end with it
        self.world.crash()
        self.spent += 0.5
        ends: list[Loop | Trainer] = [*self.loops.values(), *self.trainers]
        for end in ends:
            end.connect()

    @rule(behind=st.booleans())
    def journal_is_slow(self, behind: bool) -> None:
        self.world.auto_persist = not behind
        self.world.settle()

    @rule(full=st.booleans())
    def disk_is_full(self, full: bool) -> None:
        self.ledger.full = full

    @precondition(lambda self: self.spent < PATIENCE_S)
    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 8.0]), jumps=st.booleans())
    def time_passes(self, seconds: float, jumps: bool) -> None:
        seconds = min(seconds, PATIENCE_S - self.spent)
        self.spent += seconds
        if jumps:  # the machine slept: nobody had a chance to do anything meanwhile
            self.world.now += seconds
            self.world.event(MasterTick())
            seconds = 0.01
        self._wait(seconds)

    # Promises

    @invariant()
    def what_was_told_is_on_disk_and_is_ones_own(self) -> None:
        for send in self.world.told[self.read :]:
            tenant = next((name for name, loop in self.loops.items() if loop.link.peer == send.peer), "")
            if not tenant:
                continue
            said = msgspec.msgpack.encode(send.message)
            assert all(f"of-{other}".encode() not in said for other in TENANTS if other != tenant)
            message = send.message
            if isinstance(message, Accepted | OpResult):
                rows = self.ledger.ops[tenant, policy_of(tenant)]
                assert message.seq in rows, "an op is acknowledged once it is on disk"
                assert len(rows[message.seq]) >= 1 + isinstance(message, OpResult), "and so is its result"
        self.read = len(self.world.told)

    @invariant()
    def no_op_is_done_out_of_order_or_with_another_result(self) -> None:
        assert not [log for log in self.world.logs if log.event in ("replay_differs", "op_out_of_order")]

    def teardown(self) -> None:
        """Let everything settle; then everybody has what an undisturbed cluster would have given."""
        self.ledger.full = False
        self.world.auto_persist = True
        self.world.settle()
        self._calm(20)
        for loop in self.loops.values():
            loop.order("publish")  # whichever trainer has the policy now brings it up to date
        self._calm(20)
        self.what_was_told_is_on_disk_and_is_ones_own()
        for tenant, loop in self.loops.items():
            assert loop.core.waiting == loop.core.lanes.waiting == 0, "every request is answered"
            assert set(loop.resolved) == set(loop.ordered)
            info = self.world.ask(GetPolicy(policy=policy_of(tenant)), PolicyInfo, tenant=tenant)
            assert info.next_seq == len(loop.ordered) + 1, "every op was applied once"
            seqs = [loop.resolved[name].seq for name in loop.ordered]
            assert seqs == sorted(seqs), "and in order"
            expected = reference(self.ledger.history[tenant], len(loop.ordered))
            assert info.step == expected.step
            assert loop.resolved[loop.ordered[-1]].digest == expected.digest()
        for trainer in self.trainers:
            assert trainer.session.undelivered == 0
            assert not trainer.fake.inbox
        roster = self.world.core._roster
        assert all(not worker.given for worker in roster.living("trainer")), "credit is back"
        assert not self.world.core._outbox._saving
        assert not self.world.core._outbox._unsaved

    # Inside

    def _gone(self, link: Link) -> None:
        link.cut()
        if link.up:
            self.late.append(link)

    def _wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        for loop in self.loops.values():
            loop.handle(Tick())
        for trainer in self.trainers:
            trainer.pump()

    def _calm(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self._wait(0.25)
            busy = True
            while busy:
                busy = False
                for link in self.late:
                    while link.up:
                        link.deliver()
                self.late.clear()
                for loop in self.loops.values():
                    while loop.link.up:
                        loop.link.deliver()
                        busy = True
                    while loop.link.down:
                        loop.hear()
                        busy = True
                for trainer in self.trainers:
                    trainer.work(10)
                    while trainer.link.up:
                        trainer.link.deliver()
                        busy = True
                    while trainer.link.down:
                        trainer.hear()
                        busy = True


Cluster.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPromisesHoldWhateverHappens = Cluster.TestCase
