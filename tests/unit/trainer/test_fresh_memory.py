"""A slot that another tenant takes over starts from its own seed, and has nothing of the former one.

Memory that nobody has written yet is NaN here, and all that the former slot held is made one number before it goes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import msgspec
import pytest
import torch
from torch import Tensor

from joynexus.specs import CriticSpec, ExplorationSpec, OptimizerSpec, PolicySpec
from joynexus.wire.back import RlBegin
from tests.unit.trainer.plain import plain_loop
from tests.unit.workers import Arrays, Bench, Group, opening, spec

SENTINEL = 7531.75
HEADS = {"oft": {"width": 16, "hidden": 32}, "groot": {"width": 16, "heads": 2, "layers": 2}}
BEGIN = RlBegin(exploration=ExplorationSpec(), critic=CriticSpec(width=8), values=3, optimizer=OptimizerSpec())


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.engine._max_slots = 1
    return bench


def made_of(head: str, seed: int, adapter: str = "none") -> PolicySpec:
    return msgspec.structs.replace(spec(seed=seed), head=head, head_config=HEADS[head], adapter=adapter)


def tensors_of(thing: object) -> list[Tensor]:
    """All tensors that can be reached from something, gradients too."""
    seen, todo, found = set(), [thing], []
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
            todo.append(each.grad)
        todo += gc.get_referents(each)
    return found


def slot(bench: Bench, name: str) -> object:
    return bench.engine._slots[f"of-{name}", name]


def use(bench: Bench, name: str, made: PolicySpec) -> int:
    """Train a policy in every way, and leave gradients behind; return how many tensors were made one number."""
    group = Group(opening(name, made)).train(name, 1, Arrays(1)).train(name, 2, Arrays(2))
    bench.done(group.op(name, 3, "rl_begin", rl=BEGIN).train(name, 4, Arrays(3), "forward_backward"))
    filled = [tensor for tensor in tensors_of(slot(bench, name)) if tensor.is_floating_point()]
    for tensor in filled:
        tensor.data.fill_(SENTINEL)
    return len(filled)


@pytest.mark.parametrize("adapter", ["none", "bottleneck"])
@pytest.mark.parametrize("head", HEADS)
def test_a_slot_taken_over_by_another_tenant_starts_from_its_own_seed(bench: Bench, head: str, adapter: str) -> None:
    made = made_of(head, 4, adapter)
    assert use(bench, "former", made_of(head, 3, adapter)) > 20, "nothing was there to find"
    done = bench.done(Group(opening("next", made)).train("next", 1, Arrays(7)).train("next", 2, Arrays(8)))
    assert [policy for _, policy in bench.engine.policies] == ["next"], "the former one has gone"
    losses = [each.result.metrics["loss"] for each in done]
    assert losses == plain_loop(made, [Arrays(7), Arrays(8)], draws=[1, 2])
    found = [tensor for tensor in tensors_of(slot(bench, "next")) if tensor.is_floating_point()]
    assert len(found) > 20
    assert not any((tensor == SENTINEL).any() or tensor.isnan().any() for tensor in found)


@pytest.mark.parametrize("head", HEADS)
def test_a_slot_opened_from_a_checkpoint_has_nothing_but_what_the_checkpoint_says(
    bench: Bench, head: str, tmp_path: Path
) -> None:
    made, stayed = made_of(head, 4), Bench(tmp_path / "stayed")
    for each in (bench, stayed):
        group = Group(opening("arm", made)).train("arm", 1, Arrays(1)).op("arm", 2, "rl_begin", rl=BEGIN)
        each.done(group.train("arm", 3, Arrays(2)))
    saved = bench.done(Group().op("arm", 3, "checkpoint"))[0].checkpoint
    use(bench, "former", made_of(head, 3))
    back = opening("arm", made, saved, 3)
    again = bench.done(Group(back).train("arm", 4, Arrays(5)))[-1]
    assert again.result == stayed.done(Group().train("arm", 4, Arrays(5)))[-1].result
    ours, theirs = (tensors_of(slot(each, "arm")) for each in (bench, stayed))
    sums = [sorted(float(t.double().sum()) for t in found if t.is_floating_point()) for found in (ours, theirs)]
    assert not any(tensor.isnan().any() or (tensor == SENTINEL).any() for tensor in ours)
    assert sums[0] == sums[1]


def test_the_sentinel_would_be_found(bench: Bench) -> None:
    """The check sees weights, gradients, both moments and what learns from rewards."""
    use(bench, "former", made_of("oft", 3))
    learner = slot(bench, "former")._learner
    seen = {id(tensor) for tensor in tensors_of(slot(bench, "former"))}
    parameters = list(learner.policy.module.parameters()) + list(learner.policy.actor_critic.parameters())
    held = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    held += [moment for moments in learner._moments.values() for moment in moments.values()]
    assert len(held) > 20
    assert {id(tensor) for tensor in held if isinstance(tensor, Tensor)} <= seen
