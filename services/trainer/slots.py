"""A slot: one policy in a trainer's memory, and exactly-once for its ops.

In: a policy's spec or checkpoint, then its ops in order. Out: what each op did. Never: an op applied twice, an op out
of order, or a step of one policy that another policy can notice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common.failpoints import failpoint
from joynexus.contract import struct_digest
from joynexus.vla.backbones.base import Backbone
from joynexus.vla.feature import VLAFeature
from joynexus.vla.learner import Learner
from joynexus.vla.policy import Policy
from joynexus.wire.back import OpenSlot, RlBegin, RlEpoch, TrainDone, TrainItem
from joynexus.wire.errors import ErrorCode, JoyNexusError, failure
from services.trainer.checkpoint import CheckpointMeta, read_checkpoint, write_checkpoint
from services.trainer.rl.epoch import proximal_log_prob, run_epoch
from services.trainer.rl.experience import Experience, values_of
from services.trainer.samples import TrainBatch

_REMEMBERED_RESULTS = 4096
_PROXIMAL = "proximal"
"""Name of a tensor in checkpoints that is none of the learner's."""

SlotKey = tuple[str, str]
"""Tenant and policy."""


class OutOfOrder(Exception):  # noqa: N818 - not an error of anybody's op: master and trainer disagree on the state
    """An op does not follow the last one applied here; the slot must be opened again."""


