"""A policy as its tenant holds it: train it, publish it, ask it for actions.

In: numpy arrays in raw units. Out: futures of what the service did, actions in raw units. Never: torch, or a
normalisation (the service does that, once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.client import _blobs
from joynexus.client._io import Connection, answer_of
from joynexus.specs import PolicySpec, check_name
from joynexus.wire import ArrayPacker, Buffer, Message, Packet, join, rebuild
from joynexus.wire.front import (
    Act,
    Actions,
    DatasetSamples,
    ForwardBackward,
    GetPolicy,
    GetVersion,
    LoadState,
    OpResult,
    OptimStep,
    PolicyInfo,
    Publish,
    Samples,
    SaveState,
    VersionInfo,
)

Images = Mapping[str, npt.NDArray[np.uint8]] | Sequence[npt.NDArray[np.uint8]]
"""One array per camera: by name, or in the contract's order."""


@dataclass(frozen=True)
class Batch:
    """Training samples in raw units, B of them.

    Attributes:
        state: [B, S].
        action: [B, chunk, A].
        instructions: B task texts, or one for all.
        images: one [B, H, W, 3] uint8 array per camera.
        action_mask: [B, chunk] bool, False where the episode had ended; None means all are valid.
    """

    state: npt.NDArray[Any]
    action: npt.NDArray[Any]
    instructions: Sequence[str] | str
    images: Images = ()
    action_mask: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Chunk:
    """Actions of one version.

    Attributes:
        actions: [chunk, A] float32 in raw units; [R, chunk, A] if R rows were asked for.
        version: the version that acted.
    """

    actions: npt.NDArray[np.float32]
    version: int


class Policy:
    """A handle on one policy; made by `Client.policy` and `Client.create_policy`.

    The first op takes the policy's lease (one driver at a time); `release`, or leaving a `with` block, gives it back.
    """

    def __init__(self, connection: Connection, name: str, *, inline_bytes: int, timeout_s: float) -> None:
        self.name = check_name("policy", name)
        self._connection = connection
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._info: PolicyInfo | None = None

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def info(self) -> PolicyInfo:
        """Describe the policy: spec, steps, versions, who drives it."""
        self._info = self._connection.ask(
            GetPolicy(policy=self.name), answer_of(PolicyInfo), patience_s=self._timeout_s
        ).result()
        return self._info

    @property
    def spec(self) -> PolicySpec:
        """The policy's spec, contract included; it never changes."""
        return (self._info or self.info()).spec

    # Ops: applied in the order of the calls, each exactly once

    def forward_backward(
        self, batch: Batch | None = None, *, dataset: str = "", indices: Sequence[int] = ()
    ) -> Future[OpResult]:
        """Add the gradients of a loss on samples: given ones, or steps of a data set by name.

        Returns:
            Future whose `metrics` have `loss`. Samples too large for a message are uploaded before this returns.

        Raises:
            ValueError: if neither or both are given, or arrays have a wrong shape.
        """
        if (batch is None) == (not dataset):
            raise ValueError("forward_backward takes either a batch, or dataset= and indices=")
        message: Message
        buffers: Sequence[Buffer] = ()
        if batch is None:
            reference = DatasetSamples(dataset=dataset, indices=tuple(int(index) for index in indices))
            message = ForwardBackward(policy=self.name, lease="", seq=0, dataset=reference)
        else:
            samples, buffers = _pack_batch(batch, self.spec)
            if sum(memoryview(buffer).nbytes for buffer in buffers) > self._inline_bytes:
                blob = _blobs.LocalBlob.of(join([msgspec.msgpack.encode(samples), *buffers]))
                _blobs.upload(self._connection, blob)
                message, buffers = ForwardBackward(policy=self.name, lease="", seq=0, payload=blob.digest), ()
            else:
                message = ForwardBackward(policy=self.name, lease="", seq=0, samples=samples)
        return self._op(message, buffers)

    def optim_step(self) -> Future[OpResult]:
        """Apply the gradients; `metrics` have `grad_norm`, `lr` and `step`."""
        return self._op(OptimStep(policy=self.name, lease="", seq=0))

    def publish(self) -> Future[OpResult]:
        """Make the current weights an immutable version and serve it; the result's `version` names it."""
        return self._op(Publish(policy=self.name, lease="", seq=0))

    def save_state(self, name: str) -> Future[OpResult]:
        """Keep module, optimizer and step count under a name."""
        return self._op(SaveState(policy=self.name, lease="", seq=0, state=check_name("state", name)))

    def load_state(self, name: str) -> Future[OpResult]:
        """Continue from a saved state."""
        return self._op(LoadState(policy=self.name, lease="", seq=0, state=check_name("state", name)))

    def release(self) -> None:
        """Stop driving the policy, so that a job or another client can; waits for nothing.

        Raises:
            JoyNexusError: if ops are still under way.
        """
        self._connection.release(self.name).result(self._timeout_s)

    def _op(self, message: Message, buffers: Sequence[Buffer] = ()) -> Future[OpResult]:
        return self._connection.op(self.name, message, answer_of(OpResult), buffers=buffers)

    # Acting

    def act(
        self,
        images: Images,
        instruction: str | Sequence[str],
        state: npt.ArrayLike,
        *,
        version: int = 0,
        timeout_s: float = 60.0,
    ) -> Chunk:
        """Ask for actions and wait for them; see `act_async`."""
        return self.act_async(images, instruction, state, version=version, timeout_s=timeout_s).result()

    def act_async(
        self,
        images: Images,
        instruction: str | Sequence[str],
        state: npt.ArrayLike,
        *,
        version: int = 0,
        timeout_s: float = 60.0,
    ) -> Future[Chunk]:
        """Ask for actions.

        Args:
            images: per camera [H, W, 3] uint8, or [R, H, W, 3] for R rows at once.
            instruction: the task; one for each row, or one for all.
            state: [S], or [R, S]; raw units.
            version: version that is to act; 0 means the newest in service.
            timeout_s: after this long the future fails.

        Raises:
            ValueError: if arrays have a wrong shape.
        """
        spec = self.spec
        rows = np.asarray(state, dtype=np.float32)
        single = rows.ndim == 1
        rows = rows[None] if single else rows
        if rows.ndim != 2 or rows.shape[1] != spec.contract.state_dim:
            raise ValueError(f"state has shape {list(np.shape(state))}, the policy takes [{spec.contract.state_dim}]")
        pictures = [picture[None] if single else picture for picture in _pictures(images, spec)]
        packer = ArrayPacker()
        message = Act(
            policy=self.name,
            version=version,
            state=packer.add(rows),
            images=tuple(packer.add(_picture_rows(picture, len(rows))) for picture in pictures),
            instructions=_texts(instruction, len(rows)),
            contract=spec.contract.digest(),
        )

        def convert(packet: Packet) -> Chunk:
            answer = answer_of(Actions)(packet)
            actions = rebuild(answer.actions, packet.buffers)
            return Chunk(actions=actions[0] if single else actions, version=answer.version)

        return self._connection.ask(message, convert, buffers=packer.buffers, patience_s=timeout_s, resend_s=15.0)

    # Taking it home

    def version(self, version: int = 0) -> VersionInfo:
        """Describe a published version; 0 means the newest."""
        ask = GetVersion(policy=self.name, version=version)
        return self._connection.ask(ask, answer_of(VersionInfo), patience_s=self._timeout_s).result()

    def export(self, folder: str | Path, version: int = 0, *, progress: _blobs.Progress = lambda _: None) -> Path:
        """Write a version as a folder that runs without the cluster (`joynexus.load_policy`).

        Returns:
            The folder.
        """
        from joynexus import export_layout

        target = Path(folder)
        info = self.version(version)
        target.mkdir(parents=True, exist_ok=True)
        _blobs.download(self._connection, info.digest, target / export_layout.WEIGHTS, progress)
        export_layout.complete(target)
        return target


