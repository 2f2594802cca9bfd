"""Every interleaving that chance finds: lost and repeated requests, dead trainers, dead masters, full disks.

After each the promise is the same: every acknowledged op was applied exactly once, in order, in the weights that count.
A failure names its seed; `play(seed)` plays it again.
"""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from joynexus.wire.back import Leaving, TrainItem
from joynexus.wire.errors import Failure
from joynexus.wire.front import (
    Accepted,
    ForwardBackward,
    GetPolicy,
    LoadState,
    MovePolicy,
    OpResult,
    OptimStep,
    PolicyInfo,
    Publish,
    SaveState,
)
from joynexus.wire.messages import Message
from services.master.config import CoreConfig
from tests.unit.master.actors import BLOBS, FakeTrainer, Weights, apply, new_incarnation
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.world import World, run

CONFIG = CoreConfig(
    checkpoint_steps=3,
    turn_ops=2,
    group_ops=5,
    kept_replies=4,
    kills=10_000,
    payload_memory_bytes=200,
    stuck_s=2.0,
)


class Client:
    """A tenant's loop: numbers its ops, resends what was not answered, remembers what it was told."""

    def __init__(self, world: World, tenant: str, policy: str) -> None:
        self.world = world
        self.tenant = tenant
        self.policy = policy
        self.ops: list[Message] = []  # seq 1 is ops[0]
        self.acknowledged = 0
        self.results: dict[int, OpResult] = {}
        self.lease = ""
        self._ids = itertools.count()
        self._read = 0
        world.create(policy, tenant=tenant)

    def acquire(self) -> None:
        self.lease = self.world.lease(self.policy, tenant=self.tenant)

    def new_op(self, kind: str) -> None:
        seq = len(self.ops) + 1
        place = {"policy": self.policy, "lease": self.lease, "seq": seq}
        message: Message
        match kind:
            case "forward_backward":
                message = msgspec.structs.replace(forward(self.lease, seq, text=f"op {seq}"), policy=self.policy)
            case "publish":
                message = Publish(**place)
            case "save_state":
                message = SaveState(**place, state="s")
            case "load_state" if any(isinstance(op, SaveState) for op in self.ops):
                message = LoadState(**place, state="s")
            case _:
                message = OptimStep(**place)
        self.ops.append(message)

    def send(self, seq: int) -> None:
        message = msgspec.structs.replace(self.ops[seq - 1], lease=self.lease)  # type: ignore[type-var]
        buffers = BUFFERS if isinstance(message, ForwardBackward) else ()
        self.world.tell(
            message, tenant=self.tenant, buffers=buffers, id=f"{self.tenant}-{self.policy}-{seq}-{next(self._ids)}"
        )

    def hear(self) -> None:
        """Read the answers that came since the last time."""
        for send in self.world.told[self._read :]:
            parts = send.re.split("-")
            if parts[:2] == [self.tenant, self.policy] and not isinstance(send.message, Failure):
                self._heard(int(parts[2]), send.message)
        self._read = len(self.world.told)

    def _heard(self, seq: int, message: Message) -> None:
        assert isinstance(message, Accepted | OpResult), message
        self.acknowledged = max(self.acknowledged, seq)
        if isinstance(message, OpResult):
            known = self.results.setdefault(seq, message)
            assert known == message, "a result never changes once it was told"


def reference(world: World, client: Client, upto: int) -> Weights:
    """What an undisturbed trainer comes to after so many ops."""
    weights, saved = Weights(), ""
    for seq, message in enumerate(client.ops[:upto], start=1):
        kind = {
            ForwardBackward: "forward_backward",
            OptimStep: "optim_step",
            Publish: "publish",
            SaveState: "save_state",
            LoadState: "load_state",
        }[type(message)]
        item = TrainItem(tenant=client.tenant, policy=client.policy, seq=seq, kind=kind, state=saved)  # type: ignore[arg-type]
        samples = b""
        if isinstance(message, ForwardBackward):
            samples = msgspec.msgpack.encode(message.samples) + b"".join(BUFFERS)
        weights, _ = apply(weights, item, samples)
        if kind == "save_state":
            saved = weights.digest()
            BLOBS[saved] = weights
    return weights


KINDS = ["forward_backward", "optim_step", "optim_step", "publish", "save_state", "load_state"]


