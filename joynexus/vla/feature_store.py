"""The feature store: an observation's backbone forward happens once.

In: features under keys that name everything they depend on. Out: the same features, bit for bit, after restarts and to
other processes of the host. Never: a torn or altered feature (each file carries its checksum), more bytes on disk than
the budget for long, a hit across scopes (the scope is part of the key), or a feature in use that is lost because
another scope stores much: past the budget goes what nobody read for a month, then the oldest of whoever takes most.

One file a hidden state, in a folder a scope; written beside and renamed, so that processes share a directory without
locks. What was read lately stays in memory.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import blake3
import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save

from joynexus.vla.feature import VLAFeature
from joynexus.vla.feature_keys import scope_of
from joynexus.vla.feature_memory import FeatureMemory, fair_level

log = logging.getLogger(__name__)

_MAGIC = b"JNF2"
_NAME = 32  # bytes of the backbone's digest
_HEAD = len(_MAGIC) + 32 + _NAME  # magic, checksum, backbone; then safetensors
_FILL = 0.9  # an eviction goes down to this share of the budget
_RECHECK = 0.05  # share of the budget written between two looks at what others wrote
_STALE_S = 30 * 24 * 3600


_File = tuple[int, int, str]
"""Nanoseconds of the last use, bytes, path."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store did in this process; `bytes` is its estimate of what lies on disk."""

    hits: int
    misses: int
    bytes: int
    evictions: int


class FeatureStore:
    """Features on disk and, the latest used, in memory."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        *,
        scope_bytes: int | None = None,
        memory_bytes: int = 256 << 20,
    ) -> None:
        """Open a directory, made if it is missing.

        Args:
            directory: where features lie; several processes of one host may share it.
            budget_bytes: most bytes on disk.
            scope_bytes: most bytes of one scope; None: as many as others leave.
            memory_bytes: most bytes of features kept in this process.

        Raises:
            ValueError: if a budget is negative.
        """
        if budget_bytes < 0 or memory_bytes < 0 or (scope_bytes or 0) < 0:
            raise ValueError("the feature store's budgets cannot be negative")
        self._directory = directory
        self._budget = budget_bytes
        self._scope_budget = budget_bytes if scope_bytes is None else min(scope_bytes, budget_bytes)
        self._memory = FeatureMemory(memory_bytes, scope_bytes=scope_bytes)
        self._hits = self._misses = self._evictions = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._used: dict[str, int] = {}
        self._total = 0
        self._unseen = 0
        self._make_room()

    @property
    def stats(self) -> StoreStats:
        """Counts since this store was opened."""
        return StoreStats(hits=self._hits, misses=self._misses, bytes=self._total, evictions=self._evictions)

    def get(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        """Return a feature with at least these hidden states, on the CPU; None if one is not there or damaged."""
        feature = self._memory.get(key, layers)
        if feature is None:
            feature = self._read(key, layers)
            if feature is not None:
                self._memory.put(key, feature)
        if feature is None:
            self._misses += 1
        else:
            self._hits += 1
        return feature

    def put(self, key: str, feature: VLAFeature) -> None:
        """Keep a feature; what is larger than the budget, or finds the disk full, is kept in memory only."""
        self._memory.put(key, feature)
        for layer in feature.layers:
            self._write(key, layer, feature)
        over = self._total > self._budget or self._used.get(scope_of(key), 0) > self._scope_budget
        if over or self._unseen > _RECHECK * self._budget:
            self._make_room()

    def _write(self, key: str, layer: int, feature: VLAFeature) -> None:
        path = self._path(key, layer)
        if path.exists():
            return
        one = VLAFeature({layer: feature.layers[layer]}, feature.token_type, feature.backbone)
        body = save(one.to_tensors())
        content = _head(feature.backbone.encode(), body) + body
        if len(content) > self._scope_budget:
            return
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # in containers process ids are all the same
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError as error:  # a store may forget: the feature can be made again
            log.warning("a feature was not stored: %s", error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        scope = path.parent.name
        self._used[scope] = self._used.get(scope, 0) + len(content)
        self._total += len(content)
        self._unseen += len(content)

    def _path(self, key: str, layer: int) -> Path:
        return self._directory / scope_of(key) / f"{key}.{layer}"

    def _read(self, key: str, layers: Sequence[int]) -> VLAFeature | None:
        parts = []
        for layer in layers:
            part = self._read_file(self._path(key, layer))
            if part is None or layer not in part.layers:
                return None
            parts.append(part)
        merged = {layer: part.layers[layer] for layer, part in zip(layers, parts, strict=True)}
        return VLAFeature(merged, parts[0].token_type, parts[0].backbone) if parts else None

    def _read_file(self, path: Path) -> VLAFeature | None:
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
                with suppress(OSError):  # removed meanwhile, or another user's
                    os.utime(path)  # read lately: goes last
                return feature
        with suppress(OSError):
            path.unlink()
        return None

    def _make_room(self) -> None:
        """Look at what lies on disk and, past a budget, remove what the scopes above their share used longest ago."""
        files = self._files()
        self._used = {scope: sum(size for _, size, _ in held) for scope, held in files.items()}
        self._unseen = 0
        if sum(self._used.values()) > self._budget:
            self._drop_stale(files)
        level = self._scope_budget
        if sum(self._used.values()) > self._budget:
            level = min(level, fair_level(self._used.values(), int(_FILL * self._budget)))
        for scope, held in files.items():
            if self._used[scope] > level:
                goal = level if level < self._scope_budget else int(_FILL * level)
                self._used[scope] -= self._evict(sorted(held), self._used[scope] - goal)
        self._total = sum(self._used.values())

    def _files(self) -> dict[str, list[_File]]:
        """Find what lies on disk, by scope; a folder that is left empty goes."""
        files: dict[str, list[_File]] = {}
        with suppress(FileNotFoundError):  # somebody cleared the cache: it is made anew by the next feature
            for folder in os.scandir(self._directory):
                if not folder.is_dir():
                    continue
                held = files.setdefault(folder.name, [])
                for entry in os.scandir(folder.path):
                    with suppress(FileNotFoundError):  # another process removed it
                        info = entry.stat()
                        held.append((info.st_mtime_ns, info.st_size, entry.path))
                if not held:
                    with suppress(OSError):  # another process writes there just now
                        os.rmdir(folder.path)
        return files

    def _drop_stale(self, files: dict[str, list[_File]]) -> None:
        """Forget what nobody read for long: a tenant that left must not keep its share for ever."""
        limit = time.time_ns() - _STALE_S * 10**9
        for scope, held in files.items():
            stale = [file for file in held if file[0] < limit]
            files[scope] = [file for file in held if file[0] >= limit]
            self._used[scope] -= self._evict(stale, self._used[scope])

    def _evict(self, oldest_first: list[_File], nbytes: int) -> int:
        """Remove files until so many bytes are gone; return how many went."""
        gone = 0
        for _, size, path in oldest_first:
            if gone >= nbytes:
                break
            try:
                os.unlink(path)
                self._evictions += 1
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:
                log.warning("a stored feature cannot be removed: %s", error)
                continue
            gone += size
        return gone


def _head(backbone: bytes, body: bytes) -> bytes:
    name = backbone.ljust(_NAME, b"\0")
    return _MAGIC + blake3.blake3(name + blake3.blake3(body).digest()).digest() + name
