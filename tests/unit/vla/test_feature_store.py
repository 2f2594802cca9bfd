from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from joynexus.vla.feature import Observation, VLAFeature
from joynexus.vla.feature_keys import feature_key
from joynexus.vla.feature_memory import FeatureMemory, fair_level
from joynexus.vla.feature_store import FeatureStore
from tests.unit.vla.samples import DIGEST, feature, observation

BASE: dict[str, Any] = {"scope": "team", "backbone": DIGEST, "numerics_class": "cpu"}


LAST = (-1,)


def key(number: int, scope: str = "team") -> str:
    return feature_key(observation(number), **(BASE | {"scope": scope}))


def made(number: int) -> VLAFeature:
    return feature(torch.Generator().manual_seed(number), 20)


def same(a: VLAFeature | None, b: VLAFeature) -> bool:
    return (
        a is not None
        and torch.equal(a.last, b.last)
        and torch.equal(a.token_type, b.token_type)
        and a.backbone == b.backbone
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feature_comes_back_bit_for_bit_after_a_restart(tmp_path: Path, dtype: torch.dtype) -> None:
    before = made(1)
    before.layers[-1] = before.layers[-1].to(dtype)
    before.layers[2] = before.last * 2
    FeatureStore(tmp_path, 1 << 20).put(key(1), before)
    again = FeatureStore(tmp_path, 1 << 20)
    found = again.get(key(1), (2, -1))
    assert same(found, before)
    assert found is not None
    assert torch.equal(found.layers[2], before.layers[2])
    assert again.get(key(2), LAST) is None
    assert (again.stats.hits, again.stats.misses) == (1, 1)


def test_a_second_read_comes_from_memory(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20)
    store.put(key(1), made(1))
    for file in tmp_path.glob("*/*"):
        file.unlink()
    assert same(store.get(key(1), LAST), made(1))
    assert FeatureStore(tmp_path, 1 << 20, memory_bytes=0).get(key(1), LAST) is None


def test_everything_a_feature_depends_on_is_in_its_key() -> None:
    sample = observation(1, views=2)
    keys = {
        feature_key(sample, **BASE),
        feature_key(sample, **(BASE | {"scope": "shared:team"})),
        feature_key(sample, **(BASE | {"backbone": "c" * 32})),
        feature_key(sample, **(BASE | {"numerics_class": "cuda"})),
        feature_key(Observation(sample.images, "pull"), **BASE),
        feature_key(Observation(sample.images[::-1], sample.instruction), **BASE),
        feature_key(Observation(sample.images[:1], sample.instruction), **BASE),
        feature_key(Observation((sample.images[0].reshape(32, 128, 3), sample.images[1]), "push the button"), **BASE),
    }
    assert len(keys) == 8
    assert feature_key(observation(1, views=2), **BASE) in keys


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: c[:-1] + bytes([c[-1] ^ 1])])
def test_a_torn_or_altered_file_is_absent(tmp_path: Path, damage: object) -> None:
    FeatureStore(tmp_path, 1 << 20).put(key(1), made(1))
    [file] = tmp_path.glob("*/*")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]  # a function from bytes to bytes
    store = FeatureStore(tmp_path, 1 << 20)
    assert store.get(key(1), LAST) is None
    store.put(key(1), made(1))
    assert same(FeatureStore(tmp_path, 1 << 20).get(key(1), LAST), made(1))


def test_the_budget_holds_and_what_was_used_lately_stays(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, memory_bytes=0)
    store.put(key(0), made(0))
    size = store.stats.bytes
    budget = 10 * size
    store = FeatureStore(tmp_path, budget, memory_bytes=0)
    for number in range(1, 10):
        store.put(key(number), made(number))
    for number in range(10):  # file times are coarser than this test is quick
        used(tmp_path, number, seconds_ago=100 - number)
    assert store.get(key(0), LAST) is not None
    store.put(key(10), made(10))
    assert store.stats.evictions == 2
    assert store.stats.bytes <= budget
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) == store.stats.bytes
    assert [number for number in range(11) if store.get(key(number), LAST) is None] == [1, 2]


