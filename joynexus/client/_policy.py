"""A policy as its tenant holds it: train it, publish it, ask it for actions.

In: numpy arrays in raw units. Out: futures of what the service did, actions in raw units. Never: torch, or a
normalisation (the service does that, once).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

import numpy.typing as npt

from joynexus import export_layout
from joynexus.client import _blobs
from joynexus.client._flow import Flow, answered, blocking, run, worked
from joynexus.client._io import Connection, answer_of
from joynexus.client._packing import (
    Batch,
    Chunk,
    Images,
    by_reference,
    join_samples,
    pack_batch,
    pack_observation,
)
from joynexus.specs import PolicySpec, check_name
from joynexus.wire import Buffer, Message
from joynexus.wire.front import (
    DeleteVersion,
    Done,
    ForwardBackward,
    GetPolicy,
    GetVersion,
    LoadState,
    LoadWeights,
    OpResult,
    OptimStep,
    PolicyInfo,
    Publish,
    SaveState,
    VersionInfo,
)

F = TypeVar("F")
"""What an op returns at once: a future to wait for, or one to await."""
Order = tuple[Message, Sequence[Buffer]]
"""An op, ready to be sent."""


class PolicyVerbs(ABC, Generic[F]):
    """What can be done with a policy, whether one waits or awaits."""

    def __init__(self, connection: Connection, name: str, *, inline_bytes: int, timeout_s: float) -> None:
        self.name = check_name("policy", name)
        self._connection = connection
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._known: PolicyInfo | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # Ops: applied in the order of the calls, each exactly once

    def forward_backward(self, batch: Batch | None = None, *, dataset: str = "", indices: Sequence[int] = ()) -> F:
        """Add the gradients of a loss on samples: given ones, or steps of a data set by name.

        Returns:
            Future whose `metrics` have `loss`. Samples too large for a message are uploaded first: by `Policy` before
            this returns, by `AsyncPolicy` meanwhile.

        Raises:
            ValueError: if neither or both are given, an index is no whole number, or arrays have a wrong shape (that
                `AsyncPolicy` raises where the future is awaited).
        """
        if (batch is None) == (not dataset):
            raise ValueError("forward_backward takes either a batch, or dataset= and indices=")
        if batch is not None:
            return self._order(self._batch(self._own(batch)))
        reference = by_reference(dataset, indices)
        return self._order(_ready(ForwardBackward(policy=self.name, lease="", seq=0, dataset=reference)))

    def optim_step(self) -> F:
        """Apply the gradients; `metrics` have `grad_norm`, `lr` and `step`."""
        return self._order(_ready(OptimStep(policy=self.name, lease="", seq=0)))

    def publish(self) -> F:
        """Make the current weights an immutable version and serve it; the result's `version` names it."""
        return self._order(_ready(Publish(policy=self.name, lease="", seq=0)))

    def save_state(self, name: str) -> F:
        """Keep module, optimizer and step count under a name."""
        return self._order(_ready(SaveState(policy=self.name, lease="", seq=0, state=check_name("state", name))))

    def load_state(self, name: str) -> F:
        """Continue from a saved state."""
        return self._order(_ready(LoadState(policy=self.name, lease="", seq=0, state=check_name("state", name))))

    def load_weights(self, path: str | Path) -> F:
        """Put own weights into the policy, as if it had been created with them; the optimizer starts anew.

        Args:
            path: a safetensors file with the action module's names (a version's, or any other), or the folder of an
                exported policy. It is uploaded first, as a large batch is.
        """
        return self._order(self._weights(Path(path)))

    @abstractmethod
    def _order(self, prepare: Flow[Order]) -> F:
        """Prepare an op and order it; ops go to the service in the order of these calls."""

    def _own(self, batch: Batch) -> Batch:
        """Return a batch that nobody changes until the op is prepared."""
        return batch

    def _batch(self, batch: Batch) -> Flow[Order]:
        spec = yield from self._spec()
        samples, buffers = yield from worked(functools.partial(pack_batch, batch, spec))
        if sum(memoryview(buffer).nbytes for buffer in buffers) <= self._inline_bytes:
            return ForwardBackward(policy=self.name, lease="", seq=0, samples=samples), buffers
        digest = yield from self._upload(lambda: _blobs.LocalBlob.of(join_samples(samples, buffers)))
        return ForwardBackward(policy=self.name, lease="", seq=0, payload=digest), ()

    def _weights(self, path: Path) -> Flow[Order]:
        digest = yield from self._upload(lambda: _blobs.LocalBlob.of(_weights_file(path)))
        return LoadWeights(policy=self.name, lease="", seq=0, weights=digest), ()

    def _upload(self, hashed: Callable[[], _blobs.LocalBlob]) -> Flow[str]:
        blob = yield from worked(hashed)
        yield from _blobs.upload(self._connection, blob)
        return blob.digest

    # The rest waits for an answer

    def _info(self) -> Flow[PolicyInfo]:
        """Describe the policy: spec, steps, versions, who drives it, where it lives."""
        ask = GetPolicy(policy=self.name)
        self._known = yield from answered(self._connection.ask(ask, answer_of(PolicyInfo), patience_s=self._timeout_s))
        return self._known

    def _spec(self) -> Flow[PolicySpec]:
        known = self._known or (yield from self._info())
        return known.spec

    def _release(self) -> Flow[None]:
        """Stop driving the policy, so that a job or another client can; waits for no op.

        Raises:
            JoyNexusError: if ops are still under way.
        """
        yield from self._before_release()
        yield from answered(self._connection.release(self.name, patience_s=self._timeout_s))

    def _before_release(self) -> Flow[None]:
        """Wait until all ops have been handed to the connection; here they have when their calls return."""
        yield from ()

    def _act(
        self,
        images: Images,
        instruction: str | Sequence[str],
        state: npt.ArrayLike,
        *,
        version: int = 0,
        seed: int | Sequence[int] = 0,
        timeout_s: float = 60.0,
    ) -> Flow[Chunk]:
        """Ask for actions.

        Args:
            images: per camera [H, W, 3] uint8, or [R, H, W, 3] for R rows at once.
            instruction: the task; one for each row, or one for all.
            state: [S], or [R, S]; raw units.
            version: version that is to act; 0 means the newest in service.
            seed: for heads that draw (`groot`): the same seed draws the same; one for each row, or one for all.
            timeout_s: give up after this long.

        Raises:
            ValueError: if arrays have a wrong shape.
            JoyNexusError: if the service refuses it, or `timeout_s` passed first.
        """
        spec = yield from self._spec()
        return (yield from answered(self._ask_act(spec, images, instruction, state, version, seed, timeout_s)))

    def _ask_act(
        self,
        spec: PolicySpec,
        images: Images,
        instruction: str | Sequence[str],
        state: npt.ArrayLike,
        version: int,
        seed: int | Sequence[int],
        timeout_s: float,
    ) -> Future[Chunk]:
        message, buffers, convert = pack_observation(
            spec, self.name, images, instruction, state, version=version, seed=seed
        )
        return self._connection.ask(message, convert, buffers=buffers, patience_s=timeout_s, resend_s=15.0)

    def _version(self, version: int = 0) -> Flow[VersionInfo]:
        """Describe a published version; 0 means the newest."""
        ask = GetVersion(policy=self.name, version=version)
        return (yield from answered(self._connection.ask(ask, answer_of(VersionInfo), patience_s=self._timeout_s)))

    def _delete_version(self, version: int) -> Flow[None]:
        """Delete a version; its number is not given again.

        Raises:
            JoyNexusError: `NOT_FOUND`; `CONFLICT` for the newest, and while a job needs it.
        """
        found = yield from self._version(version)
        ask = DeleteVersion(policy=self.name, version=found.version)
        yield from answered(self._connection.ask(ask, answer_of(Done), patience_s=self._timeout_s))

    def _export(
        self, folder: str | Path, version: int = 0, *, progress: _blobs.Progress = lambda _: None
    ) -> Flow[Path]:
        """Write a version as a folder that runs without the cluster (`joynexus.load_policy`).

        Returns:
            The folder.
        """
        target = Path(folder)
        info = yield from self._version(version)
        target.mkdir(parents=True, exist_ok=True)
        yield from _blobs.download(self._connection, info.digest, target / export_layout.WEIGHTS, progress)
        yield from worked(lambda: export_layout.complete(target))
        return target


