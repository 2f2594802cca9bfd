"""What the service knows of a data set: its faults, its contract, its statistics, and where each episode's arrays are.

In: what the env service found when it read a data set once. Out: typed structs that jobs, trainers and the CLI share.
Never: paths. A prepared data set is a manifest plus one safetensors blob an episode, all named by digest.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from joynexus.bounds import Text
from joynexus.contract import Contract, Statistics, struct_digest

MAX_STEPS = 100_000_000
"""Steps of a data set at most: a number for each (800 MB) is what a job over all of them holds."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong in a data set.

    Attributes:
        severity: `error` makes the set unusable; `warning` was read anyway, in the one way that is unambiguous.
        where: file, column or field, relative to the set.
        what: one sentence: what is wrong, what was done about it or what to do.
    """

    severity: Literal["error", "warning"]
    where: Text
    what: Text


class EpisodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared episode.

    Attributes:
        length: steps T.
        instruction: task text of the episode.
        blob: blake3 digest (64 hex digits) of its safetensors file with `state` [T, S] float32, `action` [T, A]
            float32, `timestamp` [T] float64 seconds, and `image.<camera>` [T, H, W, 3] uint8 for each camera.
        nbytes: size of that file.
    """

    length: int
    instruction: str
    blob: str
    nbytes: int


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A data set, read, checked, decoded and frozen.

    Attributes:
        source_format: `lerobot-v2.0`, `lerobot-v2.1`, `lerobot-v3.0`, `libero-hdf5`, `robomimic-hdf5`.
        source_digest: digest of the source files' names and contents.
        fps: steps per second.
        contract: embodiment contract of the recordings.
        statistics: of state and action over all steps.
        episodes: in order.
        faults: what was wrong with the source.

    Raises:
        ValueError: for an episode of a negative length, or more than `MAX_STEPS` steps in all.
    """

    source_format: str
    source_digest: str
    fps: float
    contract: Contract
    statistics: Statistics
    episodes: tuple[EpisodeEntry, ...]
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if any(episode.length < 0 for episode in self.episodes) or self.steps > MAX_STEPS:
            raise ValueError(f"a data set has at most {MAX_STEPS} steps, none of its episodes less than 0: split it")

    @property
    def steps(self) -> int:
        """Number of steps in all episodes."""
        return sum(episode.length for episode in self.episodes)

    def digest(self) -> str:
        """Return the hash (32 hex digits) that names this prepared data set in journals and jobs."""
        return struct_digest(self)
