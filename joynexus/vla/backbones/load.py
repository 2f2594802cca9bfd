"""From a backbone's name to a loaded backbone.

In: `lite`, `tiny-…` (for tests), a checkpoint directory or a hub name, each with an optional `@<image side>`. Out: a
frozen `Backbone`. Never: an error other than one ValueError that says which name cannot be loaded and why.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError

from joynexus.vla.backbones import cache, tiny
from joynexus.vla.backbones.base import Backbone

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CHECKPOINT_FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.json"]


def load_backbone(
    name_or_dir: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    cache_dir: Path,
    image_side: int | None = None,
) -> Backbone:
    """Load a backbone, frozen and in evaluation mode.

    Args:
        name_or_dir: `lite`, `tiny-qwen3vl`, `tiny-qwen25vl`, a directory or a hub name; `lite@224` asks for another
            image side.
        device: `cpu`, `cuda`, `cuda:1`.
        dtype: `float32`, `bfloat16` or `float16`.
        cache_dir: where converted weights are kept for all processes of this host.
        image_side: side to which pictures are resized; None takes the name's or the backbone's own.

    Raises:
        ValueError: if the name is unknown or unreachable, the checkpoint's family is not supported, or an argument
            does not suit.
    """
    name, side = _split_side(name_or_dir, image_side)
    place, kind = _device(device), _dtype(dtype)
    cache_dir = cache_dir.expanduser().resolve()
    if name == "lite":
        from joynexus.vla.backbones.lite import LiteBackbone

        return LiteBackbone(cache_dir=cache_dir, device=place, dtype=kind, image_side=side)
    return _load_checkpoint(name, _directory(name, cache_dir), cache_dir, place, kind, side)


def _load_checkpoint(
    name: str, directory: Path, cache_dir: Path, device: torch.device, dtype: torch.dtype, side: int | None
) -> Backbone:
    from joynexus.vla.backbones.families import family_of
    from joynexus.vla.backbones.family import PackedBackbone

    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ValueError(f"backbone '{name}': {directory} has no config.json, so it is not a checkpoint")
    config = json.loads(config_file.read_text())
    try:
        family = family_of(config.get("model_type"))
    except ValueError as error:
        raise ValueError(f"backbone '{name}' cannot be loaded: {error}") from error
    files = sorted(file for pattern in _CHECKPOINT_FILES for file in directory.glob(pattern))
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"backbone '{name}': {directory} has no *.safetensors file; other weight files are not loaded")
    sources = cache.files_digest(sorted(set(files)), cache_dir)
    digest = cache.text_digest(f"{family.__name__}-1:{sources}:{side}")
    kind = str(dtype).removeprefix("torch.")
    stored = (config.get("text_config") or {}).get("dtype") or config.get("dtype") or config.get("torch_dtype")
    weights = directory
    try:
        if stored != kind:
            converted = cache_dir / "weights" / f"{sources}-{kind}"
            weights = cache.build_once(
                converted, lambda target: family.convert(directory, target, dtype), holds=cache.CHECKPOINT
            )
        loaded = family(directory, weights, device=device, dtype=dtype, image_side=side)
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"backbone '{name}': {directory} is not a complete checkpoint: {error}") from error
    full_name = name if side is None else f"{name}@{side}"
    return PackedBackbone(loaded, name=full_name, digest=digest, device=device, dtype=dtype)


def _directory(name: str, cache_dir: Path) -> Path:
    if name in tiny.CHECKPOINTS:
        return cache.build_once(
            cache_dir / f"{name}-{tiny.REVISION}", tiny.CHECKPOINTS[name], holds=(*cache.CHECKPOINT, "tokenizer.json")
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"there is no backbone '{name}': use 'lite', a checkpoint directory or a hub name such as "
            f"'Qwen/Qwen3-VL-2B-Instruct', or for tests {' or '.join(repr(known) for known in tiny.CHECKPOINTS)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_CHECKPOINT_FILES, etag_timeout=10))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"backbone '{name}' is neither a directory nor could it be fetched from the model hub ({reason}); "
            "check the name, or download it elsewhere and give its directory"
        ) from error


def _split_side(name: str, image_side: int | None) -> tuple[str, int | None]:
    base, at, side = name.rpartition("@")
    if not at or not side.isdigit():
        return name, image_side
    if image_side is not None and image_side != int(side):
        raise ValueError(f"backbone '{name}' and image_side={image_side} ask for different image sides: give one")
    return base, int(side)


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"'{device}' is not a device: use 'cpu' or 'cuda'") from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"'{device}' is not supported: use 'cpu' or 'cuda'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{device}' was asked for, but this machine has no usable GPU: use 'cpu'")
    return place


def _dtype(dtype: str) -> torch.dtype:
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"'{dtype}' is not a compute type: use one of {', '.join(kinds)}")
    return kinds[dtype]
