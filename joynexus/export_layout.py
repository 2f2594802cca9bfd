"""The folder of an exported policy, written without torch.

In: a version file (safetensors with metadata) that lies in the folder already. Out: the readable files beside it.
Never: torch, or a tensor: only the file's header is read.

    policy.safetensors  weights, and everything below once more
    config.json         the policy's spec
    contract.json       what observations and actions mean
    statistics.json     normalisation, applied inside
    README.txt          how to use it
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec

from joynexus.specs import PolicySpec

WEIGHTS = "policy.safetensors"

_MAX_HEADER_BYTES = 16 * 1024 * 1024

_README = """\
A robot policy, version {version}, exported from JoyNexus.

    pip install "joynexus[vla]"

    import joynexus
    policy = joynexus.load_policy("{folder}")
    actions = policy.act(images, instruction, state)   # [{chunk}, {action_dim}], raw units
    print(policy.numerics)                             # are these the service's actions, bit for bit?

images: one uint8 array [height, width, 3] a camera, in this order: {cameras}
state: {state_dim} numbers, raw units, as in contract.json

policy.safetensors  weights, and everything below once more
config.json         the policy's spec        statistics.json  normalisation, applied inside
contract.json       what observations and actions mean

Backbone: {backbone} (digest {digest}). It isn't in this folder.
"""


class VersionHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the layout needs of a version file's metadata; the rest is skipped."""

    version: int
    spec: PolicySpec
    backbone_digest: str


def read_head(path: Path) -> VersionHead:
    """Read the metadata of a version file: 8 bytes of length, then JSON with the entry `joynexus`.

    Raises:
        ValueError: if it is not a version file.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"{path} is not a version file: its header is too large")
            text = json.loads(file.read(size))["__metadata__"]["joynexus"]
        return msgspec.json.decode(text, type=VersionHead)
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is not a JoyNexus version file: it has no readable metadata") from error


def complete(folder: Path) -> VersionHead:
    """Write the readable files beside the weights in `folder`; files that are there are replaced.

    Raises:
        ValueError: if the weights are not a version file.
    """
    head = read_head(folder / WEIGHTS)
    spec, contract = head.spec, head.spec.contract
    for name, value in (("config", spec), ("contract", contract), ("statistics", spec.statistics)):
        content = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
        (folder / f"{name}.json").write_bytes(content)
    text = _README.format(
        version=head.version,
        folder=folder.name,
        chunk=spec.chunk,
        action_dim=contract.action_dim,
        state_dim=contract.state_dim,
        cameras=", ".join(f"{c.name} ({c.height}x{c.width})" for c in contract.cameras) or "none",
        backbone=spec.backbone,
        digest=head.backbone_digest,
    )
    (folder / "README.txt").write_text(text)
    return head