def used(folder: Path, number: int, *, seconds_ago: float) -> None:
    """Make a feature's last use another one."""
    at = time.time() - seconds_ago
    for file in folder.glob(f"*/{key(number)}.*"):
        os.utime(file, (at, at))


def test_past_the_budget_what_nobody_read_for_a_month_goes_first_with_its_folder(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, memory_bytes=0)
    for number in range(3):
        store.put(key(number), made(number))
        used(tmp_path, number, seconds_ago=40 * 86400)
    size = store.stats.bytes // 3
    store = FeatureStore(tmp_path, 8 * size, memory_bytes=0)
    assert store.stats.evictions == 0, "there is room"
    for number in range(6):
        store.put(key(number, "active"), made(number))
    assert [store.get(key(number), LAST) for number in range(3)] == [None] * 3
    assert all(same(store.get(key(number, "active"), LAST), made(number)) for number in range(6))
    FeatureStore(tmp_path, 8 * size)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_forgets_features_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    store = FeatureStore(tmp_path, 1 << 20)
    monkeypatch.setattr(Path, "write_bytes", full)
    store.put(key(1), made(1))
    assert same(store.get(key(1), LAST), made(1)), "memory still has it"
    assert FeatureStore(tmp_path, 1 << 20).get(key(1), LAST) is None