class Play:
    """Chance plays with a master, two trainers and three policies of two tenants."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(CONFIG)
        self.calm = False
        self.slots = self.chance.choice((0, 1, 2))
        self.trainers = [self.new_trainer(index) for index in range(2)]
        self.clients = [Client(self.world, tenant, policy) for tenant, policy in (("a", "p"), ("a", "q"), ("b", "p"))]
        for client in self.clients:
            client.acquire()
        self.moves = {
            self.send_new_ops: 8,
            self.resend: 4,
            self.trainer_works: 8,
            self.trainer_dies_and_another_comes: 1,
            self.trainer_is_declared_dead_but_lives: 1,
            self.trainers_connection_breaks: 1,
            self.trainer_leaves_and_another_comes: 1,
            self.operator_moves_a_policy: 3,
            self.journal_falls_behind: 3,
            self.journal_catches_up: 3,
            self.disk_is_full_for_a_while: 1,
            self.disk_has_room_again: 2,
            self.master_dies: 1,
        }

    def move(self) -> None:
        (move,) = self.chance.choices(list(self.moves), list(self.moves.values()))
        move()
        for client in self.clients:
            client.hear()

    # The tenants

    def send_new_ops(self) -> None:
        client = self.chance.choice(self.clients)
        client.hear()
        if self.world.journal.full or len(client.ops) > client.acknowledged:
            return
        for kind in self.chance.choices(KINDS, k=self.chance.randint(1, 4)):
            client.new_op(kind)
            client.send(len(client.ops))

    def resend(self) -> None:
        client = self.chance.choice(self.clients)
        client.hear()
        seq = client.acknowledged + 1 - self.chance.randint(0, 6)
        if 1 <= seq <= len(client.ops):
            client.send(seq)

    # The machinery

    def new_trainer(self, which: int) -> FakeTrainer:
        return FakeTrainer(self.world, new_incarnation(), key=f"t{which}", max_slots=self.slots)

    def trainer_leaves_and_another_comes(self) -> None:
        which = self.chance.randrange(2)
        self.world.say(self.trainers[which].peer, Leaving())
        self.trainers[which].work()
        self.trainers[which].die()
        self.world.wait(2.5 * CONFIG.beat_ms / 1000)
        self.trainers[1 - which].beat()
        self.trainers[which] = self.new_trainer(which)

    def operator_moves_a_policy(self) -> None:
        client = self.chance.choice(self.clients)
        name = f"trainer-{self.chance.randint(1, 2)}"
        self.world.tell(MovePolicy(policy=client.policy, trainer=name), tenant=client.tenant, operator=True)

    def trainer_works(self) -> None:
        self.chance.choice(self.trainers).work(self.chance.randint(1, 3))

    def trainer_dies_and_another_comes(self) -> None:
        which = self.chance.randrange(2)
        self.trainers[which].die()
        self.world.wait(2.5 * CONFIG.beat_ms / 1000)
        self.trainers[1 - which].beat()
        self.trainers[which] = self.new_trainer(which)

    def trainer_is_declared_dead_but_lives(self) -> None:
        which = self.chance.randrange(2)
        for _ in range(8):
            self.world.wait(1)
            self.trainers[1 - which].beat()
        self.trainers[which].work(1)  # its late results count for nothing
        self.trainers[which].connect()

    def trainers_connection_breaks(self) -> None:
        self.chance.choice(self.trainers).connect()

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

    def master_dies(self) -> None:
        self.world.crash()
        for trainer in self.trainers:
            trainer.connect()

    # The promises

    def calm_down(self) -> None:
        """Let everything settle; then what counts must be what an undisturbed run gives."""
        world, self.calm = self.world, True
        world.journal.full = False
        world.auto_persist = True
        world.settle()
        self._pass_time(12)
        for trainer in self.trainers:
            trainer.connect()
        for client in self.clients:
            client.acquire()  # it may have been silent for too long
            for _ in range(3):
                client.hear()
                for seq in range(client.acknowledged + 1, len(client.ops) + 1):
                    client.send(seq)
                run(*self.trainers)
        self._pass_time(12)
        for client in self.clients:
            self._check(client)

    def _pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.wait(1)
            for trainer in self.trainers:
                trainer.beat()
            if self.calm:
                run(*self.trainers)

    def _check(self, client: Client) -> None:
        client.hear()
        info = self.world.ask(GetPolicy(policy=client.policy), PolicyInfo, tenant=client.tenant)
        assert info.next_seq == len(client.ops) + 1
        assert client.acknowledged == len(client.ops)
        expected = reference(self.world, client, len(client.ops))
        assert info.step == expected.step
        # One more op makes whichever trainer has the policy now bring it up to date; its weights must be right.
        client.acquire()
        client.new_op("publish")
        client.send(len(client.ops))
        self._pass_time(8)
        client.hear()
        result = client.results[len(client.ops)]
        assert result.error is None
        assert result.digest == msgspec.structs.replace(expected, applied_seq=len(client.ops)).digest()
        assert not [log for log in self.world.logs if log.event in ("replay_differs", "op_out_of_order")]


def play(seed: int, moves: int = 60) -> Play:
    game = Play(seed)
    for _ in range(moves):
        game.move()
    game.calm_down()
    return game


@pytest.mark.parametrize("block", range(10))
def test_every_acknowledged_op_is_applied_once_and_in_order_whatever_happens(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"play({seed}) fails: {error}") from error


def test_the_games_are_not_idle() -> None:
    games = [play(seed) for seed in range(1000, 1010)]
    assert sum(len(client.ops) for game in games for client in game.clients) > 150
    assert sum(log.event == "policy_moved" for game in games for log in game.world.logs) > 5
    assert sum(log.event == "worker_lost" for game in games for log in game.world.logs) > 10
    assert sum(sum(trainer.applied.values()) for game in games for trainer in game.trainers) > 150
