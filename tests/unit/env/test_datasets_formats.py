"""The same recordings come out of every LeRobot format, and out of our own writer."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from joynexus.statistics import compute_statistics
from services.env.datasets.check import check_dataset
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.writer import LeRobotWriter
from services.env.encoding import write_video
from tests.unit.env import sets

LENGTHS = (6, 4, 5)

WRITERS = {
    "v2.0 video": lambda folder: sets.write_v2(folder),
    "v2.1 video": lambda folder: sets.write_v2(folder, version="v2.1"),
    "v2.1 images": lambda folder: sets.write_v2(folder, version="v2.1", video=False),
    "v3.0 h264": lambda folder: sets.write_v3(folder),
    "v3.0 av1": lambda folder: sets.write_v3(folder, codec="av1"),
    "v3.0 images": lambda folder: sets.write_v3(folder, video=False),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_steps(tmp_path: Path, kind: str) -> None:
    folder, store = WRITERS[kind](tmp_path / "set"), BlobStore(tmp_path / "blobs")
    seen: list[tuple[int, int]] = []
    manifest = prepare_dataset(folder, store, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert manifest.faults == ()
    assert manifest.source_format == f"lerobot-{kind.split()[0]}"
    assert [e.length for e in manifest.episodes] == list(LENGTHS)
    assert [e.instruction for e in manifest.episodes] == ["task 0", "task 1", "task 0"]
    assert manifest.contract.robot == "arm"
    assert manifest.contract.cameras == sets.CONTRACT.cameras
    assert manifest.contract.rate_hz == manifest.fps == sets.FPS
    data = PreparedDataset(manifest, store.path)
    for index in range(len(data)):
        number, t = data.locate(index)
        batch = data.batch([index], chunk=1)
        assert np.array_equal(batch.state[0], sets.states(number, LENGTHS[number])[t])
        assert np.array_equal(batch.action[0, 0], sets.actions(number, LENGTHS[number])[t])
        # Neighbouring frames differ by 8 grey levels: a frame off by one would not pass.
        expected = sets.pictures(number, LENGTHS[number])[t].astype(int)
        assert np.abs(data.images(index)[0] - expected).max() <= (0 if "images" in kind else 3)
    expected_statistics = compute_statistics(
        [sets.states(n, k) for n, k in enumerate(LENGTHS)], [sets.actions(n, k) for n, k in enumerate(LENGTHS)]
    )
    assert manifest.statistics == expected_statistics


def test_the_writers_contract_comes_back_whole(tmp_path: Path) -> None:
    manifest = prepare_dataset(sets.write_v3(tmp_path / "set"), BlobStore(tmp_path / "blobs"))
    assert manifest.contract == sets.CONTRACT


def test_preparing_shows_life_with_each_episode_file_and_picture(tmp_path: Path) -> None:
    folder, signs = sets.write_v2(tmp_path / "set"), []
    manifest = prepare_dataset(folder, BlobStore(tmp_path / "blobs"), alive=lambda: signs.append(1))
    files = sum(path.is_file() for path in folder.rglob("*"))
    vectors = 3 * len(manifest.episodes)  # timestamp, state and action
    pictures = sum(episode.length for episode in manifest.episodes)
    assert len(signs) == len(manifest.episodes) + files + vectors + pictures


def test_preparing_again_gives_the_same_manifest(tmp_path: Path) -> None:
    folder, store = sets.write_v2(tmp_path / "set"), BlobStore(tmp_path / "blobs")
    first = prepare_dataset(folder, store)
    assert prepare_dataset(folder, store).digest() == first.digest()
    (folder / "meta/note.txt").write_text("changed")
    changed = prepare_dataset(folder, store)
    assert changed.source_digest != first.source_digest
    assert changed.episodes == first.episodes


def test_a_smaller_picture_is_asked_for_and_stated(tmp_path: Path) -> None:
    folder, store = sets.write_v3(tmp_path / "set"), BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(folder, store, image_side=8)
    assert [(c.height, c.width) for c in manifest.contract.cameras] == [(8, 8)]
    picture = PreparedDataset(manifest, store.path).images(7)[0]
    assert picture.shape == (8, 8, 3)
    assert abs(int(picture.mean()) - int(sets.pictures(1, 4)[1].mean())) <= 3
    assert prepare_dataset(folder, store, image_side=64).contract == sets.CONTRACT  # never enlarged
    with pytest.raises(ValueError, match="image_side is 0"):
        prepare_dataset(folder, store, image_side=0)


def test_long_gop_video_with_b_frames_is_read_in_order(tmp_path: Path) -> None:
    """Real sets have key frames far apart and frames stored out of order; each step still gets its own picture."""
    import av

    folder = sets.write_v2(tmp_path / "set", lengths=(60,))
    video = next(folder.glob("videos/**/*.mp4"))
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=sets.FPS)
        stream.width = stream.height = sets.SIDE
        stream.pix_fmt = "yuv420p"
        stream.options = {"g": "250", "bf": "3", "crf": "10"}
        for picture in sets.pictures(0, 60):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture.copy(), format="rgb24")))
        container.mux(stream.encode(None))
    store = BlobStore(tmp_path / "blobs")
    data = PreparedDataset(prepare_dataset(folder, store), store.path)
    means = [data.images(t)[0].mean() for t in range(60)]
    assert np.abs(np.array(means) - sets.pictures(0, 60)[:, 0, 0, 0]).max() <= 3


def test_report_of_a_sound_set_has_a_summary_and_no_fault(tmp_path: Path) -> None:
    report = check_dataset(sets.write_v2(tmp_path / "set"))
    assert report.faults == ()
    assert report.summary is not None
    assert (report.summary.episodes, report.summary.steps) == (3, 15)
    assert report.summary.instructions == ("task 0", "task 1")


def test_writer_writes_what_lerobot_reads(tmp_path: Path) -> None:
    """Names and offsets as LeRobot v3.0's own code looks them up."""
    folder = sets.write_v3(tmp_path / "set")
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["dataset_from_index"] for e in episodes] == [0, 6, 10]
    assert [e["dataset_to_index"] for e in episodes] == [6, 10, 15]
    assert episodes[1][f"videos/{sets.KEY}/from_timestamp"] == pytest.approx(0.6)
    assert episodes[1]["stats/action/max"] == pytest.approx(sets.actions(1, 4).max(0).tolist())
    tasks = pq.read_table(folder / "meta/tasks.parquet")
    assert b'"index_columns": ["__index_level_0__"]' in tasks.schema.metadata[b"pandas"]
    data = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    assert data["index"].to_pylist() == list(range(15))
    assert data["frame_index"].to_pylist()[6:10] == [0, 1, 2, 3]


