"""A checkpoint: everything a policy needs to go on as if nothing had happened, in one file.

In: a learner's tensors and counters at an optimizer boundary. Out: one safetensors file, named by its hash once it is
in the blob store, and back. Never: a file that was torn, altered, or made for another policy, spec or backbone.

The file has no sampler cursor: which samples an op trains on stands in the journal. `applied_seq` says up to which op
the file covers; all later ops are done again from the journal.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.blobs import digest_file
from common.failpoints import failpoint
from joynexus.unreadable import UNREADABLE

FORMAT = "joynexus-checkpoint-1"
_KEY = "joynexus"
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself.

    Attributes:
        format: `FORMAT`.
        tenant, policy: whose it is.
        spec: `joynexus.contract.struct_digest` of the `PolicySpec`.
        backbone: digest of the backbone whose features it was trained on.
        applied_seq: last op it covers.
        step: optimizer steps taken.
        published: last version that was published.
        update: name of the asynchronous update that is under way, whose `proximal` log-probabilities are here too.
        learner: the learner's own JSON part.
    """

    format: str = FORMAT
    tenant: str
    policy: str
    spec: str
    backbone: str
    applied_seq: int
    step: int
    published: int = 0
    update: str = ""
    learner: dict[str, Any] = {}


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the file's header; `layout` has type and shape of each tensor by name."""

    meta: CheckpointMeta
    layout: dict[str, tuple[str, tuple[_Length, ...]]]


def write_checkpoint(path: Path, tensors: dict[str, Tensor], meta: CheckpointMeta) -> None:
    """Write a checkpoint to a scratch file; the blob store makes it durable and visible in one step.

    The bytes depend on the arguments alone, so the same state has the same digest again after a replay. All tensors of
    a type lie end to end in one: a policy has hundreds of small ones, and each costs more to name than to copy.

    Raises:
        OSError: if it cannot be written (a full disk).
    """
    kinds = {name: str(tensors[name].dtype).removeprefix("torch.") for name in sorted(tensors)}
    layout = {name: (kind, tuple(tensors[name].shape)) for name, kind in kinds.items()}
    flat = {
        kind: torch.cat([tensors[name].detach().reshape(-1) for name in kinds if kinds[name] == kind]).cpu()
        for kind in sorted(set(kinds.values()))
    }
    header = json.dumps({"meta": msgspec.to_builtins(meta), "layout": layout}, sort_keys=True)
    try:
        save_file(flat, path, metadata={_KEY: header})
        failpoint("trainer.write_checkpoint")
    except SafetensorError as error:  # what it makes of an OSError
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors leaves it to its owner alone; other roles may run as other users


def read_checkpoint(path: Path, digest: str) -> tuple[dict[str, Tensor], CheckpointMeta]:
    """Read a checkpoint, all of it or nothing. The tensors share memory: copy what you keep.

    Raises:
        ValueError: if the file has another hash, or is no checkpoint of a known format.
    """
    actual = digest_file(path)
    if actual != digest:
        raise ValueError(f"checkpoint {digest} is damaged: its bytes have digest {actual}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            flat = {kind: file.get_tensor(kind).reshape(-1) for kind in file.keys()}  # noqa: SIM118 - it is no dict
        if text is None:
            raise ValueError(f"blob {digest} is no checkpoint: open the policy from one")
        header = msgspec.json.decode(text, type=_Header)
    except (SafetensorError, *UNREADABLE) as error:
        raise ValueError(f"checkpoint {digest} cannot be read: {error}") from error
    if header.meta.format != FORMAT:
        raise ValueError(f"checkpoint {digest} has format '{header.meta.format}', but this trainer reads '{FORMAT}'")
    try:
        return _split(flat, header.layout), header.meta
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"checkpoint {digest} has other tensors than its header says") from error


def _split(flat: dict[str, Tensor], layout: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Name the parts of flat tensors, in the order of their names."""
    tensors, starts = {}, dict.fromkeys(flat, 0)
    for name in sorted(layout):
        kind, shape = layout[name]
        size = math.prod(shape)
        if starts[kind] + size > len(flat[kind]):
            raise RuntimeError("there are fewer numbers than the shapes have")
        tensors[name] = flat[kind][starts[kind] : starts[kind] + size].view(shape)
        starts[kind] += size
    return tensors
