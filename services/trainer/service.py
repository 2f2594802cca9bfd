"""The trainer's shell: a backbone, an engine, and the connection to the master.

In: settings. Out: a process that takes `TrainGroup`s until it is told to end. Never: a decision about ops; those are
the engine's. Import it after `joynexus.vla.numerics.configure` (see `__main__`): it loads torch.
"""

from __future__ import annotations

from collections.abc import Callable

from common.exits import cannot_start
from common.failpoints import failpoint
from common.progress import Progress
from common.runtime import WorkerRuntime
from common.settings import TrainerSettings
from common.telemetry import get_logger
from joynexus.vla.startup import LOADING_S, bring_up, memory_bytes
from joynexus.wire import Packet
from joynexus.wire.back import SlotFailed, TrainGroup
from services.trainer.core import TrainerEngine
from services.trainer.followers import Followers
from services.trainer.group import Answer

log = get_logger(__name__)

CREDIT = 2
"""Groups at once: one being worked on, one waiting at hand."""
SLOTS_SHARE = 1 / 3
"""Of the device's memory that policies may take if settings do not say; the rest is for backbone and activations."""
UPDATE_SHARE = 1 / 4
"""Of the device's memory that the features of one RL update may take."""
WORKING_S = 300.0
"""An op, or one forward of a group, must be done within this."""


def run(settings: TrainerSettings) -> None:
    """Serve until told to end; SystemExit with one sentence if the backbone cannot be loaded."""
    places = settings.places
    on_gpu = places[0].startswith("cuda")
    progress = Progress(cpu=lambda: 0.0) if on_gpu else Progress()
    # On a GPU what followers take is in the answers' busy time, which is all that counts there.
    far_busy: Callable[[float], None] = (lambda _: None) if on_gpu else progress.add_busy
    with WorkerRuntime(settings, progress=progress) as runtime, Followers(settings) as followers:
        with progress.phase("loading", deadline_s=LOADING_S):
            try:
                here = settings.model_copy(update={"device": places[0]})
                equipment = bring_up(here, lambda backbone: followers.share(backbone, far_busy))
            except ValueError as error:
                raise cannot_start("the trainer", error) from error
            memory = memory_bytes(equipment.backbone.device)
            slot_bytes = settings.slot_bytes or int(SLOTS_SHARE * memory)
            engine = TrainerEngine(
                equipment.backbone,
                equipment.features,
                runtime.blobs.fetch,
                runtime.blobs.put_file,
                scratch=settings.cache_dir / "scratch" / "trainer",
                max_slots=settings.max_slots,
                slot_bytes=slot_bytes,
                update_bytes=int(UPDATE_SHARE * memory),
                advance=progress.advance,
            )
        equipment.detail["device"] = " + ".join(places)
        log.info("ready", **equipment.detail)
        limits = {"max_slots": settings.max_slots, "slot_bytes": slot_bytes}
        runtime.register(equipment.register("trainer", runtime.incarnation, {"train": CREDIT}, **limits))

        def work(packet: Packet) -> None:
            group = packet.message
            if not isinstance(group, TrainGroup):
                log.warning("unexpected_work", kind=packet.header.kind)
                return
            with progress.phase("working", deadline_s=WORKING_S):
                for answer in engine.run(group, packet.buffers):
                    failpoint("trainer.before_answer")
                    runtime.send(answer)
                    progress.advance()
                    _note(runtime, group, answer, on_gpu=on_gpu)
                    if runtime.cancelled(group.task):
                        break  # another trainer has it; what was done stays consistent op by op
                runtime.count_group([(item.tenant, item.policy) for item in group.items])
                if equipment.features is not None:
                    stats = equipment.features.stats
                    runtime.count_features(stats.hits, stats.misses)
                    runtime.detail.update(features_hits=str(stats.hits), features_misses=str(stats.misses))

        runtime.serve(work)


def _note(runtime: WorkerRuntime, group: TrainGroup, answer: Answer, *, on_gpu: bool) -> None:
    """One line an answer; device time counts as busy where the CPU clock cannot see it."""
    if on_gpu:
        runtime.progress.add_busy(answer.busy_s)
    if isinstance(answer, SlotFailed):
        log.warning("slot_failed", tenant=answer.tenant, policy=answer.policy, reason=answer.error.message)
        return
    of = (answer.tenant, answer.policy, answer.seq)
    runtime.note(
        log,
        answer.kind,
        outcome=answer.result.error.code if answer.result.error else "ok",
        seconds=answer.busy_s,
        trace=next((item.trace for item in group.items if (item.tenant, item.policy, item.seq) == of), ""),
        tenant=answer.tenant,
        policy=answer.policy,
        seq=answer.seq,
        attempt=answer.attempt,
        forwards=answer.backbone_forwards,
    )
    runtime.count_forwards(answer.backbone_forwards)
