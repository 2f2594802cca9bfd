"""Promises of the inference engine: one forward a group, actions of acting alone, faults that stay with a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.busy import BusyClock, Overhead
from joynexus.vla.exported import ExportedPolicy, export_policy
from joynexus.vla.numerics import probe
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
from joynexus.wire import ErrorCode
from joynexus.wire.back import PredictGroup, PredictItem, WeightsApplied, WeightsOffer
from tests.unit.inference.desk import Desk, Request
from tests.unit.workers import SIDE, WRECK, Arrays, Bench, Group, MemoryStore, NoiseBackbone, contract, opening, spec


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_group_goes_through_the_backbone_once_and_nobodys_actions_change(desk: Desk) -> None:
    first, one = desk.version(1)
    second, two = desk.version(2, spec(seed=8))
    requests = [
        Request(first, Arrays(1, rows=1)),
        Request(second, Arrays(2, rows=5), version=2, tenant="bob"),
        Request(first, Arrays(3, rows=2)),
    ]
    requests[2].arrays.instructions = ["a much longer instruction than those of the others", "short"]
    answers = desk.predict(*requests)
    assert desk.backbone.groups == [8]
    for answer, request, policy in zip(answers, requests, (one, two, one), strict=True):
        assert np.array_equal(desk.actions(answer), desk.alone(policy, request))
        assert (answer.version, answer.rows) == (request.version, len(request.arrays.state))
        assert answer.backbone_forwards == answer.rows
        assert answer.busy_s > 0


def test_an_exported_policy_acts_as_the_served_version_bit_for_bit(desk: Desk, tmp_path: Path) -> None:
    digest, _ = desk.version(1)
    request = Request(digest, Arrays(1, rows=1))
    (answer,) = desk.predict(request)
    export_policy(desk.blobs.path(digest), tmp_path / "exported")
    loaded = read_version(tmp_path / "exported" / "policy.safetensors")
    arrays = request.arrays
    exported = ExportedPolicy(loaded, NoiseBackbone()).act(
        [arrays.images[0][0]], arrays.instructions[0], arrays.state[0]
    )
    assert np.array_equal(exported, desk.actions(answer)[0])


def test_equal_observations_of_a_tenant_are_forwarded_once(desk: Desk) -> None:
    digest, _ = desk.version(1)
    same = Arrays(1, rows=1)
    answers = desk.predict(Request(digest, same), Request(digest, same), Request(digest, same, tenant="bob"))
    assert [answer.backbone_forwards for answer in answers] == [1, 0, 1]
    assert np.array_equal(desk.actions(answers[0]), desk.actions(answers[2]))


def test_an_instruction_without_pictures_is_forwarded_once_in_its_life(desk: Desk) -> None:
    digest, _ = desk.version(1, spec(cameras=0))
    for step in range(3):
        arrays = Arrays(step, rows=4, cameras=0)
        arrays.instructions = ["reach"] * 4
        (answer,) = desk.predict(Request(digest, arrays))
        assert answer.backbone_forwards == (1 if step == 0 else 0)
    assert desk.backbone.samples_forwarded == 1


def test_three_versions_asked_about_the_same_states_share_one_forward_whatever_their_groups(desk: Desk) -> None:
    versions = [desk.version(number)[0] for number in (1, 2, 3)]
    states = [Arrays(seed, rows=2) for seed in range(3)]
    forwards = [
        answer.backbone_forwards
        for arrays in states
        for number, digest in enumerate(versions, start=1)
        for answer in desk.predict(Request(digest, arrays, version=number))
    ]
    assert desk.backbone.samples_forwarded == sum(forwards) == 6
    together = Desk(desk.folder / "together")
    for number in (1, 2, 3):
        together.version(number)
    answers = together.predict(*(Request(d, states[0], version=n) for n, d in enumerate(versions, start=1)))
    assert together.backbone.samples_forwarded == 2
    assert [answer.backbone_forwards for answer in answers] == [2, 0, 0]


def test_everybody_who_wants_a_sample_pays_a_share_of_it(tmp_path: Path) -> None:
    class Ticks:
        """Every measurement takes one second."""

        def start(self) -> Callable[[], float]:
            return lambda: 1.0

        def overhead(self) -> Overhead:
            return Overhead(counts=False)

    desk = Desk(tmp_path, clock=Ticks())
    digests = [desk.version(number)[0] for number in (1, 2)]
    same, own = Arrays(1, rows=1), Arrays(2, rows=1)
    answers = desk.predict(Request(digests[0], same), Request(digests[1], same, version=2), Request(digests[0], own))
    # Reading and private part take a second each; the forward of two samples half a second each, one for two.
    assert [answer.busy_s for answer in answers] == [2.25, 2.25, 2.5]


def test_all_that_a_group_takes_is_somebodys_share(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    digests = [desk.version(number)[0] for number in (1, 2)]
    requests = [Request(digests[n % 2], Arrays(n, rows=1 + n % 3), version=1 + n % 2) for n in range(12)]
    desk.predict(*requests)  # the versions are in memory now
    began = time.thread_time()
    answers = desk.predict(*(Request(digests[n % 2], Arrays(99 + n, rows=2), version=1 + n % 2) for n in range(12)))
    took = time.thread_time() - began
    assert 0.7 * took < sum(answer.busy_s for answer in answers) <= took  # the desk packs and unpacks, too
    assert all(0 < answer.overhead_s < answer.busy_s for answer in answers)


def test_loading_a_version_says_what_it_took(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    digest, _ = desk.version(1)
    offer = WeightsOffer(tenant="a", policy="p", version=1, digest=digest, nbytes=1)
    assert desk.engine.load(offer).busy_s > 0
    assert desk.engine.load(msgspec.structs.replace(offer, version=2, digest="0" * 64)).busy_s > 0


def test_loading_beside_those_who_act_on_a_gpu_counts_none_of_their_time(tmp_path: Path) -> None:
    desk = Desk(tmp_path, clock=BusyClock("cuda"))
    offer = WeightsOffer(tenant="a", policy="p", version=1, digest=desk.version(1)[0], nbytes=1)
    assert desk.engine.load(offer) == WeightsApplied(tenant="a", policy="p", version=1, busy_s=0.0)


def test_a_private_observation_is_nobody_elses_hit_and_a_shared_sets_is_everybodys(tmp_path: Path) -> None:
    desk = Desk(tmp_path, features=MemoryStore())
    digest, _ = desk.version(1)
    same = Arrays(1, rows=1)
    for scope, forwards in (("", [1, 1]), ("shared:reach", [1, 0])):
        answers = [
            answer.backbone_forwards
            for tenant in ("ann", "bob")
            for answer in desk.predict(Request(digest, same, tenant=tenant, scope=scope))
        ]
        assert answers == forwards


def test_only_features_of_data_sets_go_to_the_hosts_store_unless_all_are_kept(tmp_path: Path) -> None:
    for keep_all, kept in ((False, 2), (True, 4)):
        store = MemoryStore()
        desk = Desk(tmp_path / str(kept), features=store, keep_all=keep_all)
        digest, _ = desk.version(1)
        desk.predict(Request(digest, Arrays(1, rows=2)), Request(digest, Arrays(2, rows=2), scope="tenant:ann"))
        assert len(store.held) == kept


def test_features_of_a_data_set_that_training_made_are_not_made_again(tmp_path: Path) -> None:
    store = MemoryStore()
    arrays = Arrays(1, rows=3)
    bench = Bench(tmp_path / "trainer")
    bench.features = store
    bench.fresh()
    bench.done(Group(opening("arm")).train("arm", 1, arrays, feature_scope="tenant:ann"))
    desk = Desk(tmp_path / "inference", features=store)
    (answer,) = desk.predict(Request(desk.version(1)[0], arrays, scope="tenant:ann"))
    assert answer.backbone_forwards == desk.backbone.samples_forwarded == 0


def test_what_is_kept_in_memory_stays_within_its_budget(tmp_path: Path) -> None:
    size = NoiseBackbone().forward(Arrays(1, rows=1).observations())[0].nbytes
    desk = Desk(tmp_path, memory_bytes=2 * size)
    digest, _ = desk.version(1)
    first = Arrays(1, rows=1)
    for arrays in (first, Arrays(2, rows=1), Arrays(3, rows=1), first):
        (answer,) = desk.predict(Request(digest, arrays))
        assert answer.backbone_forwards == 1


WRONG: dict[str, tuple[Callable[[Arrays], object], ErrorCode, str]] = {
    "state of another length": (
        lambda a: setattr(a, "state", np.zeros((2, 39), np.float32)),
        ErrorCode.BAD_DATA,
        "'state' is float32 [2, 39], but float32 [any, 4] is expected",
    ),
    "NaN in the state": (
        lambda a: a.state.__setitem__((1, 2), np.nan),
        ErrorCode.BAD_DATA,
        "'state' of sample 1, dimension 2 (z) is nan",
    ),
    "another picture size": (
        lambda a: setattr(a, "images", [np.zeros((2, 4, SIDE, 3), np.uint8)]),
        ErrorCode.BAD_DATA,
        "'images of view0' is uint8 [2, 4, 8, 3], but uint8 [2, 8, 8, 3] is expected",
    ),
    "no pictures": (lambda a: a.images.clear(), ErrorCode.BAD_DATA, "pictures of 0 cameras came"),
    "one instruction": (lambda a: a.instructions.pop(), ErrorCode.BAD_DATA, "1 instructions came for 2 samples"),
    "no rows": (lambda a: setattr(a, "state", a.state[:0]), ErrorCode.BAD_DATA, "'state' has no rows"),
    "too many rows": (
        lambda a: setattr(a, "state", np.zeros((65, 4), np.float32)),
        ErrorCode.TOO_LARGE,
        "at most 64 rows, this one has 65",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_request_fails_alone_with_one_sentence(desk: Desk, what: str) -> None:
    spoil, code, sentence = WRONG[what]
    digest, policy = desk.version(1)
    bad, good = Request(digest, Arrays(1, rows=2)), Request(digest, Arrays(2, rows=2))
    spoil(bad.arrays)
    wrong, right = desk.predict(bad, good)
    assert wrong.error is not None
    assert wrong.error.code == code
    assert sentence in wrong.error.message
    assert wrong.actions is None
    assert np.array_equal(desk.actions(right), desk.alone(policy, good))


def test_a_request_of_another_contract_is_refused(desk: Desk) -> None:
    digest, _ = desk.version(1)
    mine, others = contract(1).digest(), contract(2).digest()
    right, wrong = desk.predict(
        Request(digest, Arrays(1, rows=1), contract=mine), Request(digest, Arrays(2, rows=1), contract=others)
    )
    assert right.error is None
    assert wrong.error is not None
    assert wrong.error.code == ErrorCode.CONTRACT_MISMATCH
    assert mine in wrong.error.message


def test_garbage_and_foreign_buffers_are_refused(desk: Desk) -> None:
    digest, _ = desk.version(1)
    act, buffers = Request(digest, Arrays(1, rows=1)).pack()
    item = PredictItem(
        request="r", tenant="ann", policy="arm", version=1, digest=digest, act=act, first_buffer=0, buffers=2
    )
    items = (item, msgspec.structs.replace(item, act=b"\xc1"), msgspec.structs.replace(item, buffers=1))
    done, _ = desk.engine.predict(PredictGroup(task="t", attempt=1, items=items), buffers)
    good, garbage, foreign = done.items
    assert good.error is None
    for answer in (garbage, foreign):
        assert answer.error is not None
        assert answer.error.code == ErrorCode.INVALID


@pytest.mark.parametrize("place", range(5))
def test_a_row_that_wrecks_the_forward_fails_alone(desk: Desk, place: int) -> None:
    digest, policy = desk.version(1)
    requests = [Request(digest, Arrays(seed, rows=2)) for seed in range(5)]
    requests[place].arrays.instructions[1] = WRECK
    for number, answer in enumerate(desk.predict(*requests)):
        if number == place:
            assert answer.error is not None
            assert answer.error.code == ErrorCode.BAD_DATA
            assert "sample 1 makes the backbone fail" in answer.error.message
        else:
            assert np.array_equal(desk.actions(answer), desk.alone(policy, requests[number]))


def test_a_group_that_finds_no_memory_for_one_row_has_that_one_ask_again(desk: Desk) -> None:
    digest, policy = desk.version(1)
    desk.backbone.faults = [MemoryError("others have it all")] * 3
    requests = [Request(digest, Arrays(seed, rows=1)) for seed in range(2)]
    wrong, right = desk.predict(*requests)
    assert wrong.error is not None
    assert (wrong.error.code, wrong.error.retry_after_ms > 0) == (ErrorCode.UNAVAILABLE, True)
    assert np.array_equal(desk.actions(right), desk.alone(policy, requests[1]))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    loaded = load_backbone("tiny-qwen3vl", cache_dir=tmp_path_factory.mktemp("backbones"))
    probe(loaded)
    return loaded


def test_rows_of_eight_policies_in_one_group_act_as_each_alone_also_where_heads_draw(
    tmp_path: Path, real: Backbone
) -> None:
    desk = Desk(tmp_path, real)
    requests, policies = [], []
    for number in range(1, 9):
        head = "groot" if number % 2 else "oft"
        sizes = {"width": 16, "heads": 2, "layers": 2} if head == "groot" else {"width": 16}
        adapter = "bottleneck" if number % 3 == 0 else "none"
        made_of = msgspec.structs.replace(
            spec(seed=number), head=head, head_config=sizes, chunk=number, adapter=adapter
        )
        policy = Policy(made_of, real.digest, real.hidden_size)
        write_version(tmp_path / "version", policy, number)
        digest = desk.blobs.put_file(tmp_path / "version")[0]
        arrays = Arrays(number, rows=1 + number % 3)
        arrays.instructions[0] = "word " * number
        seeds = tuple(range(number, number + len(arrays.state)))
        requests.append(Request(digest, arrays, version=number, tenant=f"t{number}", seeds=seeds))
        policies.append(policy)

    def alone(number: int) -> npt.NDArray[np.float32]:
        features = [real.forward([each])[0] for each in requests[number].arrays.observations()]
        return policies[number].act(features, requests[number].arrays.state, seeds=requests[number].seeds)

    before = real.samples_forwarded
    answers = desk.predict(*requests)
    assert real.samples_forwarded - before == sum(answer.rows for answer in answers)
    for number, answer in enumerate(answers):
        assert np.array_equal(desk.actions(answer), alone(number))
    first = alone(0)
    requests[0].seeds = (99, 98)
    (other,) = desk.predict(requests[0])
    assert np.array_equal(desk.actions(other), alone(0))
    assert not np.array_equal(desk.actions(other), first), "another seed, another draw"


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_seeds_that_are_not_one_a_row_are_refused(desk: Desk, seeds: tuple[int, ...]) -> None:
    digest, _ = desk.version(1)
    (answer,) = desk.predict(Request(digest, Arrays(1, rows=2), seeds=seeds))
    assert answer.error is not None
    assert answer.error.code == ErrorCode.INVALID
    assert f"{len(seeds)} seeds came for 2 rows" in answer.error.message


def test_a_fault_in_one_private_part_fails_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = desk.version(1)
    second, policy = desk.version(2)
    good = Request(second, Arrays(2, rows=1), version=2)
    desk.predict(Request(first, Arrays(1, rows=1)), good)

    def burst(*_: object, **__: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(desk.engine._shelf.get("ann", "arm", 1, first).policy, "act", burst)
    wrong, right = desk.predict(Request(first, Arrays(1, rows=1)), good)
    assert wrong.error is not None
    assert wrong.error.code == ErrorCode.INTERNAL
    assert np.array_equal(desk.actions(right), desk.alone(policy, good))


def test_a_version_that_cannot_even_be_built_fails_its_request_alone(desk: Desk) -> None:
    first, _ = desk.version(1)
    second, policy = desk.version(2)
    good, open_blob = Request(second, Arrays(2, rows=1), version=2), desk.engine._shelf._open_blob

    def burst(digest: str) -> Path:
        if digest == first:
            raise RuntimeError("not enough memory: you tried to allocate 17 GiB")
        return open_blob(digest)

    desk.engine._shelf._open_blob = burst
    wrong, right = desk.predict(Request(first, Arrays(1, rows=1)), good)
    assert wrong.error is not None
    assert wrong.error.code == ErrorCode.INTERNAL
    assert "17 GiB" not in wrong.error.message
    assert np.array_equal(desk.actions(right), desk.alone(policy, good))


def test_actions_that_are_not_finite_never_reach_a_robot(desk: Desk) -> None:
    digest, _ = desk.version(1)
    served = desk.engine._shelf.get("ann", "arm", 1, digest).policy
    with torch.no_grad():
        served.module.out.bias.fill_(torch.nan)
    (answer,) = desk.predict(Request(digest, Arrays(1, rows=1)))
    assert answer.error is not None
    assert answer.error.code == ErrorCode.NON_FINITE
