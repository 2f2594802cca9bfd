"""Promises of the data lane: pushed and mounted sets, pages of batches, action errors; each fault is an answer."""

import errno
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.blobs import BlobStore, BlobStoreFullError
from common.prepared import PreparedDataset
from joynexus.datasets import DatasetManifest
from joynexus.simulation.asking import Answer
from joynexus.specs import PolicySpec
from joynexus.wire import ErrorCode, JoyNexusError
from joynexus.wire.back import EvaluateActions, PrepareDataset, SampleIndices
from joynexus.wire.front import FileEntry
from services.env.data_work import DataWork, find_mounted
from services.env.datasets.prepare import prepare_dataset
from tests.unit.env import sets


class StoreAccess:
    """A blob store with the names of `BlobAccess`."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.full = False

    def fetch(self, digest: str) -> Path:
        return self.store.path(digest)

    def read(self, digest: str) -> bytes:
        return self.store.path(digest).read_bytes()

    def put_bytes(self, data: bytes | memoryview) -> str:
        return self.store.put_bytes(data)

    def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
        if self.full:
            raise BlobStoreFullError(errno.ENOSPC, "the disk is full")
        return self.store.put_file(path, move=move)


@pytest.fixture
def blobs(tmp_path: Path) -> StoreAccess:
    return StoreAccess(BlobStore(tmp_path / "blobs"))


@pytest.fixture
def work(tmp_path: Path, blobs: StoreAccess) -> DataWork:
    return DataWork(blobs, tmp_path / "scratch", {})


def pushed(folder: Path, blobs: StoreAccess, **more: int) -> PrepareDataset:
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest, nbytes = blobs.store.put_file(path)
        files.append(FileEntry(path=path.relative_to(folder).as_posix(), digest=digest, nbytes=nbytes))
    return PrepareDataset(task="t1", attempt=1, tenant="a", dataset="arm", files=tuple(files), **more)


def prepared(folder: Path, blobs: StoreAccess) -> tuple[DatasetManifest, str]:
    manifest = prepare_dataset(folder, blobs.store)
    return manifest, blobs.store.put_bytes(msgspec.msgpack.encode(manifest))


def test_a_pushed_set_is_prepared_as_the_folder_it_came_from(
    tmp_path: Path, blobs: StoreAccess, work: DataWork
) -> None:
    folder = sets.write_v2(tmp_path / "set")
    answer = work.prepare(pushed(folder, blobs, image_side=8))
    manifest = msgspec.msgpack.decode(blobs.read(answer.manifest), type=DatasetManifest)
    assert manifest == prepare_dataset(folder, blobs.store, image_side=8)
    assert answer.manifest_nbytes == len(blobs.read(answer.manifest))
    assert answer.blobs == tuple((e.blob, e.nbytes) for e in manifest.episodes)
    assert (answer.faults, answer.attempt) == ((), 1)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_mounted_set_has_a_name_that_jobs_can_use(tmp_path: Path, blobs: StoreAccess) -> None:
    sets.write_v3(tmp_path / "mounted" / "Pick.v2")
    (tmp_path / "mounted" / "no-set").mkdir()
    mounted = find_mounted(tmp_path / "mounted")
    assert list(mounted) == ["pick-v2"]
    assert find_mounted(None) == find_mounted(tmp_path / "nowhere") == {}
    work = DataWork(blobs, tmp_path / "scratch", mounted)
    message = PrepareDataset(task="t", attempt=1, tenant="shared", dataset="pick-v2", mounted="pick-v2")
    assert work.prepare(message).manifest
    with pytest.raises(JoyNexusError, match="data set 'other' is not mounted here"):
        work.prepare(msgspec.structs.replace(message, mounted="other"))


def test_what_is_wrong_with_a_set_is_the_answer(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    folder = sets.write_v2(tmp_path / "set")
    next(folder.glob("videos/*/*/*_000001.mp4")).unlink()
    answer = work.prepare(pushed(folder, blobs))
    assert (answer.manifest, answer.blobs) == ("", ())
    assert "the video of camera" in answer.faults[0].what


def test_a_full_disk_is_an_answer_too(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    message = pushed(sets.write_v2(tmp_path / "set"), blobs)
    blobs.full = True
    answer = work.prepare(message)
    assert answer.error is not None
    assert answer.error.code is ErrorCode.UNAVAILABLE
    assert "disk" in answer.error.message


@pytest.mark.parametrize("path", ["../out", "/etc/out", ""])
def test_a_pushed_path_cannot_leave_the_set(blobs: StoreAccess, work: DataWork, path: str) -> None:
    digest = blobs.store.put_bytes(b"x")
    entry = FileEntry(path=path, digest=digest, nbytes=1)
    with pytest.raises(JoyNexusError, match="is not a path inside a data set"):
        work.prepare(PrepareDataset(task="t", attempt=1, tenant="a", dataset="arm", files=(entry,)))


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", "a/b"), ("a", "a/b/c"), ("a/b", "a")])
def test_two_files_in_one_place_are_refused_and_their_blobs_stay_whole(
    blobs: StoreAccess, work: DataWork, first: str, second: str
) -> None:
    one, other = blobs.store.put_bytes(b"x" * 9), blobs.store.put_bytes(b"y" * 9)
    files = (FileEntry(path=first, digest=one, nbytes=9), FileEntry(path=second, digest=other, nbytes=9))
    with pytest.raises(JoyNexusError, match="in the place of another file"):
        work.prepare(PrepareDataset(task="t", attempt=1, tenant="a", dataset="arm", files=files))
    assert [blobs.read(digest) for digest in (one, other)] == [b"x" * 9, b"y" * 9]


def test_a_full_scratch_disk_is_an_answer_too(
    tmp_path: Path, blobs: StoreAccess, work: DataWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = pushed(sets.write_v2(tmp_path / "set"), blobs)
    monkeypatch.setattr("services.env.data_work.prepare_apart", full)
    answer = work.prepare(message)
    assert (answer.manifest, answer.faults) == ("", ())
    assert answer.error is not None
    assert answer.error.code is ErrorCode.UNAVAILABLE  # so that the master tries again
    assert "ask the operator for disk space" in answer.error.message


def test_pages_of_batches_are_the_jobs_alone(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    _, manifest = prepared(sets.write_v3(tmp_path / "set"), blobs)

    def page(first: int, steps: int) -> tuple[tuple[int, ...], ...]:
        message = SampleIndices(
            task="t",
            attempt=1,
            tenant="a",
            manifest=manifest,
            holdout_episodes=1,
            seed=3,
            batch_size=4,
            first_step=first,
            steps=steps,
        )
        answer = work.draw(message)
        assert answer.error is None
        return answer.batches

    whole = page(0, 10)
    assert page(0, 4) + page(4, 6) == whole
    assert sorted(index for batch in whole[:5] for index in batch) == sorted([*range(10)] * 2)  # two epochs, no holdout


def test_a_page_that_cannot_be_drawn_says_why(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    _, manifest = prepared(sets.write_v3(tmp_path / "set"), blobs)
    message = SampleIndices(
        task="t",
        attempt=1,
        tenant="a",
        manifest=manifest,
        holdout_episodes=3,
        seed=0,
        batch_size=4,
        first_step=0,
        steps=1,
    )
    error = work.draw(message).error
    assert error is not None
    assert "hold out at most 2" in error.message
    junk = blobs.store.put_bytes(b"junk")
    error = work.draw(msgspec.structs.replace(message, manifest=junk)).error
    assert error is not None
    assert "is no data set's manifest" in error.message


CHUNK = 3


def evaluation(manifest: DatasetManifest, digest: str, episodes: tuple[int, ...] = (2,)) -> EvaluateActions:
    spec = PolicySpec(backbone="lite", chunk=CHUNK, contract=manifest.contract, statistics=manifest.statistics)
    return EvaluateActions(
        task="t", attempt=1, tenant="a", policy="arm", version=4, spec=spec, manifest=digest, episodes=episodes
    )


def test_a_policy_that_repeats_the_recordings_has_no_error(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    manifest, digest = prepared(sets.write_v3(tmp_path / "set"), blobs)
    data = PreparedDataset(manifest, blobs.fetch)
    recorded = data.batch(data.sample_range([2]), CHUNK)

    def ask(states: np.ndarray, images: list[np.ndarray], instructions: list[str], seeds: list[int]) -> Answer:
        assert len(set(seeds)) == len(states)
        assert [image.shape for image in images] == [(len(states), sets.SIDE, sets.SIDE, 3)]
        assert set(instructions) == {"task 0"}
        rows = [int(np.flatnonzero((recorded.state == state).all(1))[0]) for state in states]
        return Answer(4, recorded.action[rows] + np.float32(0.5))

    message = evaluation(manifest, digest)
    result = work.compare(message, ask).result  # type: ignore[arg-type]  # a function instead of an Asker
    assert result is not None
    std = np.array(manifest.statistics.action.std)
    assert result.version == 4
    assert result.samples == 5
    assert result.policy == pytest.approx((0.5 / std).mean(), rel=1e-4)
    assert result.per_dimension == pytest.approx(tuple(0.5 / std), rel=1e-4)
    assert result.per_step == pytest.approx([(0.5 / std).mean()] * CHUNK, rel=1e-4)
    assert result.mean_action > 0
    assert np.isnan(result.repeat_state)  # state and action differ in length


def test_another_contract_or_episode_is_refused(tmp_path: Path, blobs: StoreAccess, work: DataWork) -> None:
    manifest, digest = prepared(sets.write_v3(tmp_path / "set"), blobs)
    message = evaluation(manifest, digest, (7,))
    error = work.compare(message, None).error  # type: ignore[arg-type]  # nobody is asked
    assert error is not None
    assert "episode 7 is outside" in error.message
    error = work.compare(msgspec.structs.replace(message, episodes=()), None).error  # type: ignore[arg-type]  # as above
    assert error is not None
    assert "no episode" in error.message
    spec = msgspec.structs.replace(message.spec, contract=msgspec.structs.replace(manifest.contract, robot="leg"))
    with pytest.raises(JoyNexusError, match="the policy has 'leg', the data set has 'arm'") as caught:
        work.compare(msgspec.structs.replace(message, spec=spec), None)  # type: ignore[arg-type]  # as above
    assert caught.value.code is ErrorCode.CONTRACT_MISMATCH