class Policy(PolicyVerbs["Future[OpResult]"]):
    """A handle on one policy; made by `Client.policy` and `Client.create_policy`.

    The first op takes the policy's lease (one driver at a time); `release`, or leaving a `with` block, gives it back.
    """

    info = blocking(PolicyVerbs._info)
    release = blocking(PolicyVerbs._release)
    act = blocking(PolicyVerbs._act)
    version = blocking(PolicyVerbs._version)
    delete_version = blocking(PolicyVerbs._delete_version)
    export = blocking(PolicyVerbs._export)

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def spec(self) -> PolicySpec:
        """The policy's spec, contract included; it never changes."""
        return run(self._spec())

    def act_async(
        self,
        images: Images,
        instruction: str | Sequence[str],
        state: npt.ArrayLike,
        *,
        version: int = 0,
        seed: int | Sequence[int] = 0,
        timeout_s: float = 60.0,
    ) -> Future[Chunk]:
        """Ask for actions as `act` does, and return a future at once."""
        return self._ask_act(self.spec, images, instruction, state, version, seed, timeout_s)

    def _order(self, prepare: Flow[Order]) -> Future[OpResult]:
        message, buffers = run(prepare)
        return self._connection.op(self.name, message, answer_of(OpResult), buffers=buffers)


def _ready(message: Message) -> Flow[Order]:
    yield from ()
    return message, ()


def _weights_file(path: Path) -> Path:
    """Return the file that `path` means; ValueError if there is none."""
    file = path / export_layout.WEIGHTS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a safetensors file, or the folder of an exported policy")
    return file
