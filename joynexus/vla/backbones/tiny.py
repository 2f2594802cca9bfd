"""`tiny-qwen3vl`: a checkpoint of the real Qwen3-VL architecture with random weights, for tests.

In: a directory to write to. Out: config, weights, byte-level tokenizer and image processor as a hub checkpoint has
them; the same bytes every time. Never: a way of loading of its own: it is read like any other directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from joynexus.vla.backbones.family import quiet

NAME = "tiny-qwen3vl"
REVISION = 1  # bump it when the written checkpoint changes
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


def write_checkpoint(directory: Path) -> None:
    """Write the checkpoint with `save_pretrained`."""
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
    transformers.Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(directory)
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(ids), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
            "tie_word_embeddings": True, "pad_token_id": 0,
        },
        vision_config={
            "depth": 3, "hidden_size": 96, "intermediate_size": 256, "num_heads": 3, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128,
            "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen3VLForConditionalGeneration(config).float()
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
