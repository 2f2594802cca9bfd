"""The feature store: an observation's backbone forward happens once.

In: features under keys that name everything they depend on. Out: the same features, bit for bit, after restarts and to
other processes of the host. Never: a torn or altered feature (each file carries its checksum), more bytes on disk than
the budget for long, or a hit across tenants: the scope is part of the key.

One file a feature, named by its key, written beside and renamed; so processes share a directory without locks. What was
read lately stays in memory. The oldest files go first when the budget is passed.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import blake3
import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save

from joynexus.vla.feature import Observation, VLAFeature

log = logging.getLogger(__name__)

_MAGIC = b"JNF1"
_NAME = 32  # bytes of the backbone's digest
_HEAD = len(_MAGIC) + 32 + _NAME  # magic, checksum, backbone; then safetensors
_FILL = 0.9  # an eviction goes down to this share of the budget
_RECHECK = 0.05  # share of the budget written between two looks at what others wrote


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store did in this process; `bytes` is its estimate of what lies on disk."""

    hits: int
    misses: int
    bytes: int
    evictions: int


def feature_key(
    observation: Observation,
    *,
    scope: str,
    backbone: str,
    numerics_class: str,
    layers: Sequence[int] = (-1,),
    dtype: str = "float32",
) -> str:
    """Name a feature by everything that it depends on, 64 hex digits.

    Args:
        observation: pictures and instruction.
        scope: tenant, or `shared:<name>` for data sets and simulators that the operator marks shared.
        backbone: the backbone's digest.
        numerics_class: see `joynexus.vla.numerics`.
        layers: hidden states that are kept.
        dtype: type of the feature.
    """
    hasher = blake3.blake3()
    head = (scope, backbone, numerics_class, tuple(layers), dtype, observation.instruction)
    hasher.update(msgspec.msgpack.encode((*head, [image.shape for image in observation.images])))
    for image in observation.images:
        hasher.update(image.tobytes())
    return hasher.hexdigest()


class FeatureStore:
    """Features on disk and, the latest used, in memory."""

    def __init__(self, directory: Path, budget_bytes: int, *, memory_bytes: int = 256 << 20) -> None:
        """Open a directory, made if it is missing.

        Args:
            directory: where features lie; several processes of one host may share it.
            budget_bytes: most bytes on disk.
            memory_bytes: most bytes of features kept in this process.

        Raises:
            ValueError: if a budget is negative.
        """
        if budget_bytes < 0 or memory_bytes < 0:
            raise ValueError("the feature store's budgets cannot be negative")
        self._directory = directory
        self._budget = budget_bytes
        self._memory_budget = memory_bytes
        self._memory: OrderedDict[str, VLAFeature] = OrderedDict()
        self._memory_used = 0
        self._hits = self._misses = self._evictions = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._used = 0
        self._unseen = 0
        self._make_room()

    @property
    def stats(self) -> StoreStats:
        """Counts since this store was opened."""
        return StoreStats(hits=self._hits, misses=self._misses, bytes=self._used, evictions=self._evictions)

    def get(self, key: str) -> VLAFeature | None:
        """Return a feature on the CPU, or None if it is not there or its file is damaged."""
        feature = self._memory.get(key)
        if feature is not None:
            self._memory.move_to_end(key)
        else:
            feature = self._read(key)
            if feature is not None:
                self._remember(key, feature)
        if feature is None:
            self._misses += 1
        else:
            self._hits += 1
        return feature

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep a feature; one that is larger than the budget, or finds the disk full, is kept in memory only."""
        tensors = feature.to_tensors()
        self._remember(key, VLAFeature.from_tensors(tensors, feature.backbone))
        body = save(tensors)
        content = _head(feature.backbone.encode(), body) + body
        path = self._path(key)
        if len(content) > self._budget or path.exists():
            return
        temporary = path.with_name(f"{key}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError as error:  # a store may forget: the feature can be made again
            log.warning("a feature was not stored: %s", error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self._used += len(content)
        self._unseen += len(content)
        if self._used > self._budget or self._unseen > _RECHECK * self._budget:
            self._make_room()

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / key

    def _read(self, key: str) -> VLAFeature | None:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                head, body = file.read(_HEAD), file.read()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("a stored feature cannot be read: %s", error)
            return None
        backbone = head[-_NAME:].rstrip(b"\0")
        if head == _head(backbone, body):
            with suppress(SafetensorError, ValueError):  # written by an older program: as good as absent
                feature = VLAFeature.from_tensors(load(body), backbone.decode())
                with suppress(FileNotFoundError):
                    os.utime(path)  # read lately: goes last
                return feature
        path.unlink(missing_ok=True)
        return None

    def _remember(self, key: str, feature: VLAFeature) -> None:
        if feature.nbytes > self._memory_budget:
            return
        known = self._memory.pop(key, None)
        self._memory_used += feature.nbytes - (known.nbytes if known else 0)
        self._memory[key] = feature
        while self._memory_used > self._memory_budget:
            _, dropped = self._memory.popitem(last=False)
            self._memory_used -= dropped.nbytes

    def _make_room(self) -> None:
        """Look at what lies on disk and, past the budget, remove what was used longest ago."""
        files = []
        for folder in os.scandir(self._directory):
            if folder.is_dir():
                for entry in os.scandir(folder.path):
                    with suppress(FileNotFoundError):  # another process removed it
                        info = entry.stat()
                        files.append((info.st_mtime_ns, info.st_size, entry.path))
        self._used = sum(size for _, size, _ in files)
        self._unseen = 0
        if self._used <= self._budget:
            return
        for _, size, path in sorted(files):
            if self._used <= _FILL * self._budget:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                self._evictions += 1
            self._used -= size


def _head(backbone: bytes, body: bytes) -> bytes:
    name = backbone.ljust(_NAME, b"\0")
    return _MAGIC + blake3.blake3(name + blake3.blake3(body).digest()).digest() + name
