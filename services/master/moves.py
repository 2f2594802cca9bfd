"""Policies on their way from one trainer to another, because an operator says so or because loads differ.

In: `MovePolicy`, trainers that come and go, the time to look at loads. Out: policies with another home, and
`PolicyInfo` for whoever asked. Never: a policy in two trainers, an op that is lost or done twice, or a move without its
reason in the log.

A policy moves by checkpoint: the old home takes one behind the last op that was sent, nothing more is sent meanwhile,
and the new home opens it from there. If the old home dies on the way, the policy is at home in the new one at once and
replays what lies above its checkpoint; if the new one dies or leaves, the policy stays. A move is not journaled: a
master that was restarted starts over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice

import msgspec

from joynexus.wire import ErrorCode, Failure, JoyNexusError, failure
from joynexus.wire.front import MovePolicy
from services.master.config import CoreConfig
from services.master.events import FrontMessage
from services.master.outbox import Outbox, refuse
from services.master.placement import Place, best_mover, lopsided
from services.master.policies import Policies
from services.master.policy import Policy, PolicyKey
from services.master.trainees import Trainee
from services.master.trainers import Trainer

_LOOKED_AT = 64
_SETTLED_S = 60.0
"""A policy that has moved is not moved again for the sake of loads before."""


class Moves:
    """All moves.

    Args:
        trainers: those that are there, by name.
        trainee: gives a policy's place in the queue.
        queue: called with a policy that may go on.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        policies: Policies,
        trainers: Mapping[str, Trainer],
        trainee: Callable[[Policy], Trainee],
        queue: Callable[[Trainee], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._policies = policies
        self._trainers = trainers
        self._trainee = trainee
        self._queue = queue
        self._asked: defaultdict[PolicyKey, list[FrontMessage]] = defaultdict(list)
        self._balancing = False

    def on_move(self, asked: FrontMessage, message: MovePolicy) -> None:
        """An operator wants a policy to live elsewhere; answered once it does."""
        if not asked.operator:
            raise refuse(ErrorCode.FORBIDDEN, "only an operator may move a policy to another trainer")
        trainee = self._trainee(self._policies.get(message.tenant or asked.tenant, message.policy))
        target = self._target(trainee, message.trainer)
        if trainee.home is target.worker and trainee.target is None:
            self._outbox.answer(asked, trainee.policy.info())
            return
        self._asked[trainee.policy.key].append(asked)
        if trainee.home is None:
            target.settle(trainee)
            self._arrived(trainee)
        elif trainee.target is None:
            self._begin(trainee, target, "an operator asked for it")

    def carry_out(self, trainee: Trainee) -> None:
        """Whatever held a policy in its old home is over: it lives in the new one from now on."""
        source = self._trainers.get(trainee.home.name) if trainee.home else None
        target = self._trainers[trainee.target.name] if trainee.target else None
        if target is None:
            raise AssertionError(f"policy '{trainee.policy.name}' does not move anywhere")
        now = self._outbox.now
        demand = trainee.demand.mean(now)
        if source is not None:
            source.unsettle(trainee, now)
            source.load.shift(now, -demand)
        target.load.shift(now, demand)
        target.arriving.pop(trainee.policy.key)
        trainee.target = None
        target.settle(trainee)
        self._outbox.log(
            "info", "policy_moved", tenant=trainee.policy.tenant, policy=trainee.policy.name, to=target.name
        )
        self._arrived(trainee)

    def give_up(self, trainee: Trainee, why: str) -> None:
        """A policy stays where it is after all."""
        target = self._trainers.get(trainee.target.name) if trainee.target else None
        if target is not None:
            target.arriving.pop(trainee.policy.key, None)
        trainee.target = None
        if trainee.home is not None:
            self._trainers[trainee.home.name].keep(trainee)
        self._outbox.log("warning", "policy_stays", tenant=trainee.policy.tenant, policy=trainee.policy.name, why=why)
        sentence = f"policy '{trainee.policy.name}' was not moved because {why}: try again"
        self._answer(trainee, failure(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=1000))
        self._queue(trainee)

    def closed(self, trainer: Trainer, why: str) -> None:
        """Nobody can move to this trainer any more."""
        for trainee in list(trainer.arriving.values()):
            self.give_up(trainee, f"{trainer.name} {why}")
        trainer.arriving.clear()

    # For the sake of loads

    def balance(self) -> None:
        """Move a few policies if loads differ by enough; look again while there is more than one trainer."""
        groups: defaultdict[tuple[str, str], list[Trainer]] = defaultdict(list)
        for trainer in self._trainers.values():
            if not trainer.worker.leaving:
                groups[trainer.backbone, trainer.worker.register.batch_key].append(trainer)
        for trainers in groups.values():
            self._balance(trainers)
        if not self._balancing and any(len(trainers) > 1 for trainers in groups.values()):
            self._balancing = True
            self._outbox.after(self._config.balance_s, self._look_again)

    def _look_again(self) -> None:
        self._balancing = False
        self.balance()

    def _balance(self, trainers: list[Trainer]) -> None:
        while sum(len(trainer.arriving) for trainer in trainers) < self._config.moves_at_once:
            gap = lopsided(self._expected(trainers))
            if gap is None:
                return
            now = self._outbox.now
            able = [
                trainee
                for trainee in islice(self._trainers[gap.source].active.values(), _LOOKED_AT)
                if not trainee.vacating and not trainee.paused and now - trainee.moved_s >= _SETTLED_S
            ]
            index = best_mover([trainee.demand.mean(now) for trainee in able], gap)
            if index is None:
                return
            self._begin(able[index], self._trainers[gap.target], gap.reason)

    def _expected(self, trainers: list[Trainer]) -> list[Place]:
        """Describe trainers as they will be once those under way have arrived."""
        now = self._outbox.now
        loads = {trainer.name: trainer.load.mean(now) for trainer in trainers}
        for trainer in trainers:
            for trainee in trainer.arriving.values():
                demand = trainee.demand.mean(now)
                loads[trainer.name] += demand
                if trainee.home is not None and trainee.home.name in loads:
                    loads[trainee.home.name] -= demand
        return [msgspec.structs.replace(trainer.place(now), load=loads[trainer.name]) for trainer in trainers]

    # Inside

    def _target(self, trainee: Trainee, name: str) -> Trainer:
        """Return the trainer with this name.

        Raises:
            JoyNexusError: if the policy cannot live there, or is on its way to another one.
        """
        policy, target = trainee.policy, self._trainers.get(name)
        if target is None:
            known = ", ".join(sorted(self._trainers)) or "none now"
            raise refuse(ErrorCode.NOT_FOUND, f"there is no trainer '{name[:80]}': there is {known}")
        if target.backbone != policy.spec.backbone:
            sentence = f"{name} has backbone '{target.backbone}', policy '{policy.name}' needs '{policy.spec.backbone}'"
            raise refuse(ErrorCode.INVALID, f"{sentence}: choose a trainer with that one")
        if target.worker.leaving:
            raise refuse(ErrorCode.UNAVAILABLE, f"{name} is leaving: choose a trainer that stays")
        home = trainee.home
        if home is not None and home.register.batch_key != target.worker.register.batch_key:
            raise self._conflict(
                f"{name} computes with another revision, type or kernel of its backbone than {home.name} does, which "
                f"would change the numbers of policy '{policy.name}': choose a trainer like {home.name}"
            )
        if trainee.target is not None and trainee.target is not target.worker:
            raise self._conflict(
                f"policy '{policy.name}' is on its way to {trainee.target.name}: wait until it is there"
            )
        return target

    def _conflict(self, sentence: str) -> JoyNexusError:
        return refuse(ErrorCode.CONFLICT, sentence)

    def _begin(self, trainee: Trainee, target: Trainer, reason: str) -> None:
        policy = trainee.policy
        trainee.target, trainee.vacating, trainee.moved_s = target.worker, True, self._outbox.now
        target.arriving[policy.key] = trainee
        source = trainee.home.name if trainee.home else ""
        self._outbox.log(
            "info", "policy_moves", tenant=policy.tenant, policy=policy.name, source=source, to=target.name, why=reason
        )
        self._be_patient(trainee, trainee.moved_s)
        self._queue(trainee)

    def _be_patient(self, trainee: Trainee, began: float) -> None:
        """A policy whose gradients wait for a step that does not come goes without; what is lost is replayed."""

        def look() -> None:
            if trainee.target is None or trainee.moved_s != began or trainee.home is None:
                return
            if trainee.cornered and not trainee.in_flight and not trainee.has_work:
                self._trainers[trainee.home.name].close(trainee)
                self._queue(trainee)
            else:
                self._be_patient(trainee, began)

        self._outbox.after(self._config.stuck_s, look)

    def _arrived(self, trainee: Trainee) -> None:
        self._answer(trainee, None)
        self._queue(trainee)

    def _answer(self, trainee: Trainee, error: Failure | None) -> None:
        for asked in self._asked.pop(trainee.policy.key, ()):
            self._outbox.answer(asked, error or trainee.policy.info())