def _pictures(images: Images, spec: PolicySpec) -> list[npt.NDArray[np.uint8]]:
    cameras = [camera.name for camera in spec.contract.cameras]
    if isinstance(images, Mapping):
        absent = [name for name in cameras if name not in images]
        if absent:
            raise ValueError(f"there is no picture of camera '{absent[0]}'; the policy sees {', '.join(cameras)}")
        images = [images[name] for name in cameras]
    if len(images) != len(cameras):
        raise ValueError(f"the policy sees {len(cameras)} cameras ({', '.join(cameras)}), got {len(images)} pictures")
    return [np.asarray(picture) for picture in images]


def _picture_rows(picture: npt.NDArray[Any], rows: int) -> npt.NDArray[np.uint8]:
    if picture.dtype != np.uint8 or picture.ndim != 4 or picture.shape[0] != rows or picture.shape[3] != 3:
        raise ValueError(
            f"a picture must be uint8 of shape [H, W, 3] (with {rows} rows: [{rows}, H, W, 3]), "
            f"got {picture.dtype} of shape {list(picture.shape)}"
        )
    return picture


def _texts(texts: str | Sequence[str], rows: int) -> tuple[str, ...]:
    if isinstance(texts, str):
        return (texts,) * rows
    if len(texts) != rows:
        raise ValueError(f"there are {rows} samples but {len(texts)} instructions: give one for each, or one for all")
    return tuple(texts)


def _pack_batch(batch: Batch, spec: PolicySpec) -> tuple[Samples, list[Buffer]]:
    contract = spec.contract
    state, action = np.asarray(batch.state, dtype=np.float32), np.asarray(batch.action, dtype=np.float32)
    if state.ndim != 2 or state.shape[1] != contract.state_dim or not len(state):
        raise ValueError(f"state has shape {list(state.shape)}, the policy trains on [B, {contract.state_dim}]")
    shape = (len(state), spec.chunk, contract.action_dim)
    if action.shape != shape:
        raise ValueError(f"action has shape {list(action.shape)}, the policy trains on {list(shape)}")
    mask = np.ones(shape[:2], dtype=np.bool_) if batch.action_mask is None else np.asarray(batch.action_mask)
    if mask.shape != shape[:2] or mask.dtype != np.bool_:
        raise ValueError(f"action_mask must be bool of shape {list(shape[:2])}")
    packer = ArrayPacker()
    samples = Samples(
        state=packer.add(state),
        action=packer.add(action),
        action_mask=packer.add(mask),
        images=tuple(packer.add(_picture_rows(picture, len(state))) for picture in _pictures(batch.images, spec)),
        instructions=_texts(batch.instructions, len(state)),
    )
    return samples, packer.buffers
