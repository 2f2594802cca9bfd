"""Exported policies: a folder that acts without the cluster.

In: a version file. Out: a folder of safetensors and JSON, and from it a policy that runs the same code as the inference
service. Never: silence about numerics: a loaded policy says whether its actions are bit-equal to the service's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus import export_layout
from joynexus.contract import Contract
from joynexus.specs import PolicySpec
from joynexus.vla import numerics

if TYPE_CHECKING:
    # Imported in the functions: `load_policy` must choose how torch computes before torch is loaded.
    from joynexus.vla.backbones import Backbone
    from joynexus.vla.version_file import LoadedVersion


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a loaded policy's actions are the service's.

    Attributes:
        bit_equal: True if the same bits are to be expected.
        reason: one sentence.
    """

    bit_equal: bool
    reason: str


class ExportedPolicy:
    """A policy with its backbone, for one robot or script.

    Attributes:
        spec: the policy's spec.
        version: number of the version.
        numerics: whether its actions are bit-equal to the service's.
    """

    def __init__(self, loaded: LoadedVersion, backbone: Backbone) -> None:
        self.spec: PolicySpec = loaded.spec
        self.version = loaded.version
        self.numerics = _compare(loaded.meta.numerics_class, backbone)
        self._policy = loaded.policy
        self._backbone = backbone

    @property
    def contract(self) -> Contract:
        """What observations and actions mean."""
        return self.spec.contract

    def act(
        self,
        images: Sequence[npt.NDArray[np.uint8]] | Mapping[str, npt.NDArray[np.uint8]],
        instruction: str,
        state: npt.ArrayLike,
        *,
        seed: int = 0,
    ) -> npt.NDArray[np.float32]:
        """Predict one chunk.

        Args:
            images: uint8 [H, W, 3], in the contract's camera order or by camera name.
            instruction: task text.
            state: [S], raw units.
            seed: for heads that draw; the same seed draws the same noise, here and in the service.

        Returns:
            float32 [chunk, A], raw units, within the contract's limits.

        Raises:
            ValueError: if cameras, picture sizes or the state do not fit the contract.
        """
        cameras = self.contract.cameras
        if isinstance(images, Mapping):
            if set(images) != {camera.name for camera in cameras}:
                raise ValueError(f"images are of {sorted(images)}; the contract's are {[c.name for c in cameras]}")
            images = [images[camera.name] for camera in cameras]
        sizes = [image.shape[:2] for image in images]
        if sizes != [(camera.height, camera.width) for camera in cameras]:
            wanted = ", ".join(f"{c.name} {c.height}x{c.width}" for c in cameras) or "none"
            raise ValueError(f"images have sizes {sizes}; the contract asks for: {wanted}")
        from joynexus.vla.feature import Observation

        features = self._backbone.forward([Observation(tuple(images), instruction)], self._policy.layers)
        states = np.asarray(state, dtype=np.float32)[None]
        chunk: npt.NDArray[np.float32] = self._policy.act(features, states, seeds=[seed])[0]
        return chunk


def export_policy(version_path: Path, folder: Path) -> None:
    """Write the folder of an exported policy (`joynexus.export_layout`); files that are there are replaced.

    Raises:
        ValueError: if the version file is not valid.
    """
    from joynexus.vla.version_file import read_version, write_durably

    read_version(version_path)  # refuses what could not be loaded again
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / export_layout.WEIGHTS, version_path.read_bytes())
    export_layout.complete(folder)


def load_policy(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    backbone: str | None = None,
    cache_dir: Path | None = None,
) -> ExportedPolicy:
    """Load an exported policy with its backbone.

    On a CPU this sets the process up as the service does: one thread, and reproducible kernels if torch is not loaded
    yet. If it must be loaded earlier, call `joynexus.vla.numerics.configure` before that.

    Args:
        folder: what `export_policy` wrote.
        device, dtype: where and in which type the backbone computes.
        backbone: name or directory, if the backbone lies elsewhere on this machine.
        cache_dir: where converted backbone weights are kept; default `$JOYNEXUS_CACHE` or `~/.cache/joynexus`.

    Raises:
        ValueError: if the folder is not valid, or the backbone cannot be loaded or is another one.
    """
    if device == "cpu":
        numerics.configure()
    from joynexus.vla.backbones import load_backbone
    from joynexus.vla.version_file import read_version

    loaded = read_version(Path(folder) / export_layout.WEIGHTS, device=device)
    cache = cache_dir or Path(os.environ.get("JOYNEXUS_CACHE", "~/.cache/joynexus"))
    model = load_backbone(backbone or loaded.spec.backbone, device=device, dtype=dtype, cache_dir=cache)
    if model.digest != loaded.meta.backbone_digest:
        raise ValueError(
            f"backbone '{model.name}' here has digest {model.digest}, the policy was trained on "
            f"{loaded.meta.backbone_digest}: its weights or image processing differ"
        )
    if model.exact:
        model.group_exactly = False  # one sample at a time anyway
    return ExportedPolicy(loaded, model)


def _compare(theirs: str, backbone: Backbone) -> Numerics:
    ours = numerics.numerics_class(backbone.device, backbone.dtype)
    if not theirs:
        return Numerics(bit_equal=False, reason="the version does not say on what it was made; expect about 1e-5")
    if ours != theirs:
        return Numerics(bit_equal=False, reason=f"this process is {ours}, the service was {theirs}; expect about 1e-5")
    if not backbone.exact:
        return Numerics(bit_equal=False, reason=f"on {ours} results depend on what else is in the group")
    return Numerics(bit_equal=True, reason=f"this process computes as the service did: {ours}")
