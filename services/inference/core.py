"""The inference engine: groups of requests in, actions out; one backbone forward for all rows of a group.

In: a `PredictGroup` with its buffers, and offers of new versions. Out: `PredictDone` with its buffers, `WeightsApplied`
or `WeightsRefused`. Never: sockets, actions that depend on who else is in the group, or a request that fails because
another one is bad: what is wrong with a request is found before it joins the forward, and a row that makes a forward
fail nevertheless is found by halving the group.

Features of a data set's pictures (`PredictItem.feature_scope`), and of what a policy explores from (`Act.explore`), go
to the store that all roles of the host share: a trainer will want them. Those of other moments of a robot or simulator
stay in memory for a while, so that several versions may act on the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from common.telemetry import get_logger
from joynexus.unreadable import UNREADABLE
from joynexus.vla import inputs
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.busy import BusyClock
from joynexus.vla.feature import Observation
from joynexus.vla.feature_memory import FeatureMemory
from joynexus.vla.shared_forward import ForwardFailed, Need, SharedForward, Store
from joynexus.wire import limits
from joynexus.wire.arrays import Array, ArrayPacker, Buffer, rebuild
from joynexus.wire.back import (
    PredictDone,
    Predicted,
    PredictGroup,
    PredictItem,
    WeightsApplied,
    WeightsOffer,
    WeightsRefused,
)
from joynexus.wire.errors import ErrorCode, Failure, JoyNexusError, WireError, failure
from joynexus.wire.front import Act, Exploration
from services.inference.versions import OpenBlob, Served, Shelf

log = get_logger(__name__)

_act_decoder = msgspec.msgpack.Decoder(Act)


@dataclass
class _Request:
    """A request that was found good; `busy_s` grows as it is worked on."""

    item: PredictItem
    served: Served
    act: Act
    state: npt.NDArray[np.float32]
    need: Need
    busy_s: float = 0.0


class PredictEngine:
    """Served versions on a shared backbone.

    Args:
        backbone: shared and frozen.
        open_blob: gives a version's file.
        features: keeps features of data sets and of what is explored from; None keeps them as the others.
        keep_all: keep all features there.
        memory_bytes: most bytes of the features that are kept in memory only.
        max_versions, budget_bytes: versions in memory at most.
        clock: measures busy time; None takes the backbone's device.
        max_rows: rows in one forward at most.
    """

    def __init__(
        self,
        backbone: Backbone,
        open_blob: OpenBlob,
        features: Store | None = None,
        *,
        keep_all: bool = False,
        memory_bytes: int = 256 << 20,
        max_versions: int = 32,
        budget_bytes: int = 4 * 1024**3,
        clock: BusyClock | None = None,
        max_rows: int = 64,
    ) -> None:
        self._clock = clock or BusyClock(backbone.device)
        self._shelf = Shelf(backbone, open_blob, max_versions=max_versions, budget_bytes=budget_bytes)
        self._features = features
        self._keep_all = keep_all
        self._forward = SharedForward(backbone, FeatureMemory(memory_bytes), self._clock, max_rows=max_rows)

    def load(self, offer: WeightsOffer) -> WeightsApplied | WeightsRefused:
        """Take a version into memory beside those that act; may run on a thread of its own."""
        tenant, policy, version = offer.tenant, offer.policy, offer.version
        loading = self._clock.overhead()  # on a GPU nothing: between its events lies the work of those who act
        try:
            self._shelf.get(tenant, policy, version, offer.digest)
        except JoyNexusError as error:
            refused = error.failure
        except Exception:  # whatever it is, the version before it keeps acting, and somebody waits for an answer
            log.exception("version_not_loaded", tenant=tenant, policy=policy, version=version)
            sentence = f"version {version} failed to load; the inference service's log has the reason"
            refused = failure(ErrorCode.INTERNAL, sentence)
        else:
            return WeightsApplied(tenant=tenant, policy=policy, version=version, busy_s=loading.take())
        return WeightsRefused(tenant=tenant, policy=policy, version=version, error=refused, busy_s=loading.take())

    def predict(self, group: PredictGroup, buffers: Sequence[Buffer] = ()) -> tuple[PredictDone, list[Buffer]]:
        """Do a group; return the answers, one an item in order, and the buffers they refer to."""
        overhead, forwarded_s = self._clock.overhead(), self._forward.own_s
        prepared = [self._prepare(item, buffers) for item in group.items]
        good = [request for request in prepared if isinstance(request, _Request)]
        self._forward.complete([request.need for request in good])
        packer = ArrayPacker()
        answers = tuple(
            self._act(request, packer) if isinstance(request, _Request) else request for request in prepared
        )
        forwarded_s = self._forward.own_s - forwarded_s
        shared_s = sum(request.need.busy_s for request in good)
        overhead.part(sum(answer.busy_s for answer in answers) - shared_s + forwarded_s)
        items = _with_overhead(answers, overhead.take())
        return PredictDone(task=group.task, attempt=group.attempt, items=items), packer.buffers

    def _prepare(self, item: PredictItem, buffers: Sequence[Buffer]) -> _Request | Predicted:
        """Read and check a request, and look up its features."""
        elapsed = self._clock.start()
        try:
            served = self._shelf.get(item.tenant, item.policy, item.version, item.digest)
            act, state, seen = _read(item, buffers, served)
            scope = item.feature_scope or f"tenant:{item.tenant}"
            keys = [self._forward.key(scope, observation) for observation in seen]
            store = self._features if item.feature_scope or act.explore or self._keep_all else None
            need = self._forward.look_up(keys, seen.__getitem__, served.policy.layers, store)
        except JoyNexusError as error:
            refused = error.failure
        except torch.AcceleratorError:
            raise  # the device is lost to this process, which must start anew
        except Exception:  # a fault of ours over one request must not take the other tenants down
            refused = _note_fault(item)
        else:
            return _Request(item, served, act, state, need, elapsed())
        return Predicted(request=item.request, version=item.version, error=refused, busy_s=elapsed())

    def _act(self, request: _Request, packer: ArrayPacker) -> Predicted:
        """Do the private part of a request."""
        item, elapsed = request.item, self._clock.start()
        answer = Predicted(
            request=item.request,
            version=request.served.version,
            rows=len(request.state),
            backbone_forwards=request.need.forwards,
        )
        try:
            actions, exploration = _actions(request, packer)
            answer = msgspec.structs.replace(answer, actions=actions, exploration=exploration)
        except JoyNexusError as error:
            answer = msgspec.structs.replace(answer, error=error.failure)
        except ForwardFailed as error:
            unavailable = failure(ErrorCode.UNAVAILABLE, f"{error}: ask again", retry_after_ms=1000)
            answer = msgspec.structs.replace(answer, error=unavailable)
        except ValueError as error:  # the head returned something else than chunks
            answer = msgspec.structs.replace(answer, error=failure(ErrorCode.INVALID, str(error)))
        except torch.AcceleratorError:
            raise  # as in _prepare
        except Exception:  # as in _prepare
            answer = msgspec.structs.replace(answer, error=_note_fault(item))
        return msgspec.structs.replace(answer, busy_s=request.busy_s + request.need.busy_s + elapsed())


def _with_overhead(answers: Sequence[Predicted], seconds: float) -> tuple[Predicted, ...]:
    """Divide what a group took between its parts by what its items took of them."""
    total_s = sum(answer.busy_s for answer in answers) or 1.0
    shares = [seconds * answer.busy_s / total_s for answer in answers]
    return tuple(
        msgspec.structs.replace(answer, busy_s=answer.busy_s + share_s, overhead_s=share_s)
        for answer, share_s in zip(answers, shares, strict=True)
    )


def _actions(request: _Request, packer: ArrayPacker) -> tuple[Array, Exploration | None]:
    """Let the policy act, or explore, and pack what it returns.

    Raises:
        JoyNexusError: as `_check_returned` and `Need.features`.
        ForwardFailed, ValueError: as `Need.features` and `Policy.act`.
    """
    policy, features, state = request.served.policy, request.need.features(), request.state
    seeds = request.act.seeds or [0] * len(state)
    if not request.act.explore:
        actions = policy.act(features, state, seeds=seeds)
        _check_returned(actions=actions)
        return packer.add(actions), None
    explored = policy.explore(features, state, seeds=seeds)
    _check_returned(**explored._asdict())
    return packer.add(explored.actions), Exploration(
        sample=packer.add(explored.sample),
        log_prob=packer.add(explored.log_prob),
        value=packer.add(explored.value),
    )


def _check_returned(**returned: npt.NDArray[np.float32]) -> None:
    """Refuse what must not leave, by name.

    Raises:
        JoyNexusError: `NON_FINITE`, or `TOO_LARGE` for what the master would cut the connection of all tenants for.
    """
    most = limits.MAX_CONTROL_FRAME_BYTES
    for name, array in returned.items():
        if array.nbytes > most:
            sentence = f"'{name}' of the answer has {array.nbytes} bytes, at most {most} fit: ask for fewer rows"
            raise JoyNexusError(failure(ErrorCode.TOO_LARGE, sentence))
        if not np.isfinite(array).all():
            sentence = f"'{name}' of what the policy returned is not finite: use an earlier version"
            raise JoyNexusError(failure(ErrorCode.NON_FINITE, sentence))


def _note_fault(item: PredictItem) -> Failure:
    """Log the exception that is being handled; return what the tenant is told."""
    log.exception("request_failed", tenant=item.tenant, policy=item.policy, request=item.request)
    sentence = f"request {item.request} failed inside the service; the inference service's log has the reason"
    return failure(ErrorCode.INTERNAL, sentence)


def _read(
    item: PredictItem, buffers: Sequence[Buffer], served: Served
) -> tuple[Act, npt.NDArray[np.float32], list[Observation]]:
    """Decode a request and its states and observations, and check it against the policy and its contract.

    Raises:
        JoyNexusError: one sentence, naming expected and got.
    """
    contract = served.policy.spec.contract
    own = buffers[item.first_buffer : item.first_buffer + item.buffers]
    try:
        act = _act_decoder.decode(item.act)
        state = rebuild(act.state, own)
        images = [rebuild(array, own) for array in act.images]
    except (WireError, *UNREADABLE) as error:
        raise JoyNexusError(failure(ErrorCode.INVALID, f"the request cannot be read: {error}")) from error
    if act.contract and act.contract != contract.digest():
        sentence = (
            f"your contract {act.contract[:32]} is not the policy's ({contract.digest()}): compare yours with the one "
            "that the policy's description shows"
        )
        raise JoyNexusError(failure(ErrorCode.CONTRACT_MISMATCH, sentence))
    if state.ndim and len(state) > limits.MAX_ACT_ROWS:
        sentence = f"a request has at most {limits.MAX_ACT_ROWS} rows, this one has {len(state)}: split it"
        raise JoyNexusError(failure(ErrorCode.TOO_LARGE, sentence))
    rows = inputs.check_state(contract, state)
    if act.seeds and len(act.seeds) != rows:
        sentence = f"{len(act.seeds)} seeds came for {rows} rows: give one a row, or none"
        raise JoyNexusError(failure(ErrorCode.INVALID, sentence))
    if act.explore and served.policy.actor_critic is None:
        sentence = f"version {served.version} cannot explore: ask for one that an RL job published"
        raise JoyNexusError(failure(ErrorCode.INVALID, sentence))
    return act, state, inputs.observations(contract, rows, images, act.instructions)
