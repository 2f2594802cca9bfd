"""`tiny-qwen3vl` and `tiny-qwen25vl`: checkpoints of the real architectures with random weights, for tests.

In: a directory to write to. Out: config, weights, byte-level tokenizer and image processor as a hub checkpoint has
them; the same bytes every time. Never: a way of loading of its own: it is read like any other directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from joynexus.vla.backbones.family import quiet

REVISION = 1  # bump it when a written checkpoint changes
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
# The chat format of Qwen-VL, without its branches for videos and tools.
_CHAT = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- for c in m['content'] -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if c['type'] == 'image' else c['text'] }}"
    "{%- endfor -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def write_qwen3_vl(directory: Path) -> None:
    """Write `tiny-qwen3vl`: deepstack after two of three vision blocks, patches of 16 pixels."""
    import transformers as untyped

    transformers: Any = untyped
    ids = write_tokenizer(directory)
    write_image_processor(directory, patch=16, mean=[0.5] * 3, std=[0.5] * 3)
    config = transformers.Qwen3VLConfig(
        text_config=_text(ids) | {"head_dim": 32},
        vision_config=_vision()
        | {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]},
        **special_ids(ids),
        tie_word_embeddings=True,
    )
    _write_model(directory, transformers.Qwen3VLForConditionalGeneration, config)


def write_qwen25_vl(directory: Path) -> None:
    """Write `tiny-qwen25vl`: windowed attention in two of three vision blocks, patches of 14 pixels."""
    import transformers as untyped

    transformers: Any = untyped
    ids = write_tokenizer(directory)
    clip_mean, clip_std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    write_image_processor(directory, patch=14, mean=clip_mean, std=clip_std)
    config = transformers.Qwen2_5_VLConfig(
        text_config=_text(ids) | {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"]},
        # Windows of 56 pixels, 2 x 2 tokens: pictures of the tests have several, whole and cut ones.
        vision_config=_vision() | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **special_ids(ids),
        tie_word_embeddings=True,
    )
    _write_model(directory, transformers.Qwen2_5_VLForConditionalGeneration, config)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {"tiny-qwen3vl": write_qwen3_vl, "tiny-qwen25vl": write_qwen25_vl}


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer of single bytes with Qwen-VL's special tokens; return the id of each token."""
    import transformers as untyped
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers: Any = untyped
    alphabet = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        additional_special_tokens=list(_SPECIAL[1:]),
        chat_template=_CHAT,
    ).save_pretrained(directory)
    return ids


def write_image_processor(directory: Path, *, patch: int, mean: list[float], std: list[float]) -> None:
    """Write the settings of an image processor for tokens of 2 x 2 patches, 64 to 256 pixels a side."""
    import transformers as untyped

    transformers: Any = untyped
    transformers.Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        image_mean=mean,
        image_std=std,
    ).save_pretrained(directory)


def special_ids(ids: dict[str, int]) -> dict[str, int]:
    """Return what a Qwen-VL config says of its special tokens."""
    tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    tokens |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: ids[token] for field, token in tokens.items()}


def _text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": len(ids), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        "tie_word_embeddings": True, "pad_token_id": 0,
    }  # fmt: skip


def _vision() -> dict[str, Any]:
    return {
        "depth": 3, "hidden_size": 96, "intermediate_size": 256, "num_heads": 3, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 128,
    }  # fmt: skip


def _write_model(directory: Path, kind: Any, config: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        model = kind(config).float()
    random = torch.Generator().manual_seed(REVISION)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:  # unit gain, so that pictures and words both show in the features
                scale = 1.0 if "embed" in name and parameter.ndim == 2 else parameter[0].numel() ** -0.5
                parameter.normal_(0.0, scale, generator=random)
    with quiet():
        model.save_pretrained(directory)
