"""What the Qwen-VL families have in common: inputs, positions and packed forward.

In: a checkpoint directory as `save_pretrained` or the hub writes it. Out: see `Family`. Never: torchvision (pictures
are prepared by `images`), padding, or special tokens out of an instruction: `<|image_pad|>` in a tenant's text is plain
text. What differs between the families (vision tower, rotary sections, deepstack) is inside transformers' own models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from joynexus.vla.backbones import packing
from joynexus.vla.backbones.family import Family, Prepared, quiet
from joynexus.vla.backbones.images import Floats, Pixels, patchify, resize, smart_size
from joynexus.vla.feature import IMAGE, LAST, TEXT, Observation

MAX_TOKENS = 4096  # of one sample; a larger one would hold up everybody in its group
_MAX_ASPECT = 200  # as in the Qwen2-VL image processor


@dataclass(frozen=True)
class _ImageConfig:
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    mean: Floats
    std: Floats


class QwenVL(Family):
    """A Qwen-VL family.

    Attributes:
        model_class: transformers' class of the model without its language head.
    """

    model_class: ClassVar[str]

    def __init__(
        self, directory: Path, weights: Path, *, device: torch.device, dtype: torch.dtype, image_side: int | None
    ) -> None:
        """Load the model; see `Family.__init__`."""
        self._device = device
        self._images = _image_config(directory, image_side)
        self._tokenizer = _tokenizer(directory)
        self._model = self.load_model(weights, dtype, device)
        config = self._model.config
        self.hidden_size = int(config.text_config.hidden_size)
        self.depth = int(config.text_config.num_hidden_layers)
        self._image_token = int(config.image_token_id)
        self._encode = lru_cache(maxsize=1024)(self._encode_text)
        self._layout = lru_cache(maxsize=256)(self._make_layout)
        self._frame_tokens = len(self._layout("", ())[0])

    @classmethod
    def convert(cls, directory: Path, target: Path, dtype: torch.dtype) -> None:
        """Write the model without its language head in `dtype`."""
        model = cls.load_model(directory, dtype, torch.device("cpu"))
        with quiet():
            model.save_pretrained(target)

    @classmethod
    def load_model(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the frozen model, with the packed attention.

        Raises:
            ValueError: if tensors are missing; transformers would go on with random ones.
        """
        import transformers

        packing.register()
        with quiet():
            model, report = getattr(transformers, cls.model_class).from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=packing.NAME,
                local_files_only=True,
                output_loading_info=True,
            )
        if report["missing_keys"]:
            raise ValueError(f"the checkpoint in {directory} lacks weights: {sorted(report['missing_keys'])[:3]}")
        return model.eval().requires_grad_(False).to(device)

    def check(self, observation: Observation) -> None:
        """Refuse pictures that are too long and narrow, and samples of more than `MAX_TOKENS` tokens."""
        for index, image in enumerate(observation.images):
            height, width = image.shape[:2]
            if max(height, width) > _MAX_ASPECT * min(height, width):
                raise ValueError(f"image {index} is {height}x{width}: its sides differ by more than {_MAX_ASPECT} to 1")
        tokens = self.tokens(observation)
        if tokens > MAX_TOKENS:
            raise ValueError(
                f"the observation has {tokens} tokens; at most {MAX_TOKENS} are allowed: "
                "send smaller or fewer images or a shorter instruction"
            )

    def tokens(self, observation: Observation) -> int:
        """Count without laying out: an observation that is far too large must not cost memory."""
        pictures = sum(self._picture_tokens(self._grid(image)) + 2 for image in observation.images)
        return self._frame_tokens + pictures + len(self._encode(observation.instruction))

    def prepare(self, observation: Observation) -> Prepared:
        """Build token ids, three-part positions and patches."""
        c = self._images
        patches, grids = [np.zeros((0, 3 * c.frames * c.patch**2), np.float32)], []
        for image in observation.images:
            resized = resize(image, *self._size(image), bicubic=True)
            cut, grid = patchify(resized, patch=c.patch, merge=c.merge, frames=c.frames, mean=c.mean, std=c.std)
            patches.append(cut)
            grids.append(grid)
        ids, token_type, positions = self._layout(observation.instruction, tuple(grids))
        return Prepared(ids, token_type, positions, torch.from_numpy(np.concatenate(patches)), tuple(grids))

    def run(self, samples: Sequence[Prepared], layers: Sequence[int]) -> dict[int, Tensor]:
        """Run the packed group; hidden states as transformers counts them, the last one normed."""
        ids = torch.cat([s.ids for s in samples])[None].to(self._device)
        grids = [grid for s in samples for grid in s.grids]
        pictures: dict[str, Tensor] = {}
        if grids:
            pictures["pixel_values"] = torch.cat([s.pixels for s in samples]).to(self._device)
            pictures["image_grid_thw"] = torch.tensor(grids, device=self._device)
        out = self._model(
            input_ids=ids,
            position_ids=torch.cat([s.positions for s in samples], dim=1)[:, None].to(self._device),
            mm_token_type_ids=(ids == self._image_token).int(),
            use_cache=False,
            output_hidden_states=set(layers) != {LAST},
            **pictures,
        )
        return {i: (out.last_hidden_state if i == LAST else out.hidden_states[i])[0] for i in layers}

    def _size(self, image: Pixels) -> tuple[int, int]:
        c = self._images
        return smart_size(image.shape[0], image.shape[1], c.patch * c.merge, c.min_pixels, c.max_pixels)

    def _grid(self, image: Pixels) -> tuple[int, int, int]:
        height, width = self._size(image)
        return 1, height // self._images.patch, width // self._images.patch

    def _make_layout(self, instruction: str, grids: tuple[tuple[int, int, int], ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Lay out one sample: ids [L], token types [L], positions [3, L].

        The text is the family's chat format, one user turn: pictures first, then the instruction.
        """
        encode = self._encode
        ids = [self._special("<|im_start|>"), *encode("user\n")]
        for grid in grids:
            picture = [self._image_token] * self._picture_tokens(grid)
            ids += [self._special("<|vision_start|>"), *picture, self._special("<|vision_end|>")]
        ids += [*encode(instruction), self._special("<|im_end|>"), *encode("\n")]
        ids += [self._special("<|im_start|>"), *encode("assistant\n")]
        packed = torch.tensor(ids)
        kinds = torch.where(packed == self._image_token, IMAGE, TEXT).to(torch.uint8)
        positions, _ = self._model.get_rope_index(
            packed[None],
            mm_token_type_ids=kinds[None].int(),
            image_grid_thw=torch.tensor(grids) if grids else None,
        )
        return packed, kinds, positions[:, 0]

    def _picture_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[1] * grid[2] // self._images.merge**2

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _special(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, "checked when the tokenizer was loaded"
        return token_id


def _tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # special tokens in a tenant's text are plain text
    for token in ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"):
        if tokenizer.token_to_id(token) is None:
            raise ValueError(f"the tokenizer in {directory} has no token {token}: this is not a Qwen-VL checkpoint")
    return tokenizer


def _image_config(directory: Path, image_side: int | None) -> _ImageConfig:
    """Read `preprocessor_config.json`, or the part of `processor_config.json` that newer checkpoints have instead."""
    file = directory / "preprocessor_config.json"
    if file.is_file():
        config = json.loads(file.read_text())
    else:
        config = json.loads((directory / "processor_config.json").read_text())["image_processor"]
    size = config.get("size") or {}
    patch, merge = int(config["patch_size"]), int(config["merge_size"])
    lowest = int(config.get("min_pixels") or size["shortest_edge"])
    highest = int(config.get("max_pixels") or size["longest_edge"])
    if image_side is not None:
        if image_side % (patch * merge) or not patch * merge <= image_side <= 2048:
            raise ValueError(f"this backbone's image side must be a multiple of {patch * merge} up to 2048")
        lowest = highest = image_side**2  # the processor keeps the aspect ratio and the number of tokens
    mean, std = (np.asarray(config[key], dtype=np.float32) for key in ("image_mean", "image_std"))
    return _ImageConfig(patch, merge, int(config["temporal_patch_size"]), lowest, highest, mean, std)
