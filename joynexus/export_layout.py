"""The folder of an exported policy, written without torch.

In: a version file (safetensors with metadata) that lies in the folder already. Out: the readable files beside it, and
the version file without what only RL needs of it. Never: torch, or a tensor's numbers: they are copied as bytes.

    policy.safetensors  weights, and everything below once more
    config.json         the policy's spec
    contract.json       what observations and actions mean
    statistics.json     normalisation, applied inside
    README.txt          how to use it
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from joynexus.specs import PolicySpec

WEIGHTS = "policy.safetensors"

_METADATA, _KEY, _RL = "__metadata__", "joynexus", "rl."
_Meta = TypeVar("_Meta")
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
    with path.open("rb") as file:
        _, text = _read_header(file, path)
    return _decode(text, VersionHead, path)


def leave_out_rl(path: Path) -> None:
    """Rewrite a version file without what an RL job added to it, the tensors `rl.*`; one without is left as it is.

    Raises:
        ValueError: if it is not a version file.
    """
    with path.open("rb") as file:
        header, text = _read_header(file, path)
        meta = _decode(text, dict[str, Any], path)
        if meta.get("rl") is None:
            return
        start = file.tell()
        layout, end = {_METADATA: {_KEY: json.dumps(meta | {"rl": None})}}, 0
        tensors = {name: each for name, each in header.items() if name != _METADATA and not name.startswith(_RL)}
        for name, each in tensors.items():
            first, behind = each["data_offsets"]
            layout[name] = each | {"data_offsets": [end, end + behind - first]}
            end += behind - first
        encoded = json.dumps(layout).encode()
        encoded += b" " * (-len(encoded) % 8)  # numbers that begin at multiples of their size can be mapped
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as out:
                out.write(struct.pack("<Q", len(encoded)) + encoded)
                for each in tensors.values():
                    first, behind = each["data_offsets"]
                    file.seek(start + first)
                    out.write(file.read(behind - first))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def complete(folder: Path) -> VersionHead:
    """Write the readable files beside the weights in `folder`, and take from these what only RL needs.

    Files that are there are replaced.

    Raises:
        ValueError: if the weights are not a version file.
    """
    leave_out_rl(folder / WEIGHTS)
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


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], str]:
    """Read a safetensors header, 8 bytes of length and JSON; return it, and the text of its entry `joynexus`."""
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a version file: its header is too large")
        header: dict[str, Any] = json.loads(file.read(size))
        text: str = header[_METADATA][_KEY]
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise _unreadable(path) from error
    return header, text


def _decode(text: str, kind: type[_Meta], path: Path) -> _Meta:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, TypeError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> ValueError:
    return ValueError(f"{path} is not a JoyNexus version file: it has no readable metadata")
