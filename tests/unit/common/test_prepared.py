"""Promises of the prepared data set: chunks end with their episode, masks say so, pictures keep their order."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from common.blobs import BlobStore
from common.prepared import PreparedDataset, training_indices
from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.datasets import DatasetManifest, EpisodeEntry

LENGTHS = (5, 1, 3)


def vector(size: int) -> VectorStatistics:
    zeros = (0.0,) * size
    return VectorStatistics(mean=zeros, std=zeros, min=zeros, max=zeros, q01=zeros, q99=zeros)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


@pytest.fixture
def manifest(store: BlobStore) -> DatasetManifest:
    """Action = 100 * episode + step, state = its negative; wrist pictures show step, front ones 10 + step."""
    entries = []
    for number, length in enumerate(LENGTHS):
        value = 100.0 * number + np.arange(length, dtype=np.float32)
        fill = np.arange(length, dtype=np.uint8)[:, None, None, None]
        blob = save(
            {
                "state": np.ascontiguousarray(-value[:, None].repeat(3, 1)),
                "action": np.ascontiguousarray(value[:, None].repeat(2, 1)),
                "timestamp": np.arange(length) / 10,
                "image.wrist": np.broadcast_to(fill, (length, 4, 6, 3)).copy(),
                "image.front": np.broadcast_to(fill + 10, (length, 2, 2, 3)).copy(),
            }
        )
        entries.append(
            EpisodeEntry(length=length, instruction=f"task {number}", blob=store.put_bytes(blob), nbytes=len(blob))
        )
    cameras = (Camera(name="front", height=2, width=2), Camera(name="wrist", height=4, width=6))
    return DatasetManifest(
        source_format="lerobot-v3.0",
        source_digest="0" * 32,
        fps=10.0,
        contract=Contract(robot="arm", cameras=cameras, state_dim=3, action_dim=2),
        statistics=Statistics(count=9, state=vector(3), action=vector(2)),
        episodes=tuple(entries),
    )


@pytest.fixture
def dataset(manifest: DatasetManifest, store: BlobStore) -> PreparedDataset:
    return PreparedDataset(manifest, store.path)


def test_every_index_names_one_step_of_one_episode(dataset: PreparedDataset) -> None:
    assert len(dataset) == 9
    assert [dataset.locate(i) for i in range(9)] == [(e, t) for e, n in enumerate(LENGTHS) for t in range(n)]
    for outside in (-1, 9):
        with pytest.raises(IndexError, match="steps 0 to 8"):
            dataset.locate(outside)


def test_a_chunk_never_reaches_into_the_next_episode(dataset: PreparedDataset) -> None:
    batch = dataset.batch(range(9), chunk=4)
    for i in range(9):
        episode, t = dataset.locate(i)
        last = LENGTHS[episode] - 1
        expected = [100.0 * episode + min(t + k, last) for k in range(4)]
        assert batch.action[i, :, 0].tolist() == expected
        assert batch.action_mask[i].tolist() == [t + k <= last for k in range(4)]
        assert batch.state[i].tolist() == [-expected[0]] * 3
        assert batch.instructions[i] == f"task {episode}"


def test_batch_has_the_stated_shapes_and_dtypes(dataset: PreparedDataset) -> None:
    batch = dataset.batch(np.array([8, 0]), chunk=3)
    assert (batch.state.shape, batch.state.dtype) == ((2, 3), np.float32)
    assert (batch.action.shape, batch.action.dtype) == ((2, 3, 2), np.float32)
    assert (batch.action_mask.shape, batch.action_mask.dtype) == ((2, 3), np.bool_)
    assert dataset.batch([], chunk=3).state.shape == (0, 3)
    with pytest.raises(ValueError, match="chunk of 0"):
        dataset.batch([0], chunk=0)


def test_pictures_come_in_the_contracts_camera_order(dataset: PreparedDataset) -> None:
    front, wrist = dataset.images(7)  # episode 2, step 1
    assert front.shape == (2, 2, 3)
    assert wrist.shape == (4, 6, 3)
    assert front.dtype == wrist.dtype == np.uint8
    assert set(front.flat) == {11}
    assert set(wrist.flat) == {1}


def test_few_files_stay_open(manifest: DatasetManifest, store: BlobStore) -> None:
    opened: list[str] = []
    dataset = PreparedDataset(manifest, lambda digest: (opened.append(digest), store.path(digest))[1], max_open=2)
    assert opened == []
    dataset.batch([0, 1, 5, 0], chunk=1)
    assert len(opened) == 2  # each once, whatever the number of steps
    dataset.batch([6, 0], chunk=1)  # episode 2 pushes out episode 1, the least recently used
    assert len(opened) == 3
    assert len(dataset._open) == 2


def test_sample_range_keeps_the_order_asked_for(dataset: PreparedDataset) -> None:
    assert dataset.sample_range([2, 0]).tolist() == [6, 7, 8, 0, 1, 2, 3, 4]
    assert dataset.sample_range([]).tolist() == []
    with pytest.raises(IndexError, match="episode 3"):
        dataset.sample_range([3])


def test_held_out_episodes_are_never_trained_on(manifest: DatasetManifest) -> None:
    assert training_indices(manifest, 0).tolist() == list(range(9))
    held = training_indices(manifest, 1)
    assert held.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 7
    for bad in (3, -1):
        with pytest.raises(ValueError, match="hold out at most 2"):
            training_indices(manifest, bad)


def test_a_damaged_or_foreign_blob_is_refused_in_a_sentence(manifest: DatasetManifest, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="episode 0 is damaged"):
        PreparedDataset(manifest, lambda _: tmp_path / "junk").batch([0], chunk=1)
    (tmp_path / "other").write_bytes(save({"state": np.zeros((2, 3), np.float32), "action": np.zeros((2, 2), "f4")}))
    with pytest.raises(ValueError, match="manifest contradicts"):
        PreparedDataset(manifest, lambda _: tmp_path / "other").batch([0], chunk=1)


@pytest.mark.parametrize("lengths", [(2**40,), (-1,), (60_000_000, 60_000_000)])
def test_a_manifest_of_more_steps_than_a_set_can_have_is_refused_when_it_is_read(
    manifest: DatasetManifest, lengths: tuple[int, ...]
) -> None:
    entries = [msgspec.structs.replace(manifest.episodes[0], length=length) for length in lengths]
    plain = {**msgspec.to_builtins(manifest), "episodes": msgspec.to_builtins(entries)}
    with pytest.raises(msgspec.ValidationError, match="at most 100000000 steps"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=DatasetManifest)


@pytest.mark.parametrize(
    "pictures",
    [{}, {"image.front": np.zeros((5, 2, 3, 3), np.uint8)}, {"image.front": np.zeros((5, 2, 2, 3), np.float32)}],
    ids=["none", "other shape", "other type"],
)
def test_an_episode_whose_pictures_are_not_its_manifests_is_refused(
    manifest: DatasetManifest, store: BlobStore, pictures: dict[str, np.ndarray]
) -> None:
    tensors = {"state": np.zeros((5, 3), np.float32), "action": np.zeros((5, 2), np.float32)}
    wrist = {"image.wrist": np.zeros((5, 4, 6, 3), np.uint8)}
    digest = store.put_bytes(save({**tensors, **wrist, **pictures}))
    entry = msgspec.structs.replace(manifest.episodes[0], blob=digest)
    dataset = PreparedDataset(msgspec.structs.replace(manifest, episodes=(entry,)), store.path)
    with pytest.raises(ValueError, match="of camera 'front', which its manifest contradicts"):
        dataset.images(0)