def test_writer_refuses_what_does_not_fit_and_stays_usable(tmp_path: Path) -> None:
    state, action, images = sets.states(0, 4), sets.actions(0, 4), {"front": sets.pictures(0, 4)}
    with LeRobotWriter(tmp_path / "set", sets.FPS, sets.CONTRACT) as writer:
        with pytest.raises(ValueError, match=r"states have shape \(4, 2\)"):
            writer.add_episode(action, action, images, "go")
        with pytest.raises(ValueError, match="not finite"):
            writer.add_episode(state, action * np.nan, images, "go")
        with pytest.raises(ValueError, match=r"cameras \[\]"):
            writer.add_episode(state, action, {}, "go")
        with pytest.raises(ValueError, match="pictures of 'front'"):
            writer.add_episode(state, action, {"front": sets.pictures(0, 3)}, "go")
        with pytest.raises(ValueError, match="instruction"):
            writer.add_episode(state, action, images, " ")
        writer.add_episode(state, action, images, "go")
    assert check_dataset(tmp_path / "set").faults == ()
    with pytest.raises(ValueError, match="not an empty folder"):
        LeRobotWriter(tmp_path / "set", sets.FPS, sets.CONTRACT)
    with pytest.raises(ValueError, match="without episodes"), LeRobotWriter(tmp_path / "new", sets.FPS, sets.CONTRACT):
        pass


def test_an_unfinished_recording_is_no_data_set(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "set", sets.FPS, sets.CONTRACT)
    writer.add_episode(sets.states(0, 4), sets.actions(0, 4), {"front": sets.pictures(0, 4)}, "go")
    report = check_dataset(tmp_path / "set")
    assert report.errors[0].where == "meta/info.json"
    writer.finalize()


def test_videos_need_pictures_of_one_even_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture"):
        write_video(tmp_path / "a.mp4", [], 10)
    with pytest.raises(ValueError, match="must be even"):
        write_video(tmp_path / "a.mp4", [np.zeros((5, 4, 3), np.uint8)], 10)
    with pytest.raises(ValueError, match="but the video has"):
        write_video(tmp_path / "a.mp4", [np.zeros((4, 4, 3), np.uint8), np.zeros((6, 4, 3), np.uint8)], 10)
