"""Data sets by name: pushed by tenants or mounted by the operator, prepared once, then referred to by digest.

In: `PushDataset`, mounted folders, `DatasetPrepared`. Out: `PrepareDataset` tasks, `DatasetInfo`s, and word to those
who wait. Never: a path, a second preparation of the same content, or a tenant's set shown to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePosixPath

import blake3
import msgspec

from common.journal.records import DatasetRecord, Record
from joynexus.contract import Contract
from joynexus.datasets import DatasetManifest, Fault
from joynexus.wire import ErrorCode, Failure, JoyNexusError, limits
from joynexus.wire.back import DatasetPrepared, PrepareDataset
from joynexus.wire.front import DatasetInfo, DatasetList, FileEntry, GetDataset, ListDatasets, PushDataset
from services.master.checks import check_any_name
from services.master.config import CoreConfig
from services.master.env_queue import EnvQueue
from services.master.events import FrontMessage
from services.master.holdings import SHARED, Holdings
from services.master.outbox import Outbox, not_found, not_saved, refuse
from services.master.tasks import DATASETS, MOUNTED, EnvAnswer, Task

_MAX_FILES = 100_000
_MAX_FILES_BYTES = limits.MAX_BODY_BYTES - 8 * 1024  # they travel on to the env service beside a few other fields
_MAX_NAME = 255
_MAX_PATH = 400
_MAX_SIDE = 4096
_SHOWN_INSTRUCTIONS = 100
_SHOWN = 1000
_READS = 5
"""Times that a new manifest is looked for before the set counts as faulty."""

DatasetKey = tuple[str, str]
"""Tenant (empty: mounted) and name."""


class Catalog:
    """All data sets.

    Args:
        manifest: reads a prepared set's manifest.
        begins: refuses a tenant that may begin nothing new now.

    Attributes:
        settled: called with the key of a set that has become ready or faulty.
    """

    def __init__(
        self,
        outbox: Outbox,
        config: CoreConfig,
        holdings: Holdings,
        env: EnvQueue,
        manifest: Callable[[str], DatasetManifest],
        begins: Callable[[str], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._holdings = holdings
        self._env = env
        self._manifest = manifest
        self._begins = begins
        self._sets: defaultdict[str, dict[str, DatasetRecord]] = defaultdict(dict)
        self._by_content: dict[tuple[str, str], DatasetRecord] = {}  # (tenant, content) -> a ready set
        self._preparing: dict[DatasetKey, str] = {}  # -> content
        self.settled: Callable[[DatasetKey], None] = lambda key: None

    # Requests

    def on_push(self, asked: FrontMessage, message: PushDataset) -> None:
        """Make a data set of uploaded files."""
        tenant, name = asked.tenant, message.dataset
        check_any_name("data set", name)
        self._check_files(tenant, message)
        content = _content(message.files, message.image_side)
        known = self._sets[tenant].get(name)
        if known is not None and known.content == content and known.state != "faulty":
            self._outbox.answer(asked, self._info(known))
            return
        if known is None and len(self._sets[tenant]) >= self._config.max_datasets:
            most = self._config.max_datasets
            raise refuse(ErrorCode.TOO_LARGE, f"this tenant has {most} data sets and may have no more: reuse a name")
        twin = self._by_content.get((tenant, content))
        if twin is not None:
            record = msgspec.structs.replace(twin, dataset=name)
        else:
            self._begins(tenant)
            record = DatasetRecord(
                tenant=tenant, dataset=name, content=content, files=message.files, image_side=message.image_side
            )

        def saved() -> None:
            meanwhile = self._sets[tenant].get(name)
            if meanwhile is not known and meanwhile is not None and meanwhile.content == content:
                self._outbox.answer(asked, self._info(meanwhile))  # pushed twice before it was on disk
                return
            self._put(record)
            self._outbox.answer(asked, self._info(record))
            if record.state == "checking":
                self._prepare(record, trace=asked.header.id)
            else:
                self.settled((tenant, name))

        def lost(reason: str) -> None:
            self._outbox.answer(asked, not_saved(f"data set '{name}'", reason).failure)

        self._outbox.save([record], saved, lost)

    def on_get(self, asked: FrontMessage, message: GetDataset) -> None:
        """Describe a data set; a mounted one is prepared when it is first asked for."""
        self._outbox.answer(asked, self._info(self.find(asked.tenant, message.dataset)))

    def on_list(self, asked: FrontMessage, message: ListDatasets) -> None:
        """Describe the tenant's data sets and the mounted ones."""
        sets = {**self._sets.get(SHARED, {}), **self._sets.get(asked.tenant, {})}
        for name in self._env.mounted():
            sets.setdefault(name, self._unprepared(name))
        infos = (self._info(sets[name], brief=True) for name in sorted(sets))
        self._outbox.answer(asked, DatasetList(datasets=tuple(infos)))

    # For other parts

    def find(self, tenant: str, name: str) -> DatasetRecord:
        """Return a data set that a tenant may use, its own before a mounted one of that name.

        Raises:
            JoyNexusError: `NOT_FOUND`.
        """
        record = self._sets.get(tenant, {}).get(name) or self._sets.get(SHARED, {}).get(name)
        if record is None:
            if name not in self._env.mounted():
                raise not_found("data set", name)
            record = self._sets[SHARED][name] = self._unprepared(name)
            self._outbox.save([record])  # so that a job that waits for it finds it after a restart
            self._prepare(record)
        return record

    def ready(self, tenant: str, name: str) -> DatasetRecord:
        """Return a data set that can be used now.

        Raises:
            JoyNexusError: `NOT_FOUND`, `UNAVAILABLE` while it is being checked, `BAD_DATA` if it is faulty.
        """
        record = self.find(tenant, name)
        if record.state == "checking":
            raise refuse(
                ErrorCode.UNAVAILABLE, f"data set '{name}' is still being checked: try again soon", retry_after_ms=1000
            )
        if record.state == "faulty":
            raise faulty(record)
        return record

    def own(self, tenant: str, name: str) -> DatasetRecord | None:
        """Return a data set of a tenant's own."""
        return self._sets.get(tenant, {}).get(name)

    def alone(self, record: DatasetRecord) -> bool:
        """Tell whether no other data set of its tenant has its prepared content."""
        same = (other for other in self._sets[record.tenant].values() if other.manifest == record.manifest)
        return bool(record.manifest) and all(other is record for other in same)

    def is_mounted(self, name: str) -> bool:
        """Tell whether the operator has mounted a data set of this name."""
        return name in self._sets.get(SHARED, {}) or name in self._env.mounted()

    def forget(self, record: DatasetRecord) -> list[Record]:
        """Let go of a data set, also while it is prepared; return the records by which it goes from the journal."""
        tenant, name = record.tenant, record.dataset
        del self._sets[tenant][name]
        self._preparing.pop((tenant, name), None)
        if self._by_content.get((tenant, record.content)) is record:
            del self._by_content[tenant, record.content]
        for digest, _ in _blobs(record):
            self._holdings.release(tenant, digest, swept=True)
        return [DatasetRecord(tenant=tenant, dataset=name, content=record.content, gone=True)]

    def blobs(self, tenant: str, manifest: str) -> list[tuple[str, int]]:
        """Return the blobs of a set that was prepared for a tenant, whether or not a name still stands for it."""
        for record in self._sets.get(tenant, {}).values():
            if record.manifest == manifest:
                return [*record.blobs]
        try:
            episodes = self._manifest(manifest).episodes
        except (KeyError, ValueError, OSError) as error:
            self._outbox.log("error", "manifest_unreadable", tenant=tenant, manifest=manifest, reason=str(error))
            return []
        return [
            *((episode.blob, episode.nbytes) for episode in episodes),
            (manifest, self._holdings.size(tenant, manifest)),
        ]

    def waits_for(self, record: DatasetRecord) -> str:
        """Say what a set that is being checked waits for; empty if somebody is at it or could be."""
        need = DATASETS if record.files else MOUNTED + record.dataset
        return "" if self._env.serves(need) else "an env worker that reads data sets"

    def mounted_again(self, names: Iterable[str]) -> None:
        """An env worker came with these folders: what was wrong with one may have been mended."""
        for name in names:
            record = self._sets.get(SHARED, {}).get(name)
            if record is not None and record.state == "faulty":
                record = self._sets[SHARED][name] = self._unprepared(name)
                self._prepare(record)

    def restore(self, record: DatasetRecord) -> None:
        """Take a data set back from the journal."""
        self._put(record)

    def resume(self) -> None:
        """Prepare what was not prepared when the master went down."""
        for sets in list(self._sets.values()):
            for record in sets.values():
                if record.state == "checking":
                    self._prepare(record)

    # Inside

    def _check_files(self, tenant: str, message: PushDataset) -> None:
        if not 1 <= len(message.files) <= _MAX_FILES:
            raise refuse(ErrorCode.INVALID, f"a data set has 1 to {_MAX_FILES} files, not {len(message.files)}")
        nbytes = len(msgspec.msgpack.encode(message.files))
        if nbytes > _MAX_FILES_BYTES:
            raise refuse(
                ErrorCode.TOO_LARGE,
                f"the list of the data set's {len(message.files)} files has {nbytes} bytes, at most "
                f"{_MAX_FILES_BYTES} fit into a message: use fewer, larger files (LeRobot v3.0 does)",
            )
        if not 0 <= message.image_side <= _MAX_SIDE:
            raise refuse(ErrorCode.INVALID, f"image_side must lie between 0 and {_MAX_SIDE}, not {message.image_side}")
        seen = set()
        for file in message.files:
            path = PurePosixPath(file.path)
            inside = path.parts and not path.is_absolute() and ".." not in path.parts and str(path) == file.path
            inside = inside and all(len(part.encode()) <= _MAX_NAME for part in path.parts)
            if not inside or len(file.path) > _MAX_PATH or "\\" in file.path or "\0" in file.path:
                raise refuse(ErrorCode.INVALID, f"'{file.path[:80]}' is not a plain relative path inside the data set")
            if file.path in seen:
                raise refuse(ErrorCode.INVALID, f"the data set has file '{file.path[:80]}' twice")
            seen.add(file.path)
            if not self._holdings.may_read(tenant, file.digest):
                raise refuse(
                    ErrorCode.NOT_FOUND, f"the blob of file '{file.path[:80]}' is not here: upload it, then push again"
                )

    def _unprepared(self, name: str) -> DatasetRecord:
        side = self._config.mounted_image_side
        return DatasetRecord(tenant=SHARED, dataset=name, content=f"mounted:{name}", image_side=side)

    def _prepare(self, record: DatasetRecord, *, trace: str = "") -> None:
        key = (record.tenant, record.dataset)
        if self._preparing.get(key) == record.content:
            return
        self._preparing[key] = record.content

        def make(task: str, attempt: int) -> PrepareDataset:
            return PrepareDataset(
                task=task,
                attempt=attempt,
                tenant=record.tenant,
                dataset=record.dataset,
                files=record.files,
                mounted="" if record.files else record.dataset,
                image_side=record.image_side,
                trace=trace,
            )

        self._env.submit(
            Task(
                tenant=record.tenant,
                need=DATASETS if record.files else MOUNTED + record.dataset,
                answer=DatasetPrepared,
                make=make,
                done=lambda answer: self._prepared(record, answer),
                failed=lambda error: self._finish(
                    record, msgspec.structs.replace(record, state="faulty", faults=(_fault(error),))
                ),
            )
        )

    def _prepared(self, record: DatasetRecord, answer: EnvAnswer) -> None:
        if not isinstance(answer, DatasetPrepared):
            raise TypeError(f"a data set was answered by {type(answer).__name__}")
        if not answer.manifest:
            self._finish(record, msgspec.structs.replace(record, state="faulty", faults=answer.faults))
            return
        self._read_prepared(record, answer, 1)

    def _read_prepared(self, record: DatasetRecord, answer: DatasetPrepared, times: int) -> None:
        """Read a new manifest; while the disk does not give it, look again later."""
        try:
            manifest = self._manifest(answer.manifest)
        except (KeyError, ValueError, OSError) as error:
            self._outbox.log("error", "manifest_unreadable", dataset=record.dataset, reason=str(error), times=times)
            if isinstance(error, OSError) and times < _READS:
                again = partial(self._read_prepared, record, answer, times + 1)
                self._outbox.after(self._config.retry_s * times, again)
                return
            fault = Fault(severity="error", where="service", what="its preparation was lost: push the data set again")
            self._finish(record, msgspec.structs.replace(record, state="faulty", faults=(fault,)))
            return
        instructions = dict.fromkeys(episode.instruction for episode in manifest.episodes)
        self._finish(
            record,
            msgspec.structs.replace(
                record,
                state="ready",
                manifest=answer.manifest,
                digest=manifest.digest(),
                episodes=len(manifest.episodes),
                steps=manifest.steps,
                fps=manifest.fps,
                source_format=manifest.source_format,
                contract=manifest.contract,
                statistics=manifest.statistics,
                instructions=tuple(instructions)[:_SHOWN_INSTRUCTIONS],
                blobs=(*answer.blobs, (answer.manifest, answer.manifest_nbytes)),
                faults=answer.faults,
            ),
        )

    def _finish(self, record: DatasetRecord, outcome: DatasetRecord) -> None:
        key = (record.tenant, record.dataset)
        if self._preparing.get(key) == record.content:
            del self._preparing[key]
        if self._sets[record.tenant].get(record.dataset) is not record:
            return  # another content was pushed under the name meanwhile

        def saved() -> None:
            if self._sets[record.tenant].get(record.dataset) is record:
                self._put(outcome)
                self.settled(key)

        self._outbox.save([outcome], saved)

    def _put(self, record: DatasetRecord) -> None:
        tenant = record.tenant
        old = self._sets[tenant].get(record.dataset)
        self._sets[tenant][record.dataset] = record
        for digest, nbytes in _blobs(record):
            self._holdings.hold(tenant, digest, nbytes)
        if old is not None:
            for digest, _ in _blobs(old):
                # A set that is being prepared for hours may have found equal episodes, and refer to them at its end.
                self._holdings.release(tenant, digest, swept=True)
            if self._by_content.get((tenant, old.content)) is old:
                del self._by_content[tenant, old.content]
        if record.state == "ready":
            self._by_content.setdefault((tenant, record.content), record)

    def _info(self, record: DatasetRecord, *, brief: bool = False) -> DatasetInfo:
        shown = 10 if brief else _SHOWN
        return DatasetInfo(
            dataset=record.dataset,
            state=record.state,
            episodes=record.episodes,
            steps=record.steps,
            fps=record.fps,
            source_format=record.source_format,
            contract=record.contract,
            instructions=record.instructions[:shown],
            manifest=record.manifest,
            digest=record.digest,
            nbytes=sum(nbytes for _, nbytes in _blobs(record)),
            shared=record.tenant == SHARED,
            faults=record.faults[:shown],
        )


def contract_of(record: DatasetRecord) -> Contract:
    """Return the contract of a ready data set."""
    if record.contract is None:
        raise faulty(record)
    return record.contract


def faulty(record: DatasetRecord) -> JoyNexusError:
    """A data set cannot be used; say what is wrong first."""
    errors = [fault for fault in record.faults if fault.severity == "error"]
    first = f"{errors[0].where}: {errors[0].what}" if errors else "it could not be read"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return refuse(ErrorCode.BAD_DATA, f"data set '{record.dataset}' cannot be used: {first}{more}")


def _blobs(record: DatasetRecord) -> list[tuple[str, int]]:
    return [*((file.digest, file.nbytes) for file in record.files), *record.blobs]


def _content(files: tuple[FileEntry, ...], image_side: int) -> str:
    ordered = sorted((file.path, file.digest, file.nbytes) for file in files)
    return blake3.blake3(msgspec.msgpack.encode((ordered, image_side))).hexdigest()[:32]


def _fault(error: Failure) -> Fault:
    return Fault(severity="error", where="service", what=error.message)
