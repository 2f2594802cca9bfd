"""The versions that may act, side by side in memory.

In: digests of version files. Out: policies ready to act. Never: a version whose bytes, numbers or backbone were not
checked, or a change to one that is in use: a new version is built beside the old, then takes its place on the shelf in
one assignment, and whoever holds the old one keeps it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.failpoints import failpoint
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version
from joynexus.wire.errors import ErrorCode, JoyNexusError, failure

OpenBlob = Callable[[str], Path]
"""Gives a blob's file; KeyError, OSError or JoyNexusError if it cannot be had, of code `BAD_DATA` if it is damaged."""


@dataclass(frozen=True)
class Served:
    """One version in memory.

    Attributes:
        policy: acts; frozen.
        version: its number.
        digest: of the file it was read from.
        nbytes: size of that file, which is about what it holds in memory.
    """

    policy: Policy
    version: int
    digest: str
    nbytes: int


class Shelf:
    """Versions by tenant, policy and number; those not used for longest make room. Safe to use from several threads.

    Args:
        backbone: the only one whose policies can act here.
        open_blob: gives a version's file.
        max_versions: kept at most.
        budget_bytes: kept at most; a single version may exceed it.
    """

    def __init__(self, backbone: Backbone, open_blob: OpenBlob, *, max_versions: int, budget_bytes: int) -> None:
        self._backbone = backbone
        self._open_blob = open_blob
        self._max_versions = max_versions
        self._budget = budget_bytes
        self._held: OrderedDict[tuple[str, str, int], Served] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, tenant: str, policy: str, version: int, digest: str) -> Served:
        """Return a version, reading it if it is not in memory.

        Raises:
            JoyNexusError: `UNAVAILABLE` if its blob cannot be had now, `BAD_DATA` if it is damaged, or not usable here.
        """
        key = (tenant, policy, version)
        with self._lock:
            held = self._held.get(key)
            if held is not None and held.digest == digest:
                self._held.move_to_end(key)
                return held
        served = self._read(version, digest)  # outside the lock: reading takes a while, acting must not wait for it
        with self._lock:
            self._held[key] = served
            self._held.move_to_end(key)
            while len(self._held) > 1 and self._is_full():
                self._held.popitem(last=False)
        return served

    def _is_full(self) -> bool:
        return len(self._held) > self._max_versions or sum(s.nbytes for s in self._held.values()) > self._budget

    def _read(self, version: int, digest: str) -> Served:
        try:
            failpoint("inference.load_version")
            content = self._open_blob(digest).read_bytes()
        except (KeyError, OSError, JoyNexusError) as error:
            if isinstance(error, JoyNexusError) and error.code is ErrorCode.BAD_DATA:  # damaged: no retry helps
                raise JoyNexusError(failure(ErrorCode.BAD_DATA, f"version {version} is unusable: {error}")) from error
            reason = error.strerror if isinstance(error, OSError) else error  # an OSError names a path of the service
            sentence = f"version {version} cannot be fetched now: {reason}"
            raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, sentence, retry_after_ms=1000)) from error
        try:
            loaded = read_version(content, digest, device=str(self._backbone.device))
            if loaded.version != version:
                raise ValueError(f"its file says that it is version {loaded.version}")
            if loaded.policy.backbone_digest != self._backbone.digest:
                raise ValueError(
                    f"it was trained on backbone {loaded.policy.backbone_digest}, but this service has "
                    f"{self._backbone.digest} ({self._backbone.name})"
                )
            self._backbone.check_layers(loaded.policy.layers)
        except ValueError as error:
            raise JoyNexusError(failure(ErrorCode.BAD_DATA, f"version {version} is unusable: {error}")) from error
        return Served(policy=loaded.policy, version=version, digest=digest, nbytes=loaded.nbytes)
