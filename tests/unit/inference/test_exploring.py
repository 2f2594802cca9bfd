"""Promises of exploring in a group: what training needs comes back, nobody's numbers change, features are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from joynexus.specs import CriticSpec, ExplorationSpec, OptimizerSpec
from joynexus.vla.busy import BusyClock
from joynexus.vla.policy import Policy
from joynexus.vla.shared_forward import SharedForward
from joynexus.wire import ErrorCode, limits, rebuild
from joynexus.wire.back import Predicted, RlBegin
from tests.unit.inference.desk import Desk, Request
from tests.unit.workers import CHUNK, Arrays, MemoryStore, NoiseBackbone, spec

BEGIN = RlBegin(
    exploration=ExplorationSpec(), critic=CriticSpec(width=16), values=CHUNK, optimizer=OptimizerSpec(lr=1e-3)
)
FIELDS = ("sample", "log_prob", "value")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, features=MemoryStore())


def drawn(desk: Desk, answer: Predicted) -> dict[str, npt.NDArray[np.float32]]:
    assert answer.error is None, answer
    assert answer.exploration is not None
    found = {name: rebuild(getattr(answer.exploration, name), desk.answered) for name in FIELDS}
    return found | {"actions": desk.actions(answer)}


def alone(policy: Policy, request: Request) -> dict[str, npt.NDArray[np.float32]]:
    arrays = request.arrays
    features = NoiseBackbone().forward(arrays.observations())
    return policy.explore(features, arrays.state, seeds=request.seeds)._asdict()


def test_eight_tenants_explore_in_one_group_as_each_would_alone_bit_for_bit(desk: Desk) -> None:
    made = [desk.version(1, spec(seed=number), rl=BEGIN) for number in range(8)]
    requests = [
        Request(
            digest,
            Arrays(number, rows=4 + number),
            tenant=f"tenant{number}",
            seeds=tuple(range(10 * number, 10 * number + 4 + number)),
            explore=True,
        )
        for number, (digest, _) in enumerate(made)
    ]
    for request in requests[::2]:
        request.arrays.instructions[0] = "a much longer instruction than those of the others"
    answers = desk.predict(*requests)
    assert len(desk.backbone.groups) == 1
    for answer, request, (_, policy) in zip(answers, requests, made, strict=True):
        expected = alone(policy, request)
        for name, found in drawn(desk, answer).items():
            np.testing.assert_array_equal(found, expected[name], err_msg=name)


def test_who_explores_does_not_disturb_who_acts_in_the_same_group(desk: Desk) -> None:
    explorer, _ = desk.version(1, spec(seed=1), rl=BEGIN)
    other, policy = desk.version(2, spec(seed=2))
    acting = Request(other, Arrays(5, rows=4), version=2, tenant="bob")
    answers = desk.predict(Request(explorer, Arrays(4), seeds=(1, 2, 3, 4), explore=True), acting)
    assert answers[1].exploration is None
    np.testing.assert_array_equal(desk.actions(answers[1]), desk.alone(policy, acting))


def test_a_version_of_an_rl_job_still_acts_without_noise_if_it_is_not_to_explore(desk: Desk) -> None:
    digest, policy = desk.version(1, spec(seed=1), rl=BEGIN)
    request = Request(digest, Arrays(4), seeds=(1, 2, 3, 4))
    (answer,) = desk.predict(request)
    np.testing.assert_array_equal(desk.actions(answer), desk.alone(policy, request))


def test_an_algorithm_without_a_value_head_gets_values_of_no_numbers(desk: Desk) -> None:
    digest, _ = desk.version(1, rl=msgspec.structs.replace(BEGIN, critic=None, values=1))
    (answer,) = desk.predict(Request(digest, Arrays(4), seeds=(1, 2, 3, 4), explore=True))
    assert drawn(desk, answer)["value"].shape == (4, 0)


def test_a_version_that_no_rl_job_published_is_refused_in_one_sentence_and_disturbs_nobody(desk: Desk) -> None:
    plain, _ = desk.version(1)
    explorer, _ = desk.version(2, rl=BEGIN)
    refused, fine = desk.predict(
        Request(plain, Arrays(1), seeds=(1, 2, 3, 4), explore=True),
        Request(explorer, Arrays(2), version=2, seeds=(1, 2, 3, 4), explore=True),
    )
    assert refused.error is not None
    assert refused.error.code == ErrorCode.INVALID
    assert "version 1 cannot explore" in refused.error.message
    drawn(desk, fine)


def test_the_trainer_finds_explored_features_in_the_store_and_forwards_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    desk = Desk(tmp_path, features=store)
    digest, policy = desk.version(1, rl=BEGIN)
    request = Request(digest, Arrays(3, rows=6), seeds=tuple(range(6)), explore=True)
    (answer,) = desk.predict(request)
    forwarded = desk.backbone.samples_forwarded
    trainer = SharedForward(desk.backbone, store, BusyClock(torch.device("cpu")))
    seen = request.arrays.observations()
    keys = [trainer.key(f"tenant:{request.tenant}", observation) for observation in seen]
    need = trainer.look_up(keys, seen.__getitem__, policy.layers)
    trainer.complete([need])
    features = need.features()
    found = drawn(desk, answer)
    log_prob, _, value = policy.evaluate(features, request.arrays.state, found["sample"])
    np.testing.assert_array_equal(log_prob.detach().numpy(), found["log_prob"])
    np.testing.assert_array_equal(value.detach().numpy(), found["value"])
    assert desk.backbone.samples_forwarded == forwarded == 6


def test_moments_that_nobody_explores_from_are_not_put_into_the_shared_store(tmp_path: Path) -> None:
    store = MemoryStore()
    desk = Desk(tmp_path, features=store)
    digest, _ = desk.version(1, rl=BEGIN)
    desk.predict(Request(digest, Arrays(3)))
    assert not store.held


def test_exploring_without_pictures_takes_one_forward_in_all(desk: Desk) -> None:
    digest, _ = desk.version(1, spec(cameras=0), rl=BEGIN)
    for step in range(3):
        arrays = Arrays(step, rows=4, cameras=0)
        arrays.instructions = ["reach"] * 4
        (answer,) = desk.predict(Request(digest, arrays, seeds=(1, 2, 3, 4), explore=True))
        assert answer.exploration is not None
    assert desk.backbone.samples_forwarded == 1


def test_an_answer_that_the_connection_would_break_at_is_refused_and_disturbs_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, policy = desk.version(1, rl=BEGIN)
    large = Request(digest, Arrays(1, rows=8), seeds=tuple(range(8)), explore=True)
    small = Request(digest, Arrays(2), seeds=(1, 2, 3, 4), explore=True)
    monkeypatch.setattr(limits, "MAX_CONTROL_FRAME_BYTES", 4 * CHUNK * 2 * 4)  # of the smaller one's actions
    refused, fine = desk.predict(large, small)
    assert refused.error is not None
    assert refused.error.code == ErrorCode.TOO_LARGE
    assert "ask for fewer rows" in refused.error.message
    np.testing.assert_array_equal(drawn(desk, fine)["actions"], alone(policy, small)["actions"])


def test_a_policy_whose_values_overflow_is_refused_and_named(desk: Desk) -> None:
    digest, _ = desk.version(1, rl=BEGIN)
    loaded = desk.engine._shelf.get("ann", "arm", 1, digest).policy
    assert loaded.actor_critic is not None
    assert loaded.actor_critic.critic is not None
    loaded.actor_critic.critic.out.bias.data.fill_(float("inf"))
    (answer,) = desk.predict(Request(digest, Arrays(1), seeds=(1, 2, 3, 4), explore=True))
    assert answer.error is not None
    assert answer.error.code == ErrorCode.NON_FINITE
    assert "'value'" in answer.error.message
