"""The inference service's shell: a backbone, an engine, and the connection to the master.

In: settings. Out: a process that takes `PredictGroup`s and `WeightsOffer`s until it is told to end. Never: a group that
waits while a new version is fetched: that happens on a thread of its own, and the version is there from the next group
on. Import it after `joynexus.vla.numerics.configure` (see `__main__`): it loads torch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from common.exits import cannot_start
from common.failpoints import failpoint
from common.progress import Progress
from common.runtime import WorkerRuntime
from common.settings import InferenceSettings
from common.telemetry import get_logger
from joynexus.vla.startup import LOADING_S, bring_up
from joynexus.wire import Packet
from joynexus.wire.back import Predicted, PredictGroup, WeightsApplied, WeightsOffer, WeightsRefused
from services.inference.core import PredictEngine

log = get_logger(__name__)

CREDIT = 2
"""Groups at once: one being worked on, one waiting at hand."""
WORKING_S = 120.0
"""A group must be done, or a version loaded, within this."""


def run(settings: InferenceSettings) -> None:
    """Serve until told to end; SystemExit with one sentence if the backbone cannot be loaded."""
    on_gpu = settings.device.startswith("cuda")
    progress = Progress(cpu=lambda: 0.0) if on_gpu else Progress()
    with WorkerRuntime(settings, progress=progress) as runtime, ThreadPoolExecutor(1, "load-version") as loader:
        with progress.phase("loading", deadline_s=LOADING_S):
            try:
                equipment = bring_up(settings)
            except ValueError as error:
                raise cannot_start("the inference service", error) from error
            engine = PredictEngine(
                equipment.backbone,
                runtime.blobs.fetch,
                equipment.features,
                keep_all=settings.keep_features,
                max_versions=settings.max_slots,
            )
        log.info("ready", **equipment.detail)
        runtime.register(equipment.register("inference", runtime.incarnation, {"predict": CREDIT}))

        def load(offer: WeightsOffer) -> None:
            with progress.phase("working", deadline_s=WORKING_S):
                answer = engine.load(offer)
            runtime.send(answer)
            _note_version(answer)

        def work(packet: Packet) -> None:
            message = packet.message
            if isinstance(message, WeightsOffer):
                loader.submit(load, message)
            elif isinstance(message, PredictGroup):
                with progress.phase("working", deadline_s=WORKING_S):
                    done, buffers = engine.predict(message, packet.buffers)
                failpoint("inference.before_answer")
                runtime.send(done, buffers)
                _note(runtime, message, done.items, on_gpu=on_gpu)
                if equipment.features is not None:
                    runtime.count_features(equipment.features.stats.hits, equipment.features.stats.misses)
            else:
                log.warning("unexpected_work", kind=packet.header.kind)

        runtime.serve(work)


def _note(runtime: WorkerRuntime, group: PredictGroup, answers: tuple[Predicted, ...], *, on_gpu: bool) -> None:
    """One line a group; device time counts as busy where the CPU clock cannot see it."""
    busy_s = sum(answer.busy_s for answer in answers)
    if on_gpu:
        runtime.progress.add_busy(busy_s)
    errors = [answer.error for answer in answers if answer.error is not None]
    forwards = sum(answer.backbone_forwards for answer in answers)
    runtime.note(
        log,
        "predict",
        outcome="ok" if not errors else errors[0].code,
        seconds=busy_s,
        trace=",".join(dict.fromkeys(item.trace for item in group.items if item.trace)),
        task=group.task,
        requests=len(answers),
        rows=sum(answer.rows for answer in answers),
        forwards=forwards,
    )
    runtime.count_group([(item.tenant, item.policy) for item in group.items])
    runtime.count_forwards(forwards)


def _note_version(answer: WeightsApplied | WeightsRefused) -> None:
    name = {"tenant": answer.tenant, "policy": answer.policy, "version": answer.version}
    if isinstance(answer, WeightsRefused):
        log.warning("version_refused", reason=answer.error.message, **name)
    else:
        log.info("version_applied", **name)
