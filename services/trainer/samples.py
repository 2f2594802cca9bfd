"""From an op to the samples it trains on: inline arrays, a payload blob, or steps of a prepared data set.

In: a `TrainItem` with its message's buffers, a policy's spec, a way to open blobs. Out: checked raw arrays, the key of
each sample's feature and a way to its observation. Never: another item's buffers, or pictures that nobody needs (those
of a data set are read only when a feature is not stored).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from common.prepared import PreparedDataset
from joynexus.contract import first_difference
from joynexus.datasets import DatasetManifest
from joynexus.specs import PolicySpec
from joynexus.unreadable import UNREADABLE
from joynexus.vla import inputs
from joynexus.vla.feature import Observation
from joynexus.wire.arrays import Array, Buffer, rebuild
from joynexus.wire.back import TrainItem
from joynexus.wire.errors import ErrorCode, JoyNexusError, WireError, failure
from joynexus.wire.frames import split
from joynexus.wire.front import DatasetSamples, Samples
from services.trainer.blobs import Blobs

KeyOf = Callable[[str, Observation], str]
"""Key of an observation's feature within a scope."""

MAX_SAMPLES = 4096
_KNOWN_KEYS = 200_000
_OPEN_DATASETS = 16

_samples_decoder = msgspec.msgpack.Decoder(Samples)
_manifest_decoder = msgspec.msgpack.Decoder(DatasetManifest)


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one op, in raw units.

    Attributes:
        state: [B, S] float32.
        action: [B, chunk, A] float32.
        action_mask: [B, chunk] bool.
        keys: B feature keys.
        observe: observation of a sample by its row.
    """

    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]
    action_mask: npt.NDArray[np.bool_]
    keys: list[str]
    observe: Callable[[int], Observation]


class SampleReader:
    """Reads the samples of ops and remembers open data sets and their feature keys.

    Args:
        blobs: where payloads, manifests and episodes lie.
        key_of: feature key of an observation.
    """

    def __init__(self, blobs: Blobs, key_of: KeyOf) -> None:
        self._blobs = blobs
        self._key_of = key_of
        self._datasets: OrderedDict[str, PreparedDataset] = OrderedDict()
        # Hashing pictures at every step is waste: a data set's step has one key for ever.
        self._keys: dict[tuple[str, str, int], str] = {}  # (scope, manifest, index)

    def read(self, item: TrainItem, buffers: Sequence[Buffer], spec: PolicySpec) -> TrainBatch:
        """Gather and check what an op trains on.

        Raises:
            JoyNexusError: `BAD_DATA`, `INVALID` or `CONTRACT_MISMATCH`: the op is at fault.
            Unreachable: a blob cannot be had.
        """
        if item.dataset is not None:
            return self._from_dataset(item.dataset, item.feature_scope, spec)
        if item.payload:
            try:
                body, *frames = split(self._blobs.view(item.payload))
            except (WireError, ValueError) as error:
                raise _invalid(f"the payload blob does not hold samples: {error}") from error
            return self._from_arrays(body, frames, item.feature_scope, spec)
        own = buffers[item.first_buffer : item.first_buffer + item.buffers]
        return self._from_arrays(item.samples, own, item.feature_scope, spec)

    def _from_arrays(self, body: Buffer, frames: Sequence[Buffer], scope: str, spec: PolicySpec) -> TrainBatch:
        try:
            samples = _samples_decoder.decode(body)
            state, action, mask = (rebuild(a, frames) for a in (samples.state, samples.action, samples.action_mask))
            images = [rebuild(array, frames) for array in samples.images]
        except (WireError, *UNREADABLE) as error:
            raise _invalid(f"the samples cannot be read: {error}") from error
        _check_count(_length(samples.state))
        rows = inputs.check_state(spec.contract, state)
        inputs.check_action(spec.contract, spec.chunk, rows, action, mask)
        seen = inputs.observations(spec.contract, rows, images, samples.instructions)
        keys = [self._key_of(scope, observation) for observation in seen]
        return TrainBatch(state, action, mask, keys, seen.__getitem__)

    def _from_dataset(self, wanted: DatasetSamples, scope: str, spec: PolicySpec) -> TrainBatch:
        _check_count(len(wanted.indices))
        dataset = self._dataset(wanted.dataset)
        difference = first_difference(spec.contract, dataset.manifest.contract)
        if difference is not None:
            sentence = f"{difference}, which is the data set here: train on a set that was recorded the same way"
            raise JoyNexusError(failure(ErrorCode.CONTRACT_MISMATCH, sentence))
        try:
            batch = dataset.batch(wanted.indices, spec.chunk)
        except IndexError as error:
            raise _invalid(f"the op cannot be done: {error}") from error
        except ValueError as error:
            inputs.refuse(f"the data set cannot be read: {error}")
        inputs.check_finite("state", batch.state, spec.contract.state_names)
        inputs.check_finite("action", batch.action, spec.contract.action_names)

        def observe(row: int) -> Observation:
            return Observation(dataset.images(wanted.indices[row]), batch.instructions[row])

        keys = []
        for row, index in enumerate(wanted.indices):
            step = (scope, wanted.dataset, index)
            if step not in self._keys:
                if len(self._keys) >= _KNOWN_KEYS:
                    self._keys.clear()
                self._keys[step] = self._key_of(scope, observe(row))
            keys.append(self._keys[step])
        return TrainBatch(batch.state, batch.action, batch.action_mask, keys, observe)

    def _dataset(self, digest: str) -> PreparedDataset:
        if digest in self._datasets:
            self._datasets.move_to_end(digest)
            return self._datasets[digest]
        try:
            manifest = _manifest_decoder.decode(self._blobs.read(digest))
        except UNREADABLE as error:
            raise _invalid(f"the blob named as data set is no manifest: {error}") from error
        self._datasets[digest] = dataset = PreparedDataset(manifest, self._blobs.path)
        if len(self._datasets) > _OPEN_DATASETS:
            self._datasets.popitem(last=False)
        return dataset


def _check_count(samples: int) -> None:
    if not 1 <= samples <= MAX_SAMPLES:
        raise _invalid(f"an op trains on 1 to {MAX_SAMPLES} samples, this one has {samples}: split it")


def _length(array: Array) -> int:
    return array.shape[0] if array.shape else 0


def _invalid(sentence: str) -> JoyNexusError:
    return JoyNexusError(failure(ErrorCode.INVALID, sentence))
