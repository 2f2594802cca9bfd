"""Data sets that are broken and can be read without doubt: they are, with a warning."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from services.env.datasets.check import check_dataset
from services.env.datasets.prepare import prepare_dataset
from services.env.encoding import write_video
from tests.unit.env import sets
from tests.unit.env.faults import VIDEOS, info, warnings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sets.write_v2(tmp_path / "set")


def test_templates_that_point_nowhere_are_replaced_by_the_files_that_are_there(folder: Path) -> None:
    def edit(value: dict[str, Any]) -> None:
        value["data_path"] = "data/chunk-{episode_index:03d}/episode_{episode_index:06d}.parquet"
        value["video_path"] = "videos/{episode_chunk.__class__}/{video_key}.mp4"

    info(folder, edit)
    text = warnings(check_dataset(folder))
    assert "data_path points to files that do not exist" in text
    assert "video_path points to files that do not exist: the files were found by their numbers (in 3 episodes)" in text


def test_v3_templates_that_point_nowhere_are_replaced_too(tmp_path: Path) -> None:
    folder = sets.write_v3(tmp_path / "set")
    info(folder, lambda v: v.update(data_path="data/{chunk_index}.parquet", video_path="nowhere/{video_key}.mp4"))
    assert warnings(check_dataset(folder)).count("points to files that do not exist") == 2


def test_a_camera_without_any_file_is_left_out(folder: Path) -> None:
    def edit(value: dict[str, Any]) -> None:
        value["features"]["observation.images.egoview"] = {"dtype": "video", "shape": [800, 1280, 3]}

    info(folder, edit)
    report = check_dataset(folder)
    assert "camera 'observation.images.egoview' is declared but has no file" in warnings(report)
    assert report.summary is not None
    assert report.summary.cameras == ("front",)


def test_a_depth_camera_is_left_out(folder: Path) -> None:
    def edit(value: dict[str, Any]) -> None:
        value["features"]["observation.depth"] = {"dtype": "video", "shape": [4], "info": {"video.is_depth_map": True}}

    info(folder, edit)
    assert "has depth maps" in warnings(check_dataset(folder))


def test_totals_and_splits_that_exceed_the_files_are_named(folder: Path) -> None:
    info(folder, lambda v: v.update(splits={"train": "0:100"}, total_videos=2, total_frames=7, total_episodes=9))
    text = warnings(check_dataset(folder))
    assert "split 'train' is '0:100' but there are episodes 0:3" in text
    assert "total_videos says 2 but there are 3" in text
    assert "total_frames says 7 but there are 15" in text
    assert "total_episodes says 9 but there are 3" in text


def test_missing_frame_index_late_timestamps_and_float64_are_read(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        del columns["frame_index"]
        columns["timestamp"] = pa.array(0.05 + np.arange(len(columns["index"])) / sets.FPS)
        columns["action"] = pa.array(np.array(columns["action"].to_pylist(), np.float64).tolist())

    folder = sets.write_v2(tmp_path / "set", edit_table=edit)
    text = warnings(check_dataset(folder))
    assert "there is no column frame_index" in text
    assert "timestamps do not start at 0" in text
    assert "'action' is stored as float64: it is read as float32 (in 3 episodes)" in text


def test_missing_and_uneven_timestamps_are_named(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        if number == 0:
            del columns["timestamp"]
        else:
            columns["timestamp"] = pa.array(np.arange(len(columns["index"])) / 3.0)

    text = warnings(check_dataset(sets.write_v2(tmp_path / "set", edit_table=edit)))
    assert "episode 0: there are no usable timestamps" in text
    assert "timestamps do not advance by 1/fps (0.1 s) a step" in text


def test_constant_action_numbers_are_counted(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        values = np.array(columns["action"].to_pylist(), np.float32)
        values[:, 1] = 0.5
        columns["action"] = pa.array(values.tolist(), pa.list_(pa.float32(), sets.ACTION_DIM))

    text = warnings(check_dataset(sets.write_v2(tmp_path / "set", edit_table=edit)))
    assert "1 of 2 action numbers never change" in text


def test_the_task_that_the_steps_name_is_the_instruction_not_the_remark(folder: Path, tmp_path: Path) -> None:
    rows = [{"episode_index": n, "tasks": ["valid", f"task {n % 2}"], "length": k} for n, k in enumerate((6, 4, 5))]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    manifest = prepare_dataset(folder, BlobStore(tmp_path / "blobs"))
    assert [e.instruction for e in manifest.episodes] == ["task 0", "task 1", "task 0"]
    assert "several tasks are listed" in warnings(check_dataset(folder))


def test_a_remark_in_task_index_yields_to_a_listed_task(folder: Path, tmp_path: Path) -> None:
    tasks = [{"task_index": 0, "task": "valid"}, {"task_index": 1, "task": "task 1"}]
    sets.write_lines(folder / "meta/tasks.jsonl", tasks)
    rows = [{"episode_index": n, "tasks": ["valid", "lift"], "length": k} for n, k in enumerate((6, 4, 5))]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    manifest = prepare_dataset(folder, BlobStore(tmp_path / "blobs"))
    assert [e.instruction for e in manifest.episodes] == ["lift", "task 1", "lift"]


def test_several_tasks_within_an_episode_are_named(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        columns["task_index"] = pa.array([1] + [0] * (len(columns["index"]) - 1))

    folder = sets.write_v2(tmp_path / "set", edit_table=edit)
    report = check_dataset(folder)
    assert "its steps have several tasks" in warnings(report)
    assert report.summary is not None
    assert report.summary.instructions == ("task 0",)


def test_episodes_come_in_the_order_of_their_numbers_not_of_their_names(tmp_path: Path) -> None:
    folder = sets.write_v2(tmp_path / "set", lengths=(3,) * 11)
    rows = [{"episode_index": n, "tasks": ["task 0"], "length": 3} for n in sorted(range(11), key=str)]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    for path in folder.glob("data/*/*.parquet"):
        path.rename(path.with_name(f"episode_{int(path.stem[-6:])}.parquet"))  # episode_10 sorts before episode_2
    store = BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(folder, store)
    batch = PreparedDataset(manifest, store.path).batch(range(33), chunk=1)
    assert batch.state[::3, 0].tolist() == list(range(11))
    assert "does not list the episodes in the order of their numbers" in warnings(check_dataset(folder))


def test_a_wrong_listed_length_yields_to_rows_and_frames_that_agree(folder: Path) -> None:
    rows = [{"episode_index": n, "tasks": [f"task {n % 2}"], "length": k} for n, k in enumerate((6, 9, 5))]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    assert "has 4 rows and frames but its listed length is 9" in warnings(check_dataset(folder))


def test_a_table_without_an_entry_and_a_gap_in_the_numbers_are_named(folder: Path) -> None:
    rows = [{"episode_index": n, "tasks": ["task 0"], "length": k} for n, k in ((0, 6), (2, 5))]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    text = warnings(check_dataset(folder))
    assert "leaves out some episode numbers" in text
    assert "episode_000001.parquet: belongs to no episode" in text


def test_another_video_rate_and_declared_size_are_named(folder: Path) -> None:
    def edit(value: dict[str, Any]) -> None:
        value["features"][sets.KEY]["shape"] = [3, 99, 99]

    info(folder, edit)
    write_video(folder / VIDEOS / "episode_000000.mp4", sets.pictures(0, 6), 4)
    text = warnings(check_dataset(folder))
    assert "plays at 4 frames per second but fps is 10" in text
    assert "says [3, 99, 99] but has 16x16 pixels" in text


def test_names_that_do_not_fit_are_ignored(folder: Path) -> None:
    info(folder, lambda v: v["features"]["action"].update(names=["one"]))
    assert "has 2 numbers but 1 names" in warnings(check_dataset(folder))


@pytest.mark.parametrize("keys", [("state", "actions"), ("observation.state", "action")])
def test_the_usual_other_keys_are_understood(tmp_path: Path, keys: tuple[str, str]) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        columns[keys[0]], columns[keys[1]] = columns.pop("observation.state"), columns.pop("action")

    folder = sets.write_v2(tmp_path / "set", edit_table=edit)

    def rename(value: dict[str, Any]) -> None:
        features = value["features"]
        features[keys[0]], features[keys[1]] = features.pop("observation.state"), features.pop("action")

    info(folder, rename)
    assert check_dataset(folder).faults == ()
