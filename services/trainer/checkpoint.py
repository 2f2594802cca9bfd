"""A checkpoint: everything a policy needs to go on as if nothing had happened, in one file.

In: a learner's tensors and counters at an optimizer boundary. Out: one safetensors file, named by its hash once it is
in the blob store, and back. Never: a file that was torn, altered, or made for another policy, spec or backbone.

The file has no sampler cursor: which samples an op trains on stands in the journal. `applied_seq` says up to which op
the file covers; all later ops are done again from the journal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.blobs import digest_file

FORMAT = "joynexus-checkpoint-1"
_KEY = "joynexus"


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself.

    Attributes:
        format: `FORMAT`.
        tenant, policy: whose it is.
        spec: `joynexus.contract.struct_digest` of the `PolicySpec`.
        backbone: digest of the backbone whose features it was trained on.
        applied_seq: last op it covers.
        step: optimizer steps taken.
        learner: the learner's own JSON part.
    """

    format: str = FORMAT
    tenant: str
    policy: str
    spec: str
    backbone: str
    applied_seq: int
    step: int
    learner: dict[str, Any] = {}


def write_checkpoint(path: Path, tensors: dict[str, Tensor], meta: CheckpointMeta) -> None:
    """Write a checkpoint to a scratch file; the blob store makes it durable and visible in one step.

    The bytes depend on the arguments alone, so the same state has the same digest again after a replay.

    Raises:
        OSError: if it cannot be written (a full disk).
    """
    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    try:
        save_file(ordered, path, metadata={_KEY: json.dumps(msgspec.to_builtins(meta), sort_keys=True)})
    except SafetensorError as error:  # what it makes of an OSError
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors leaves it to its owner alone; other roles may run as other users


def read_checkpoint(path: Path, digest: str) -> tuple[dict[str, Tensor], CheckpointMeta]:
    """Read a checkpoint, all of it or nothing.

    Raises:
        ValueError: if the file has another hash, or is no checkpoint of a known format.
    """
    actual = digest_file(path)
    if actual != digest:
        raise ValueError(f"checkpoint {digest} is damaged: its bytes have digest {actual}")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        if header is None:
            raise ValueError(f"blob {digest} is no checkpoint: open the policy from one")
        meta = msgspec.json.decode(header, type=CheckpointMeta)
    except (SafetensorError, msgspec.MsgspecError) as error:
        raise ValueError(f"checkpoint {digest} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise ValueError(f"checkpoint {digest} has format '{meta.format}', but this trainer reads '{FORMAT}'")
    return tensors, meta
