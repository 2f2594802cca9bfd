"""Promises of slots that come and go: nothing of an old one is left, neither in memory nor in a new one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from common.blobs import digest_file
from joynexus.wire import ErrorCode
from joynexus.wire.back import SlotFailed, TrainDone
from tests.unit.trainer.plain import plain_loop
from tests.unit.workers import Arrays, Bench, Group, opening, spec


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def close(bench: Bench, policy: str) -> None:
    message = msgspec.structs.replace(Group().message(), close=((f"of-{policy}", policy),))
    assert list(bench.engine.run(message)) == []


def checkpoint(bench: Bench, policy: str, seq: int) -> str:
    return bench.done(Group().op(policy, seq, "checkpoint"))[0].checkpoint


def test_a_closed_slot_is_freed_with_everything_that_training_made(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2), "forward_backward"))
    learner = bench.engine._slots["of-arm", "arm"]._learner
    made = [*learner.policy.module.parameters(), *(p.grad for p in learner.policy.module.parameters())]
    made += [tensor for moments in learner._moments.values() for tensor in moments.values()]
    watched = [weakref.ref(tensor) for tensor in made if tensor is not None]
    assert len(watched) > 20
    del learner, made
    close(bench, "arm")
    gc.collect()
    assert [watch for watch in watched if watch() is not None] == []


@pytest.mark.slow
def test_hundreds_of_slots_come_and_go_and_memory_stays_flat(bench: Bench) -> None:
    """Counts tensors that are alive, which is exact where resident memory is not."""

    def alive() -> int:
        gc.collect()
        return sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects())

    def page(number: int) -> None:
        name = f"p{number % 7}"
        saved = saves.get(name, ("", 0))
        slot = opening(name, checkpoint=saved[0], applied_seq=saved[1])
        bench.done(Group(slot).train(name, saved[1] + 1, batch))
        saves[name] = checkpoint(bench, name, saved[1] + 1), saved[1] + 1
        close(bench, name)

    def put(path: Path) -> tuple[str, int]:  # durable pages are the blob store's matter, and slow
        digest = digest_file(path)
        path.replace(bench.folder / digest)
        return digest, 0

    bench.put_blob, bench.open_blob = put, lambda digest: bench.folder / digest
    saves: dict[str, tuple[str, int]] = {}
    batch = Arrays(1, rows=1)
    for number in range(20):
        page(number)
    before = alive()
    for number in range(20, 300):
        page(number)
    assert alive() <= before
    assert bench.engine.policies == ()


def test_a_fresh_slot_of_a_name_that_was_used_has_nothing_of_the_old_one(bench: Bench) -> None:
    huge = Arrays(3)
    huge.action[:] = 3e38
    group = Group(opening("arm")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2), "forward_backward")
    bench.run(group.train("arm", 3, huge, "forward_backward"))  # weights, moments, gradients, results and a veto
    close(bench, "arm")
    fresh = Group(opening("arm")).train("arm", 1, Arrays(7)).train("arm", 2, Arrays(8))
    assert [done.result.metrics["loss"] for done in bench.done(fresh)] == plain_loop(spec(), [Arrays(7), Arrays(8)])


def test_a_policy_that_takes_a_deleted_ones_name_is_another_one_also_if_nobody_closed_the_old_slot(
    bench: Bench,
) -> None:
    first = bench.done(Group(opening("arm", life="1")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2)))
    again = bench.done(Group(opening("arm", life="1")).train("arm", 1, Arrays(1)).train("arm", 2, Arrays(2)))
    assert [done.result for done in again] == [done.result for done in first], "a restarted master asks again"
    other = bench.done(Group(opening("arm", life="2")).train("arm", 1, Arrays(7)).train("arm", 2, Arrays(8)))
    assert [done.result.metrics["loss"] for done in other] == plain_loop(spec(), [Arrays(7), Arrays(8)])


@pytest.mark.parametrize("head", ["oft", "groot"])
def test_a_slot_that_was_paged_out_goes_on_as_if_it_had_stayed(bench: Bench, head: str, tmp_path: Path) -> None:
    sizes = {"width": 16, "heads": 2, "layers": 2} if head == "groot" else {"width": 16, "hidden": 32}
    made_of = msgspec.structs.replace(spec(), head=head, head_config=sizes)
    stayed = Bench(tmp_path / "stayed")
    group = Group(opening("arm", made_of))
    for seq in range(1, 5):
        group.train("arm", seq, Arrays(seq))
    expected = [done.result for done in stayed.done(group)]
    slot, results = opening("arm", made_of), []
    for seq in range(1, 5):
        torch.manual_seed(seq)  # the global generator is nobody's
        results += [done.result for done in bench.done(Group(slot).train("arm", seq, Arrays(seq)))]
        slot = opening("arm", made_of, checkpoint(bench, "arm", seq), seq)
        close(bench, "arm")
    assert results == expected


def test_opening_from_a_checkpoint_draws_no_weights(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    slot = opening("arm", checkpoint=checkpoint(bench, "arm", 1), applied_seq=1)
    close(bench, "arm")

    def draw(*_: object, **__: object) -> None:
        raise AssertionError("a weight was drawn that would be overwritten at once")

    monkeypatch.setattr(torch.Tensor, "uniform_", draw)
    monkeypatch.setattr(torch.Tensor, "normal_", draw)
    assert bench.done(Group(slot).train("arm", 2, Arrays(2)))[0].step == 2


def test_moments_that_overflowed_do_not_keep_a_policy_out_of_memory(bench: Bench) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))
    bench.engine._slots["of-arm", "arm"]._learner._moments["gate"]["exp_avg_sq"].fill_(torch.inf)
    slot = opening("arm", checkpoint=checkpoint(bench, "arm", 1), applied_seq=1)
    stayed = bench.done(Group().train("arm", 2, Arrays(2)))[0]
    bench.fresh()
    assert bench.done(Group(slot).train("arm", 2, Arrays(2)))[0].result == stayed.result


def test_every_answer_says_what_its_slot_takes(bench: Bench) -> None:
    trained, saved = bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)).op("arm", 1, "checkpoint"))
    assert trained.slot_bytes == saved.slot_bytes == bench.engine._slots["of-arm", "arm"].trained.memory_bytes > 0


def test_a_head_that_refuses_samples_answers_its_op_and_keeps_its_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.done(Group(opening("arm")).train("arm", 1, Arrays(1)))

    def refuse(*_: object) -> None:
        raise ValueError("this head wants a step that counts in every chunk")

    with monkeypatch.context() as patched:
        patched.setattr(bench.engine._slots["of-arm", "arm"].trained.module, "loss", refuse)
        refused = bench.one(Group().train("arm", 2, Arrays(2)))
    assert refused.result.error is not None
    assert (refused.result.error.code, refused.result.error.category) == (ErrorCode.INVALID, "user")
    after = bench.run(Group().train("arm", 3, Arrays(3)))[0]
    assert not isinstance(after, SlotFailed)
    assert isinstance(after, TrainDone)
    assert [after.result.metrics["loss"]] == plain_loop(spec(), [Arrays(1), Arrays(3)])[1:]


def test_slots_that_a_restarted_master_does_not_know_of_make_room_the_longest_unused_first(bench: Bench) -> None:
    bench.engine._max_slots = 2
    for number, name in enumerate(("a", "b")):
        bench.done(Group(opening(name)).train(name, 1, Arrays(number)))
    bench.done(Group().train("a", 2, Arrays(2)))
    bench.done(Group(opening("c")).train("c", 1, Arrays(3)))
    assert [policy for _, policy in bench.engine.policies] == ["a", "c"]
    bench.done(Group(opening("d"), opening("e"), opening("f")).train("d", 1, Arrays(4)))
    assert [policy for _, policy in bench.engine.policies] == ["d", "e", "f"], "what a group needs is never dropped"


def test_a_new_policy_too_large_for_the_trainer_is_refused_and_others_keep_their_slots(bench: Bench) -> None:
    bench.done(Group(opening("small")).train("small", 1, Arrays(1)))
    bench.engine._slot_bytes = 8 * 1024**2
    large = opening("large", msgspec.structs.replace(spec(), head_config={"hidden": 2048}))
    (answer,) = bench.run(Group(large).train("large", 1, Arrays(2)))
    assert isinstance(answer, SlotFailed)
    assert answer.error.code is ErrorCode.INVALID
    assert "GiB to train" in answer.error.message
    assert [policy for _, policy in bench.engine.policies] == ["small"]
