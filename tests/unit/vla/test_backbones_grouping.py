from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from joynexus.vla import numerics
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.backbones.qwen_vl import MAX_TOKENS
from joynexus.vla.backbones.timing import BUDGET_S, time_forwards
from joynexus.vla.feature import Observation
from joynexus.vla.grouping import Grouping
from tests.unit.vla.samples import observation, picture

ALONE, WHOLE, PAIRS = ({10: 1.0, 100: 20.0, 800: 300.0}, {50: 1.0, 800: 1.1}, {50: 1.0, 120: 1.2, 240: 6.0, 800: 30.0})


@pytest.mark.parametrize("curve", [ALONE, WHOLE, PAIRS])
def test_how_a_group_is_cut_changes_no_bit(
    packed: Backbone, monkeypatch: pytest.MonkeyPatch, curve: dict[int, float]
) -> None:
    samples = [observation(seed, views=seed % 3, side=64 + 32 * (seed % 2)) for seed in range(6)]
    expected = packed.forward(samples)
    sizes: list[int] = []
    forward = packed._forward

    def counted(observations: Any, layers: Any) -> Any:
        sizes.append(len(observations))
        return forward(observations, layers)

    monkeypatch.setattr(packed, "_forward", counted)
    monkeypatch.setattr(packed, "grouping", Grouping(curve))
    for found, whole in zip(packed.forward(samples), expected, strict=True):
        assert torch.equal(found.last, whole.last)
    assert sizes == packed.grouping.cut([packed.tokens(sample) for sample in samples])
    assert {str(ALONE): len(sizes) == 6, str(WHOLE): len(sizes) == 1, str(PAIRS): 1 < len(sizes) < 6}[str(curve)]


def test_tokens_are_counted_without_running_the_model(backbone: Backbone) -> None:
    samples = [Observation((), "go"), observation(1), observation(2, views=2, side=96), observation(3, instruction="")]
    before = backbone.samples_forwarded
    counts = [backbone.tokens(sample) for sample in samples]
    assert backbone.samples_forwarded == before
    assert counts == [feature.length for feature in backbone.forward(samples)]


def test_calibrating_measures_and_counts_no_work(packed: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "grouping", None)
    before = packed.samples_forwarded
    said = packed.calibrate()
    assert packed.grouping is not None
    assert said == packed.grouping.describe()
    assert packed.samples_forwarded == before


def test_a_slow_host_measures_one_round_without_the_largest_size(
    packed: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = packed._forward

    def counted(observations: Any, layers: Any) -> Any:
        sizes.append(len(observations))
        return forward(observations, layers)

    monkeypatch.setattr(packed, "_forward", counted)
    monkeypatch.setattr(packed, "grouping", Grouping(ALONE))
    monkeypatch.setattr("joynexus.vla.backbones.timing.BUDGET_S", 0.0)
    packed.calibrate()
    assert sizes == [1, 1, 1, 2, 4, 8]


def test_a_host_that_runs_samples_one_by_one_says_so_and_measures_nothing(
    packed: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "group_exactly", False)
    monkeypatch.setattr(packed, "grouping", None)
    assert "one by one, because groups change bits" in packed.calibrate()
    assert packed.grouping is None


@pytest.mark.parametrize(("second", "rounds"), [(0.001, 3), (0.04, 2), (0.09, 1), (0.15, 1)])
def test_measuring_takes_no_more_rounds_than_its_budget_allows(
    packed: Backbone, monkeypatch: pytest.MonkeyPatch, second: float, rounds: int
) -> None:
    """Every sample takes the same time."""
    sizes: list[int] = []

    class Ticks:
        def __init__(self, device: object) -> None:
            pass

        def start(self) -> Any:
            return lambda: second * sizes[-1]

    monkeypatch.setattr("joynexus.vla.backbones.timing.BusyClock", Ticks)
    monkeypatch.setattr(packed, "forward", lambda samples: sizes.append(len(samples)))
    time_forwards(packed)
    assert sizes.count(2) == rounds
    assert sum(sizes) * second <= (BUDGET_S if second < 0.1 else 17 * second)


def test_lite_needs_no_measuring(lite: Backbone) -> None:
    assert "one by one" in lite.calibrate()
    assert lite.grouping is None


def test_an_observation_of_too_many_tokens_is_refused_before_it_is_laid_out(packed: Backbone) -> None:
    wide = Observation(tuple(picture(seed, 256) for seed in range(8)), "x" * MAX_TOKENS)
    with pytest.raises(ValueError, match=f"at most {MAX_TOKENS}"):
        packed.check(Observation(wide.images, "x" * 4000))
    narrow = np.zeros((4, 1000, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="200 to 1"):
        packed.check(Observation((narrow,), "go"))


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (199, 1), (5, 900), (2000, 31)])
def test_what_is_let_into_a_group_can_be_run(backbone: Backbone, size: tuple[int, int]) -> None:
    strange = Observation((np.zeros((*size, 3), dtype=np.uint8),), "\U0001f916 \x00\n")
    backbone.check(strange)
    alone = backbone.forward([strange])[0]
    assert torch.equal(backbone.forward([observation(1), strange])[1].last, alone.last)
    assert torch.isfinite(alone.last).all()