class Slot:
    """A policy that is being trained.

    Attributes:
        tenant, policy: whose it is.
        spec: what it was made from.
        applied_seq: last op that was applied.
        published: last version that was published.
    """

    def __init__(self, opening: OpenSlot, backbone: Backbone) -> None:
        """Make a slot: fresh, or without any weights if there is a checkpoint to `load`.

        Raises:
            ValueError: if the spec cannot be built, or asks for hidden states that the backbone has not.
        """
        self.tenant, self.policy, self.spec = opening.tenant, opening.policy, opening.spec
        self._life = opening.life
        self.applied_seq = self.published = 0
        self._backbone = backbone.digest
        fresh = not opening.checkpoint
        policy = Policy(opening.spec, backbone.digest, backbone.hidden_size, device=backbone.device, drawn=fresh)
        backbone.check_layers(policy.layers)
        self._learner = Learner(policy)
        # Of an asynchronous update that is under way: its name, and its `proximal_log_prob`.
        self._proximal: tuple[str, Tensor] | None = None
        # By (seq, is a checkpoint): the answer, and whether the op was skipped.
        self._results: OrderedDict[tuple[int, bool], tuple[TrainDone, bool]] = OrderedDict()
        self._checkpoints = {"": 0}  # the states that this one descends from: digest and op
        self._remembered_from = 0  # every op above this one has its result remembered

    @property
    def trained(self) -> Policy:
        """The policy itself."""
        return self._learner.policy

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.trained.memory_bytes

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._learner.step

    # Exactly once

    def covers(self, opening: OpenSlot) -> bool:
        """Tell whether this slot is what `opening` asks for, or is ahead of it with every result still at hand.

        So a master that was restarted, or a message that came twice, costs no work.
        """
        return (
            opening.spec == self.spec
            and opening.life == self._life
            and self._checkpoints.get(opening.checkpoint) == opening.applied_seq
            and opening.applied_seq >= self._remembered_from
        )

    def recall(self, item: TrainItem) -> TrainDone | None:
        """Return the stored answer if this op was applied here before.

        A checkpoint of the state as it is gets none: one that failed may succeed now, one that was stored may be gone.

        Raises:
            OutOfOrder: if it was applied here, but is to be skipped: then this state is not the policy's any more.
        """
        if item.kind == "checkpoint" and item.seq == self.applied_seq:
            return None
        done, skipped = self._results.get((item.seq, item.kind == "checkpoint"), (None, item.skip))
        if skipped != item.skip:
            raise OutOfOrder(
                f"op {item.seq} of policy '{self.policy}' was set aside, but is part of the state here: "
                "open the slot again from its checkpoint"
            )
        return done

    def check_order(self, item: TrainItem) -> None:
        """Refuse an op that is not the next one (a checkpoint: not one of the state as it is).

        Raises:
            OutOfOrder: if it is not.
        """
        expected = self.applied_seq + (item.kind != "checkpoint")
        if item.seq != expected:
            raise OutOfOrder(
                f"{item.kind} {item.seq} of policy '{self.policy}' came where {expected} was due: "
                "open the slot again from its checkpoint"
            )

    def remember(self, item: TrainItem, done: TrainDone) -> None:
        """Keep an answer, and count the op as applied."""
        is_checkpoint = item.kind == "checkpoint"
        self._results[item.seq, is_checkpoint] = done, item.skip
        if isinstance(item.rl, RlEpoch) and item.rl.epoch + 1 >= item.rl.algorithm.epochs:
            self._proximal = None  # however the last epoch ended: no other asks for it
        if not is_checkpoint:
            self.applied_seq = item.seq
        if done.checkpoint:
            self._checkpoints[done.checkpoint] = item.seq
        if len(self._results) > _REMEMBERED_RESULTS:
            (seq, _), _ = self._results.popitem(last=False)
            self._remembered_from = seq
            self._checkpoints = {digest: at for digest, at in self._checkpoints.items() if at >= seq}

    # The ops

    def forward_backward(self, batch: TrainBatch, features: list[VLAFeature], seq: int) -> dict[str, float]:
        """Add the gradients of a batch; return `loss` and `samples`. The op's number decides what its head draws.

        Raises:
            JoyNexusError: `NON_FINITE`; no gradient was added, and the optimizer step to come is vetoed too. `INVALID`
                if the head refuses the samples.
        """
        try:
            metrics = self._learner.forward_backward(features, batch.state, batch.action, batch.action_mask, draw=seq)
        except ValueError as error:
            raise refused(ErrorCode.INVALID, str(error)) from error
        if metrics["vetoed"]:
            raise refused(
                ErrorCode.NON_FINITE,
                f"the loss is {metrics['loss']}, so the step that it belongs to is vetoed and changes nothing: "
                "check the samples' scale, or lower the learning rate",
            )
        return {"loss": metrics["loss"], "samples": float(len(features))}

    def optim_step(self) -> dict[str, float]:
        """Apply the gradients; return `grad_norm`, `lr` and `step`.

        Raises:
            JoyNexusError: `NON_FINITE`: weights and optimizer are as before, and the gradients are gone. `INVALID` if
                no gradients wait.
        """
        if not self._learner.pending:
            raise refused(ErrorCode.INVALID, "no gradients wait to be applied: send forward_backward first")
        failpoint("trainer.optim_step")
        metrics = self._learner.optim_step()
        if metrics["skipped"]:
            raise refused(
                ErrorCode.NON_FINITE,
                f"a loss or gradient since the last step was not finite (gradient norm {metrics['grad_norm']}), so "
                "this step is vetoed and its gradients are dropped: check the samples' scale, or lower the learning "
                "rate",
            )
        self._proximal = None  # a step on samples ends what was learned from rewards
        return {"grad_norm": metrics["grad_norm"], "lr": metrics["lr"], "step": float(metrics["step"])}

    def train_step(self, batch: TrainBatch, features: list[VLAFeature], seq: int) -> dict[str, float]:
        """Do both in one; return the metrics of both. Gradients that a tenant's loop left behind do not enter it.

        Raises:
            JoyNexusError: `NON_FINITE`; then weights and optimizer are as before.
        """
        self._learner.discard()
        try:
            metrics = self.forward_backward(batch, features, seq)
        except JoyNexusError:
            self._learner.discard()  # what the failed half left, a veto above all
            raise
        return metrics | self.optim_step()

    def begin_rl(self, begin: RlBegin, most_bytes: int) -> None:
        """Make the policy ready to learn from rewards; gradients that wait are dropped.

        It is refused if the slot would take more than `most_bytes`; 0 means no limit.

        Raises:
            JoyNexusError: `INVALID` if it cannot be; then nothing changed.
        """
        try:
            self._learner.begin_rl(begin, most_bytes=most_bytes)
        except ValueError as error:
            raise refused(ErrorCode.INVALID, str(error)) from error
        self._proximal = None

    def rl_epoch(
        self,
        epoch: RlEpoch,
        update: str,
        experience: Experience,
        features: list[VLAFeature],
        advance: Callable[[], None],
    ) -> dict[str, float]:
        """Go over an update's experience once; return the metrics. `update` is its name, see `update_name`.

        In asynchronous jobs ratios are taken to the policy as it was when the update began; what it said is kept, in
        checkpoints too, until the update's last epoch was answered.

        Raises:
            JoyNexusError: `INVALID` if the policy is not ready for this, `BAD_DATA` if the samples cannot be its own,
                `NON_FINITE` if every minibatch was vetoed; then nothing changed.
        """
        begun, needed = self.trained.rl, values_of(epoch.algorithm, self.spec.chunk)
        if begun is None or not self._learner.from_rewards:
            raise refused(ErrorCode.INVALID, "the policy is not ready to learn from rewards: send rl_begin first")
        if needed and (begun.critic is None or begun.values != needed):
            has = "none" if begun.critic is None else str(begun.values)
            raise refused(
                ErrorCode.INVALID,
                f"the value head gives {has} for each chunk, but PPO at level '{epoch.algorithm.level}' needs {needed} "
                "values: send rl_begin with them first",
            )
        reference, proximal = experience.log_prob, None
        try:
            if epoch.weight_limit:
                proximal = self._proximal
                if proximal is None or proximal[0] != update:
                    said = proximal_log_prob(self.trained, experience, features, epoch.algorithm, advance)
                    proximal = update, said
                reference = proximal[1]
            result = run_epoch(self._learner, experience, features, epoch, reference, advance)
        except ValueError as error:
            raise refused(ErrorCode.BAD_DATA, str(error)) from error
        if result.vetoed and not result.steps:
            raise refused(
                ErrorCode.NON_FINITE,
                "no minibatch had a finite loss and gradient, so nothing changed: check the rewards' scale, or lower "
                "the learning rate",
            )
        self._proximal = proximal
        return result.metrics

    def check_finite(self) -> None:
        """Refuse weights that overflowed; they must not leave memory.

        Raises:
            JoyNexusError: `NON_FINITE`, naming the first tensor.
        """
        for name, tensor in self.trained.tensors().items():
            if not torch.isfinite(tensor).all():
                sentence = f"'{name}' holds NaN or infinities: load an earlier state and lower the learning rate"
                raise refused(ErrorCode.NON_FINITE, sentence)

    # What leaves and enters memory

    def save(self, path: Path, seq: int) -> None:
        """Write module, optimizer and counters to a scratch file, as the state after op `seq`.

        Raises:
            JoyNexusError: `INVALID` if gradients wait (states lie at optimizer boundaries), `NON_FINITE` as
                `check_finite`.
        """
        if self._learner.pending:
            raise refused(ErrorCode.INVALID, "gradients wait to be applied: send optim_step before the state is saved")
        self.check_finite()
        tensors, meta = self._learner.state()
        update, said = self._proximal or ("", None)
        if said is not None:
            tensors[_PROXIMAL] = said
        write_checkpoint(
            path,
            tensors,
            CheckpointMeta(
                tenant=self.tenant,
                policy=self.policy,
                spec=struct_digest(self.spec),
                backbone=self._backbone,
                applied_seq=seq,
                step=self.step,
                published=self.published,
                update=update,
                learner=meta,
            ),
        )

    def load(self, path: Path, digest: str) -> CheckpointMeta:
        """Continue from a saved state; gradients that wait are dropped.

        Raises:
            ValueError: if it is damaged or of another policy, spec or backbone; then nothing changed.
        """
        tensors, meta = read_checkpoint(path, digest)
        if (meta.tenant, meta.policy) != (self.tenant, self.policy):
            raise ValueError(f"the state {digest} is not one of policy '{self.policy}': load one that it saved")
        if meta.spec != struct_digest(self.spec):
            raise ValueError(f"the state {digest} was saved under another spec of policy '{self.policy}'")
        if meta.backbone != self._backbone:
            raise ValueError(
                f"the state {digest} was trained on backbone {meta.backbone}, but this trainer has {self._backbone}"
            )
        said = tensors.pop(_PROXIMAL, None)
        self._learner.load(tensors, meta.learner)
        self._proximal = None if said is None else (meta.update, said.clone())
        self.published = max(self.published, meta.published)
        return meta

    def load_weights(self, path: Path) -> None:
        """Take the tenant's own weights, as if the policy had been created with them; gradients that wait are dropped.

        Raises:
            JoyNexusError: `BAD_DATA` if they are not usable here; then nothing changed.
        """
        try:
            self._learner.load_weights(path)
        except ValueError as error:
            raise refused(ErrorCode.BAD_DATA, str(error)) from error
        self._proximal = None

    def resumed(self, opening: OpenSlot) -> None:
        """Take the place in the order of ops that the checkpoint just loaded has."""
        self.applied_seq = self._remembered_from = opening.applied_seq
        self._checkpoints = {opening.checkpoint: opening.applied_seq}


def open_slot(opening: OpenSlot, backbone: Backbone, path: Path | None) -> Slot:
    """Bring a policy into memory, fresh from its spec (`path` is None) or from its checkpoint's file.

    Raises:
        JoyNexusError: `INVALID` if the spec cannot be built, `INTERNAL` if the checkpoint is not usable.
    """
    try:
        slot = Slot(opening, backbone)
    except ValueError as error:
        raise refused(ErrorCode.INVALID, str(error)) from error
    try:
        applied_seq = slot.load(path, opening.checkpoint).applied_seq if path is not None else 0
        if applied_seq != opening.applied_seq:
            raise ValueError(
                f"'{opening.checkpoint or 'no checkpoint'}' covers op {applied_seq}, not op {opening.applied_seq}"
            )
    except ValueError as error:
        raise refused(ErrorCode.INTERNAL, str(error)) from error
    if path is not None:
        slot.resumed(opening)
    return slot


def refused(code: ErrorCode, sentence: str) -> JoyNexusError:
    """Make the error with which an op is answered."""
    return JoyNexusError(failure(code, sentence))
