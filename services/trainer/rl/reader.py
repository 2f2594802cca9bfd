"""From an `rl_epoch` to what it is computed from: experience, feature keys, and a way to each observation.

In: digests of rollouts, a policy. Out: what was checked against it. Never: a feature key that somebody names (a rollout
may have been made on a tenant's own machine; a key made here, of what was seen, is one of the tenant's for certain), a
picture that nobody needs, or more memory than an update may take.

An update's experience is kept for its next epochs. Without it, after a restart, the same is made again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from joynexus.contract import struct_digest
from joynexus.simulation.trajectories import MAX_NUMBERS_BYTES, Trajectories, concatenate, unpack
from joynexus.specs import MAX_DECISIONS, GrpoSpec
from joynexus.vla.feature import Observation
from joynexus.vla.inputs import refuse
from joynexus.vla.shared_forward import SharedForward
from joynexus.wire.back import RlEpoch
from joynexus.wire.errors import ErrorCode, WireError
from services.trainer.blobs import Blobs
from services.trainer.rl.experience import Experience, Ints, make_experience, values_of
from services.trainer.slots import Slot, refused

_REMEMBERED_BYTES = 256 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Gathered:
    """Experience of an update with what its features are found by.

    Attributes:
        experience: N decisions.
        keys: N feature keys.
        observe: observation of a decision by its row.
    """

    experience: Experience
    keys: list[str]
    observe: Callable[[int], Observation]


@dataclass(frozen=True)
class _Remembered:
    """`ends` says at which decision each rollout ends, counted through."""

    experience: Experience
    keys: list[str]
    ends: Ints


class ExperienceReader:
    """Reads rollouts and remembers what was made of them.

    Args:
        blobs: where rollouts lie.
        forward: names features, and knows how large they are.
        update_bytes: an update whose features take more than this is refused; 0 means no limit.
        advance: called after each rollout.
    """

    def __init__(self, blobs: Blobs, forward: SharedForward, *, update_bytes: int, advance: Callable[[], None]) -> None:
        self._blobs = blobs
        self._forward = forward
        self._update_bytes = update_bytes
        self._advance = advance
        self._remembered: OrderedDict[tuple[str, ...], _Remembered] = OrderedDict()  # used longest ago first

    def read(self, epoch: RlEpoch, scope: str, slot: Slot) -> Gathered:
        """Gather and check what an epoch is computed from.

        Raises:
            JoyNexusError: `BAD_DATA` or `INVALID`: the op is at fault.
            Unreachable: a blob cannot be had.
        """
        name = (slot.tenant, slot.policy, scope, update_name(epoch))
        found = self._remembered.pop(name, None)
        if found is None:
            found = self._make(epoch, scope, slot)
        if epoch.epoch + 1 < epoch.algorithm.epochs:
            self._remembered[name] = found
        while sum(each.experience.nbytes for each in self._remembered.values()) > _REMEMBERED_BYTES:
            self._remembered.popitem(last=False)
        return Gathered(found.experience, found.keys, self._observer(epoch, found))

    def _make(self, epoch: RlEpoch, scope: str, slot: Slot) -> _Remembered:
        pages, keys, numbers, each_bytes = [], list[str](), 0, 0
        for digest in epoch.rollouts:
            page = self._page(digest)
            _check(page, epoch, slot)
            numbers += _numbers_bytes(page)
            if len(keys) + len(page.executed) > MAX_DECISIONS or numbers > MAX_NUMBERS_BYTES:
                raise refused(
                    ErrorCode.INVALID,
                    f"an update is trained on at most {MAX_DECISIONS} decisions and {MAX_NUMBERS_BYTES / _GIB:.0f} GiB "
                    "of numbers: take fewer or shorter episodes",
                )
            each_bytes = max(each_bytes, self._forward.feature_bytes(_observation(page, 0), slot.trained.layers))
            keys += self._keys(page, scope)
            pages.append(dataclasses.replace(page, images=()))
            self._advance()
        try:
            rollout = concatenate(pages)
        except ValueError as error:
            refuse(f"the rollouts cannot be trained on: {error}")
        if isinstance(epoch.algorithm, GrpoSpec):
            _check_groups(rollout, epoch.algorithm)
        experience = make_experience(rollout, epoch.algorithm, epoch.reward_scale)
        ends = np.cumsum([len(page.executed) for page in pages])
        wanted = [keys[number] for number in experience.decisions.tolist()]
        self._check_memory(len(set(wanted)) * each_bytes)
        return _Remembered(experience, wanted, ends)

    def _check_memory(self, nbytes: int) -> None:
        if self._update_bytes and nbytes > self._update_bytes:
            raise refused(
                ErrorCode.INVALID,
                f"the features of what this update saw take {nbytes / _GIB:.1f} GiB, and an update has "
                f"{self._update_bytes / _GIB:.1f} GiB here: take fewer or shorter episodes, or execute more of a chunk",
            )

    def _page(self, digest: str) -> Trajectories:
        try:
            return unpack(self._blobs.view(digest))
        except (ValueError, WireError) as error:
            refuse(f"a rollout cannot be trained on: {error}")

    def _keys(self, page: Trajectories, scope: str) -> list[str]:
        if not page.images:  # what is seen is the instruction alone
            return [self._forward.key(scope, _observation(page, 0))] * len(page.executed)
        return [self._forward.key(scope, _observation(page, row)) for row in range(len(page.executed))]

    def _observer(self, epoch: RlEpoch, found: _Remembered) -> Callable[[int], Observation]:
        opened: dict[int, Trajectories] = {}  # one at a time: rows are asked for in order

        def observe(row: int) -> Observation:
            decision = int(found.experience.decisions[row])
            number = int(np.searchsorted(found.ends, decision, side="right"))
            if number not in opened:
                opened.clear()
                opened[number] = self._page(epoch.rollouts[number])
            page = opened[number]
            return _observation(page, decision - int(found.ends[number]) + len(page.executed))

        return observe


def update_name(epoch: RlEpoch) -> str:
    """Name an update: the same for all of its epochs, another where anything that is computed from differs."""
    return struct_digest(msgspec.structs.replace(epoch, epoch=0))


def _observation(page: Trajectories, row: int) -> Observation:
    return Observation(tuple(images[row] for images in page.images), page.instruction)


def _numbers_bytes(page: Trajectories) -> int:
    return sum(value.nbytes for value in vars(page).values() if isinstance(value, np.ndarray))


def _check(page: Trajectories, epoch: RlEpoch, slot: Slot) -> None:
    """Refuse what is not of this policy, with one sentence."""
    spec, contract = slot.spec, slot.spec.contract
    shape = (spec.chunk, contract.action_dim)
    values = values_of(epoch.algorithm, spec.chunk)
    views = [(camera.height, camera.width, 3) for camera in contract.cameras]
    if page.contract != contract.digest():
        refuse("a rollout is of another contract than the policy's: collect with the policy that is trained")
    if page.version > slot.published:
        refuse(f"a rollout is of version {page.version}, but the policy has published {slot.published} so far")
    if page.log_prob.shape[1:] != shape or page.state.shape[1] != contract.state_dim:
        refuse(
            f"a rollout has chunks of {list(page.log_prob.shape[1:])} and states of {page.state.shape[1]} numbers, the "
            f"policy {list(shape)} and {contract.state_dim}: collect with the policy that is trained"
        )
    if [image.shape[1:] for image in page.images] != views:
        refuse("a rollout has other pictures than the policy's contract: collect with the policy that is trained")
    if values and page.value.shape[1] != values:
        refuse(
            f"a rollout has {page.value.shape[1]} values for each chunk, but PPO at level '{epoch.algorithm.level}' "
            f"needs {values}: begin RL and collect at the level that is trained"
        )


def _check_groups(rollout: Trajectories, algorithm: GrpoSpec) -> None:
    seeds, sizes = np.unique(rollout.seeds, return_counts=True)
    if sizes.max() > algorithm.group_size:
        worst = int(np.argmax(sizes))
        refuse(
            f"{sizes[worst]} episodes start from seed {seeds[worst]}, but an advantage group has "
            f"{algorithm.group_size}: give other groups other seeds"
        )
