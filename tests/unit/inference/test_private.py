"""What inference keeps of one tenant is no help to another: not what is computed, looked up or stored, nor memory.

Two workers are asked the same by tenant `bob`. On one of them `ann` has asked exactly the same before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from joynexus.vla.feature import VLAFeature
from joynexus.vla.feature_store import FeatureStore
from joynexus.wire.back import PredictItem
from tests.unit.inference.desk import Desk, Request
from tests.unit.workers import Arrays, Bench, Group, opening

Step = tuple[str, int, bool]
"""What was done with a store or the backbone, with how many bytes or samples, and whether something was found."""


class Watched(FeatureStore):
    """A store on disk that writes down what it is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 24)
        self.steps: list[Step] = []
        self.keys: list[str] = []

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        found = super().get(key, layers)
        self.steps.append(("get", len(layers), found is not None))
        self.keys.append(key)
        return found

    def put(self, key: str, feature: VLAFeature) -> None:
        before = self.stats.bytes
        super().put(key, feature)
        self.steps.append(("put", self.stats.bytes - before, True))


class Worker:
    """An inference worker that keeps everything on disk."""

    def __init__(self, folder: Path) -> None:
        self.store = Watched(folder / "features")
        self.desk = Desk(folder, features=self.store, keep_all=True)
        self.digest, _ = self.desk.version(1)

    def ask(self, tenant: str, scope: str) -> tuple[list[Step], list[int], PredictItem | object, bytes]:
        """Ask for actions twice; return all that was done and answered."""
        self.store.steps.clear()
        self.desk.backbone.groups.clear()
        same = Arrays(1, rows=3)
        answers = [
            self.desk.predict(Request(self.digest, same, tenant=tenant, scope=scope.format(tenant)))[0] for _ in (1, 2)
        ]
        said = [msgspec.structs.replace(answer, busy_s=0.0, overhead_s=0.0) for answer in answers]
        return list(self.store.steps), list(self.desk.backbone.groups), said, self.desk.actions(answers[0]).tobytes()


@pytest.mark.parametrize(("scope", "told"), [("", False), ("tenant:{}", False), ("shared:reach", True)])
def test_whether_another_tenant_has_asked_the_same_changes_nothing_that_is_done(
    tmp_path: Path, scope: str, told: bool
) -> None:
    after, alone = Worker(tmp_path / "after"), Worker(tmp_path / "alone")
    before = after.ask("ann", scope)
    assert before[0], "nothing was looked up"
    assert [found for what, _, found in before[0] if what == "get"] == [False] * 3 + [True] * 3, "her own are hits"
    ours, expected = after.ask("bob", scope), alone.ask("bob", scope)
    assert (ours != expected) is told
    assert ours[-1] == expected[-1], "the numbers are the same anyway"


def test_a_private_key_is_nobody_elses_whatever_the_tenants_are_called(tmp_path: Path) -> None:
    """The scope is hashed as a whole: no name runs into what follows it, and none is that of a shared set."""
    worker = Worker(tmp_path)
    scopes = ("tenant:a", "tenant:ab", "tenant:shared:a", "shared:a", "shared:tenant:a", "tenant:a\0", "")
    for scope in scopes:
        worker.desk.predict(Request(worker.digest, Arrays(1, rows=1), tenant="a b", scope=scope))
    assert len(set(worker.store.keys)) == len(scopes)
    assert len({key[:16] for key in worker.store.keys}) == len(scopes)


@pytest.mark.parametrize(("scope", "told"), [("tenant:{}", False), ("shared:reach", True)])
def test_training_does_the_same_whether_another_tenant_has_trained_on_the_same_or_not(
    tmp_path: Path, scope: str, told: bool
) -> None:
    def train(bench: Bench, store: Watched, tenant: str) -> tuple[list[Step], list[int], list[object]]:
        store.steps.clear()
        bench.backbone.groups.clear()
        group = Group(opening(tenant))
        for seq in (1, 2):
            group.train(tenant, seq, Arrays(1), feature_scope=scope.format(tenant))
        cost = {"busy_s": 0.0, "page_s": 0.0, "overhead_s": 0.0}
        done = [msgspec.structs.replace(each, **cost) for each in bench.done(group)]
        return list(store.steps), list(bench.backbone.groups), done

    told_twice = []
    for company in (True, False):
        bench = Bench(tmp_path / str(company))
        bench.features = store = Watched(tmp_path / str(company) / "features")
        bench.fresh()
        if company:
            assert train(bench, store, "ann")[1] == [4]
        told_twice.append(train(bench, store, "bob"))
    assert (told_twice[0] != told_twice[1]) is told


@pytest.fixture
def _unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_unwritten_memory_is_nan")
def test_a_version_in_the_place_of_another_tenants_has_nothing_of_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_versions=1)
    former, _ = desk.version(1)
    desk.predict(Request(former, Arrays(1), tenant="ann"))
    for tensor in desk.engine._shelf.get("ann", "arm", 1, former).policy.tensors().values():
        if tensor.is_floating_point():
            tensor.data.fill_(7531.75)
    digest, policy = desk.version(2)
    request = Request(digest, Arrays(2), version=2, tenant="bob")
    (answer,) = desk.predict(request)
    assert np.array_equal(desk.actions(answer), desk.alone(policy, request))
