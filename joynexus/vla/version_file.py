"""A version on disk: one immutable safetensors file.

In: a policy and its version number. Out: a file that says everything needed to act: tensors, spec with contract and
statistics, and the backbone it needs. Never: pickle, a file that is there but incomplete, or a policy out of a file in
which anything is missing, unknown, of another shape or not finite.

The same policy and version give the same bytes, so a replay after a crash issues the same digest.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from joynexus.specs import PolicySpec
from joynexus.unreadable import UNREADABLE
from joynexus.vla.actor_critic import PREFIX
from joynexus.vla.policy import Policy
from joynexus.vla.tensors import brief, check_names, check_tensors, layout
from joynexus.wire.back import RlBegin

FORMAT = 1
_KEY = "joynexus"  # one metadata entry only: safetensors writes several in no fixed order
_MAX_HEADER = 16 << 20


class VersionMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a version file says beside its tensors.

    Attributes:
        format: layout of the file.
        version: number of the version.
        spec: the policy's spec, with contract and statistics.
        backbone_digest, hidden_size: the backbone whose features it takes, and their width.
        numerics_class: where it was made, see `joynexus.vla.numerics`; empty if not stated.
        rl: what RL added to the policy, whose tensors' names begin with `rl.`; None if nothing.
    """

    format: int
    version: int
    spec: PolicySpec
    backbone_digest: str
    hidden_size: int
    numerics_class: str = ""
    rl: RlBegin | None = None


@dataclass(frozen=True)
class LoadedVersion:
    """A version, read and checked; `digest` and `nbytes` are those of its file."""

    policy: Policy
    meta: VersionMeta
    digest: str
    nbytes: int

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.meta.version

    @property
    def spec(self) -> PolicySpec:
        """The policy's spec."""
        return self.meta.spec


def write_version(path: Path, policy: Policy, version: int, *, numerics_class: str = "") -> tuple[str, int]:
    """Write a version, atomically and durably.

    Returns:
        blake3 digest of the file (64 hex digits) and its size in bytes.

    Raises:
        ValueError: if a tensor holds NaN or infinity.
    """
    meta = VersionMeta(
        format=FORMAT,
        version=version,
        spec=policy.spec,
        backbone_digest=policy.backbone_digest,
        hidden_size=policy.hidden_size,
        numerics_class=numerics_class,
        rl=policy.rl,
    )
    tensors = {name: t.detach().cpu().contiguous() for name, t in policy.tensors().items()}
    check_tensors(f"version {version}", tensors, policy.layout)
    content = save(tensors, {_KEY: msgspec.json.encode(meta, order="deterministic").decode()})
    write_durably(path, content)
    return blake3.blake3(content).hexdigest(), len(content)


def read_version(source: Path | bytes, expected_digest: str | None = None, *, device: str = "cpu") -> LoadedVersion:
    """Read a version and build its policy.

    Args:
        source: path or content of a version file.
        expected_digest: digest that the file must have.
        device: where the policy goes.

    Raises:
        ValueError: saying what is wrong with the file.
    """
    name = f"version file {source}" if isinstance(source, Path) else "version file"
    try:
        content = source.read_bytes() if isinstance(source, Path) else bytes(source)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    digest = blake3.blake3(content).hexdigest()
    if expected_digest is not None and digest != expected_digest:
        raise ValueError(f"{name} has digest {digest}, expected {expected_digest}: it was damaged or exchanged")
    meta = _read_meta(name, content)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(f"{name} is damaged: {brief(error)}") from error
    policy = Policy(meta.spec, meta.backbone_digest, meta.hidden_size, device=device, drawn=False)
    if meta.rl is not None:
        policy.begin_rl(meta.rl, drawn=False)
    check_tensors(name, tensors, policy.layout)
    policy.load_tensors(tensors)
    policy.module.eval()
    return LoadedVersion(policy=policy, meta=meta, digest=digest, nbytes=len(content))


def read_weights(source: Path, policy: Policy) -> dict[str, Tensor]:
    """Read weights for a policy's module: out of a version file, or of any safetensors file with the module's names.

    The names are those of `policy.module.state_dict()`, which a version file has too; every name must be there, and no
    other except what RL added to a version, which stays behind. The backbone is compared if the file says which one it
    was trained on: a version does, other files may, as the metadata entry `backbone_digest`.

    Raises:
        ValueError: saying what is wrong with the file.
    """
    name, expected = "the weights file", layout(policy.module)
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            meta = _decode_meta(name, metadata[_KEY]) if _KEY in metadata else None
            beside = PREFIX if meta is not None and meta.rl is not None else ()
            check_names(name, [key for key in list(file.keys()) if not key.startswith(beside)], expected)
            for key, (shape, _) in expected.items():  # before memory is taken for it
                found = list(file.get_slice(key).get_shape())
                if found != list(shape):
                    raise ValueError(f"{name} does not fit its spec: '{key}' is {found}, expected {list(shape)}")
            tensors = {key: file.get_tensor(key) for key in expected}
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ValueError(f"{name} is no safetensors file, or damaged: {brief(error)}") from error
    stated = metadata.get("backbone_digest") if meta is None else meta.backbone_digest
    if stated is not None and stated != policy.backbone_digest:
        raise ValueError(
            f"{name} was trained on backbone {brief(stated, 64)}, but this policy reads {policy.backbone_digest}: "
            "create the policy on that backbone"
        )
    check_tensors(name, tensors, expected)
    return tensors


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class _Header(msgspec.Struct, frozen=True):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class _Format(msgspec.Struct, frozen=True):
    format: int


def _read_meta(name: str, content: bytes) -> VersionMeta:
    """Read the metadata out of the safetensors header: 8 bytes of length, then JSON."""
    try:
        (size,) = struct.unpack_from("<Q", content)
        if size > min(_MAX_HEADER, len(content) - 8):
            raise ValueError(f"{name} is truncated: its header says {size} bytes, the file has {len(content)}")
        text = msgspec.json.decode(content[8 : 8 + size], type=_Header).metadata[_KEY]
    except (struct.error, KeyError, *UNREADABLE) as error:
        raise ValueError(f"{name} is not a JoyNexus version file: it has no readable metadata") from error
    return _decode_meta(name, text)


def _decode_meta(name: str, text: str) -> VersionMeta:
    try:
        found = msgspec.json.decode(text, type=_Format).format
    except UNREADABLE as error:
        raise ValueError(f"{name} is not a JoyNexus version file: it has no readable metadata") from error
    if found != FORMAT:
        raise ValueError(f"{name} has format {found}; this program reads format {FORMAT}: use a newer one")
    try:
        return msgspec.json.decode(text, type=VersionMeta)
    except UNREADABLE as error:
        raise ValueError(f"{name} has metadata that is not valid: {brief(error)}") from error