def test_files_of_another_user_are_read_and_fail_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = FeatureStore(tmp_path, 1 << 20)
    theirs.put(key(1), made(1))
    theirs.put(key(2), made(2))
    [torn] = tmp_path.glob(f"*/{key(2)}.-1")
    torn.write_bytes(b"torn")
    size = theirs.stats.bytes

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for call in ("utime", "unlink"):
        monkeypatch.setattr(os, call, forbidden)
    store = FeatureStore(tmp_path, size // 2)
    assert same(store.get(key(1), LAST), made(1))
    assert store.get(key(2), LAST) is None
    assert store.stats.evictions == 0


def test_a_cache_that_was_cleared_under_a_running_store_is_filled_anew(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    store = FeatureStore(folder, 1 << 20, memory_bytes=0)
    store.put(key(1), made(1))
    size = store.stats.bytes
    store = FeatureStore(folder, 2 * size, memory_bytes=0)
    for number in (1, 2, 3, 4):
        shutil.rmtree(folder)
        store.put(key(number), made(number))
        assert same(store.get(key(number), LAST), made(number))
    assert store.stats.bytes <= 2 * size


def test_a_feature_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 100)
    store.put(key(1), made(1))
    assert not list(tmp_path.glob("*/*"))
    assert same(store.get(key(1), LAST), made(1))


def test_processes_of_one_host_share_a_directory(tmp_path: Path) -> None:
    one, two = FeatureStore(tmp_path, 1 << 20), FeatureStore(tmp_path, 1 << 20)
    one.put(key(1), made(1))
    two.put(key(2), made(2))
    assert same(two.get(key(1), LAST), made(1))
    assert same(one.get(key(2), LAST), made(2))


def test_hidden_states_of_a_feature_come_together_and_one_that_is_not_there_is_no_hit(tmp_path: Path) -> None:
    feature = made(1)
    feature.layers[3] = feature.last * 3
    for kept in (FeatureStore(tmp_path, 1 << 20), FeatureMemory(1 << 20)):
        kept.put(key(1), VLAFeature({3: feature.layers[3]}, feature.token_type, feature.backbone))
        assert kept.get(key(1), LAST) is None
        kept.put(key(1), VLAFeature({-1: feature.last}, feature.token_type, feature.backbone))
        found = kept.get(key(1), (3, -1))
        assert same(found, feature)
        assert found is not None
        assert torch.equal(found.layers[3], feature.layers[3])
        assert kept.get(key(1), (-1, 4)) is None


def sizes(folder: Path) -> dict[str, int]:
    """Bytes by scope's folder."""
    found: dict[str, int] = {}
    for file in folder.glob("*/*"):
        found[file.parent.name] = found.get(file.parent.name, 0) + file.stat().st_size
    return found


def test_a_scope_that_stores_much_evicts_its_own_and_nobody_elses(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, memory_bytes=0)
    store.put(key(0), made(0))
    size = store.stats.bytes
    store = FeatureStore(tmp_path, 10 * size, memory_bytes=0)
    for number in range(4):
        store.put(key(number, "small"), made(number))
    for number in range(30):
        store.put(key(number, "greedy"), made(number))
    assert store.stats.bytes <= 10 * size
    assert all(same(store.get(key(number, "small"), LAST), made(number)) for number in range(4))
    assert same(store.get(key(0), LAST), made(0)), "a third one's"
    assert sum(store.get(key(number, "greedy"), LAST) is not None for number in range(30)) >= 4


def test_a_scope_keeps_within_its_own_budget_while_the_disk_has_room(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, memory_bytes=0)
    store.put(key(0), made(0))
    size = store.stats.bytes
    store = FeatureStore(tmp_path, 1 << 20, scope_bytes=5 * size, memory_bytes=0)
    for number in range(20):
        store.put(key(number, "greedy"), made(number))
    assert max(sizes(tmp_path).values()) <= 5 * size
    assert same(store.get(key(19, "greedy"), LAST), made(19)), "the newest stays"


def test_the_folder_of_a_scope_does_not_tell_its_name(tmp_path: Path) -> None:
    FeatureStore(tmp_path, 1 << 20).put(key(1, "tenant:secret-lab"), made(1))
    assert not [path for path in tmp_path.rglob("*") if "secret" in path.name]


def test_features_in_memory_stay_within_their_budgets_and_the_latest_used_are_there(tmp_path: Path) -> None:
    size = made(0).nbytes
    memory = FeatureMemory(6 * size, scope_bytes=4 * size)
    for number in range(2):
        memory.put(key(number, "small"), made(number))
    for number in range(9):
        memory.put(key(number, "greedy"), made(number))
        memory.get(key(0, "greedy"), LAST)
    kept = [number for number in range(9) if memory.get(key(number, "greedy"), LAST) is not None]
    assert kept == [0, 6, 7, 8]
    for number in range(9):
        memory.put(key(number, "third"), made(number))
    assert all(memory.get(key(number, "small"), LAST) is not None for number in range(2))
    others = [key(number, scope) for number in range(9) for scope in ("greedy", "third")]
    assert sum(memory.get(each, LAST) is not None for each in others) == 4
    memory.put(key(9, "fourth"), feature(torch.Generator().manual_seed(1), 20 * 5))
    assert memory.get(key(9, "fourth"), LAST) is None, "larger than a scope may be"


def test_one_kept_feature_does_not_keep_its_whole_group_in_memory() -> None:
    packed = torch.randn(1000, 32)
    memory = FeatureMemory(1 << 20)
    memory.put(key(1), VLAFeature({-1: packed[10:20]}, torch.zeros(10, dtype=torch.uint8), DIGEST))
    found = memory.get(key(1), LAST)
    assert found is not None
    assert torch.equal(found.last, packed[10:20])
    assert found.last.untyped_storage().nbytes() == 10 * 32 * 4


@pytest.mark.parametrize(
    ("used", "budget", "level"), [([5, 5], 10, 5), ([1, 9], 8, 7), ([9, 9, 2], 10, 4), ([], 10, 10), ([3], 2, 2)]
)
def test_a_fair_level_leaves_the_small_ones_what_they_have(used: list[int], budget: int, level: int) -> None:
    assert fair_level(used, budget) == level
    assert sum(min(size, level) for size in used) <= budget


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="negative"):
        FeatureStore(tmp_path, -1)
