"""Read a prepared data set: steps by index, as arrays ready to train on.

In: a `DatasetManifest` and a way to open its blobs. Out: batches of state, action chunks with masks, instructions and
pictures. Never: decoding (done once, by whoever prepared the set), randomness, or an action of another episode.

Steps are numbered through the whole set, episode after episode: index `i` is step `t` of one episode (`locate`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from joynexus.datasets import DatasetManifest

Indices = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """B samples; S and A are the contract's state and action dimensions.

    Attributes:
        state: [B, S] float32, raw (not normalised).
        action: [B, chunk, A] float32, raw; past an episode's end its last action is repeated.
        action_mask: [B, chunk] bool, False where the action is such a repetition.
        instructions: B task texts.
    """

    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]
    action_mask: npt.NDArray[np.bool_]
    instructions: list[str]


class _Episode(NamedTuple):
    file: Any  # safetensors' memory-mapped handle
    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]


class PreparedDataset:
    """Random access to the steps of a prepared data set.

    Args:
        manifest: what the set consists of.
        open_blob: gives the file of a digest (`BlobStore.path`).
        max_open: episodes kept open (memory-mapped, with their states and actions) at most.
    """

    def __init__(self, manifest: DatasetManifest, open_blob: Callable[[str], Path], *, max_open: int = 256) -> None:
        self.manifest = manifest
        self._open_blob = open_blob
        self._max_open = max_open
        self._starts = _starts(manifest)
        self._open: OrderedDict[int, _Episode] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Return (episode, step within it) of a step index; IndexError outside 0 … len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} is outside the data set, which has steps 0 to {len(self) - 1}")
        episode = int(np.searchsorted(self._starts, index, side="right")) - 1
        return episode, int(index - self._starts[episode])

    def sample_range(self, episodes: Iterable[int]) -> Indices:
        """Return the step indices of some episodes, in the order given; IndexError for an unknown episode."""
        return _step_range(self._starts, episodes)

    def batch(self, indices: Iterable[int] | Indices, chunk: int) -> Batch:
        """Gather B samples with the `chunk` actions that follow each; see `Batch`.

        Raises:
            IndexError: for an index outside the set.
            KeyError: if a blob is missing.
            ValueError: if `chunk` is not positive or a blob is not what the manifest says.
        """
        if chunk < 1:
            raise ValueError(f"a chunk of {chunk} actions cannot be gathered: it must have at least one")
        located = [self.locate(int(index)) for index in indices]
        contract = self.manifest.contract
        state = np.empty((len(located), contract.state_dim), np.float32)
        action = np.empty((len(located), chunk, contract.action_dim), np.float32)
        mask = np.empty((len(located), chunk), np.bool_)
        ahead = np.arange(chunk)
        for row, (number, t) in enumerate(located):
            episode = self._episode(number)
            last = len(episode.action) - 1
            state[row] = episode.state[t]
            action[row] = episode.action[np.minimum(t + ahead, last)]
            mask[row] = t + ahead <= last
        return Batch(state, action, mask, [self.manifest.episodes[number].instruction for number, _ in located])

    def images(self, index: int) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return a step's pictures, each [H, W, 3] uint8 RGB, in the contract's camera order; errors as `batch`."""
        number, t = self.locate(index)
        file = self._episode(number).file
        return tuple(file.get_slice(f"image.{camera.name}")[t] for camera in self.manifest.contract.cameras)

    def _episode(self, number: int) -> _Episode:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        entry, contract = self.manifest.episodes[number], self.manifest.contract
        try:
            # Any: the library's annotations leave its own methods untyped.
            file: Any = safe_open(self._open_blob(entry.blob), framework="numpy")
            state, action = file.get_tensor("state"), file.get_tensor("action")
        except SafetensorError as error:
            raise ValueError(
                f"the blob of episode {number} is damaged ({error}): prepare the data set again"
            ) from error
        if state.shape != (entry.length, contract.state_dim) or action.shape != (entry.length, contract.action_dim):
            raise ValueError(
                f"the blob of episode {number} has state {state.shape} and action {action.shape}, which its manifest "
                "contradicts: prepare the data set again"
            )
        for camera in contract.cameras:
            found = _picture_form(file, camera.name)
            if found != ((entry.length, camera.height, camera.width, 3), "U8"):
                raise ValueError(
                    f"the blob of episode {number} has pictures {found} of camera '{camera.name}', which its manifest "
                    "contradicts: prepare the data set again"
                )
        self._open[number] = episode = _Episode(file, state, action)
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return episode


def training_indices(manifest: DatasetManifest, holdout_episodes: int) -> Indices:
    """Return the steps that may be trained on: all but those of the last `holdout_episodes` episodes; read-only.

    Raises:
        ValueError: if nothing would be left to train on.
    """
    count = len(manifest.episodes)
    if not 0 <= holdout_episodes < count:
        raise ValueError(
            f"holdout_episodes is {holdout_episodes}, but the data set has {count} episodes: "
            f"hold out at most {count - 1}"
        )
    indices = _step_range(_starts(manifest), range(count - holdout_episodes))
    indices.flags.writeable = False
    return indices


def _starts(manifest: DatasetManifest) -> Indices:
    """Return the index of each episode's first step, and the number of steps at the end; [episodes + 1]."""
    return np.cumsum([0, *(episode.length for episode in manifest.episodes)], dtype=np.int64)


def _step_range(starts: Indices, episodes: Iterable[int]) -> Indices:
    ranges = []
    for episode in episodes:
        if not 0 <= episode < len(starts) - 1:
            raise IndexError(f"episode {episode} is outside the data set, which has episodes 0 to {len(starts) - 2}")
        ranges.append(np.arange(starts[episode], starts[episode + 1]))
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)


# Any: as in `_episode`.
def _picture_form(file: Any, camera: str) -> tuple[tuple[int, ...], str] | None:
    """Return shape and type of a camera's pictures, without reading them; None if there are none."""
    try:
        pictures = file.get_slice(f"image.{camera}")
    except SafetensorError:
        return None
    return tuple(pictures.get_shape()), pictures.get_dtype()