def test_backbones_that_differ_in_any_hard_part_have_different_batch_keys(cache_dir: Path) -> None:
    names = ("tiny-qwen3vl", "tiny-qwen25vl", "tiny-qwen3vl@96", "tiny-qwen3vl@128", "lite", "lite@64")
    keys = [load_backbone(name, cache_dir=cache_dir).batch_key() for name in names]
    keys.append(load_backbone("tiny-qwen3vl", cache_dir=cache_dir, dtype="bfloat16").batch_key())
    for file, old, new in (
        ("preprocessor_config.json", "0.5", "0.25"),
        ("tokenizer.json", '"<|endoftext|>"', '"<|another|>"'),
        ("config.json", "8192", "4096"),
    ):
        keys.append(load_backbone(str(_changed(cache_dir, file, old, new)), cache_dir=cache_dir).batch_key())
    keys.append(load_backbone(str(_other_weights(cache_dir)), cache_dir=cache_dir).batch_key())
    assert len(set(keys)) == len(keys)


def test_equal_backbones_have_equal_batch_keys(cache_dir: Path, packed: Backbone) -> None:
    directory = next(cache_dir.glob(f"{packed.name}-*"))
    assert load_backbone(packed.name, cache_dir=cache_dir).batch_key() == packed.batch_key()
    assert load_backbone(str(directory), cache_dir=cache_dir).batch_key() == packed.batch_key()


def test_a_flat_config_as_the_hub_has_it_loads_the_same_model(cache_dir: Path, tiny25: Backbone) -> None:
    directory = _copy(cache_dir, tiny25.name, "flat")
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for key in ("model_type", "layer_types", "dtype"):
        text.pop(key, None)
    config |= text | {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load_backbone(str(directory), cache_dir=cache_dir)
    sample = observation(1, views=2)
    assert torch.equal(loaded.forward([sample])[0].last, tiny25.forward([sample])[0].last)


def test_a_checkpoint_with_sliding_windows_is_refused(cache_dir: Path, tiny25: Backbone) -> None:
    directory = _copy(cache_dir, tiny25.name, "sliding")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    config["text_config"].pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sliding-window attention, which is not supported"):
        load_backbone(str(directory), cache_dir=cache_dir)


def test_in_bfloat16_a_group_changes_features_by_no_more_than_the_stated_bound(
    cache_dir: Path, packed: Backbone, capsys: pytest.CaptureFixture[str]
) -> None:
    half = load_backbone(packed.name, cache_dir=cache_dir, dtype="bfloat16")
    samples = [observation(seed, views=seed % 3, instruction="push the button " * (1 + seed % 4)) for seed in range(8)]
    worst = 0.0
    for alone, grouped in zip([half.forward([s])[0] for s in samples], half.forward(samples), strict=True):
        worst = max(worst, float((alone.last.float() - grouped.last.float()).abs().max()))
    scale = float(torch.cat([f.last.float() for f in half.forward(samples)]).std())
    with capsys.disabled():
        print(
            f"\n{packed.name} in bfloat16: alone and grouped differ by at most {worst / scale:.1e} standard deviations"
        )
    assert worst / scale <= numerics.BFLOAT16_BOUND
    assert not half.exact


def _copy(cache_dir: Path, name: str, to: str) -> Path:
    target = cache_dir / "copies" / to
    target.mkdir(parents=True)
    for file in next(cache_dir.glob(f"{name}-*")).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def _changed(cache_dir: Path, file: str, old: str, new: str) -> Path:
    directory = _copy(cache_dir, "tiny-qwen3vl", file)
    text = (directory / file).read_text()
    assert old in text
    (directory / file).write_text(text.replace(old, new))
    return directory


def _other_weights(cache_dir: Path) -> Path:
    from safetensors.torch import load_file, save_file

    directory = _copy(cache_dir, "tiny-qwen3vl", "weights")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.language_model.norm.weight"][0] += 1e-3
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
