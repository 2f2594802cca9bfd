"""Data sets that cannot be read as they are: refused, each in one sentence; and data sets that attack."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.blobs import BlobStore
from services.env.datasets.check import check_dataset
from services.env.datasets.folder import fill_template
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.report import DatasetError
from services.env.encoding import encode_png, write_video
from tests.unit.env import sets
from tests.unit.env.faults import VIDEOS, info, refusal, warnings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sets.write_v2(tmp_path / "set")


# Refused in one sentence


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_number_that_is_not_finite_is_named_with_episode_step_and_element(tmp_path: Path, value: float) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        if number == 1:
            values = np.array(columns["action"].to_pylist(), np.float64)
            values[2, 1] = value
            columns["action"] = pa.array(values.tolist())

    text = refusal(sets.write_v2(tmp_path / "set", edit_table=edit), tmp_path)
    assert text.startswith("episode 1: 'action[1]' (grip) is ")
    assert "at step 2" in text


def test_a_truncated_table_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "data/chunk-000/episode_000001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    assert refusal(folder, tmp_path).startswith("data/chunk-000/episode_000001.parquet: is truncated")


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    folder = sets.write_v2(tmp_path / "set", lengths=(4000, 4), video=False)
    path = folder / "data/chunk-000/episode_000000.parquet"
    data = bytearray(path.read_bytes())
    data[100:2000] = bytes(1900)  # the footer stays sound
    path.write_bytes(data)
    assert "episode_000000.parquet" in refusal(folder, tmp_path)


def test_a_missing_table_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "data/chunk-000/episode_000001.parquet").unlink()
    assert refusal(folder, tmp_path).startswith("episode 1: its parquet file is missing")


def test_a_missing_video_of_one_episode_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / VIDEOS / "episode_000002.mp4").unlink()
    assert refusal(folder, tmp_path).startswith(f"episode 2: the video of camera '{sets.KEY}' is missing")


@pytest.mark.parametrize("frames", [3, 5])
def test_a_video_with_another_number_of_frames_is_named(folder: Path, tmp_path: Path, frames: int) -> None:
    write_video(folder / VIDEOS / "episode_000001.mp4", sets.pictures(1, frames), sets.FPS)
    assert refusal(folder, tmp_path).startswith(f"episode 1: has 4 steps but {frames} frames in {VIDEOS}")


def test_a_truncated_video_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / VIDEOS / "episode_000001.mp4"
    path.write_bytes(path.read_bytes()[:60])
    assert refusal(folder, tmp_path).startswith(f"{VIDEOS}/episode_000001.mp4: is truncated or no MP4")


def test_a_video_with_damaged_frames_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / VIDEOS / "episode_000001.mp4"
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    data[start : start + 700] = bytes(700)
    path.write_bytes(data)
    assert refusal(folder, tmp_path).startswith(f"{VIDEOS}/episode_000001.mp4: ")


def test_a_playlist_in_a_videos_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.mp4"
    shutil.copy(folder / VIDEOS / "episode_000000.mp4", secret)
    (folder / VIDEOS / "episode_000000.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\n{secret}\n")
    assert "no MP4 video" in refusal(folder, tmp_path)


def test_a_camera_of_several_sizes_is_named(folder: Path, tmp_path: Path) -> None:
    write_video(folder / VIDEOS / "episode_000001.mp4", sets.pictures(1, 4, side=32), sets.FPS)
    assert "one camera has one size" in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"bytes": None, "path": "a.png"}, "holds no PNG or JPEG picture"),
        ({"bytes": b"\x89PNG and then nothing", "path": None}, "holds a damaged picture"),
        ({"bytes": encode_png(np.zeros((4, 4, 3), np.uint8))[:-30], "path": None}, "holds a damaged picture"),
    ],
)
def test_a_bad_picture_in_a_table_is_named_with_its_row(tmp_path: Path, value: dict[str, Any], sentence: str) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        if number == 1:
            columns[sets.KEY] = pa.array([*columns[sets.KEY].to_pylist()[:3], value])

    text = refusal(sets.write_v2(tmp_path / "set", video=False, edit_table=edit), tmp_path)
    assert text.startswith(f"data/chunk-000/episode_000001.parquet, column {sets.KEY}, row 3: {sentence}")


def test_lengths_that_contradict_each_other_without_a_video_are_refused(tmp_path: Path) -> None:
    folder = sets.write_v2(tmp_path / "set", video=False)
    rows = [{"episode_index": n, "tasks": ["task 0"], "length": 7} for n in range(3)]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    assert refusal(folder, tmp_path).startswith("episode 0: has 6 rows but its listed length is 7")


def test_an_action_of_another_length_than_declared_is_named(folder: Path, tmp_path: Path) -> None:
    info(folder, lambda v: v["features"]["action"].update(shape=[7], names=None))
    assert refusal(folder, tmp_path).startswith("episode 0: 'action' has 2 numbers at step 0, but info.json declares 7")


def test_missing_columns_and_wrong_types_are_named(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        if number == 0:
            del columns["action"]
        if number == 1:
            columns["action"] = pa.array(["a"] * 4)
        if number == 2:
            columns["action"] = pa.array([["a", "b"]] * 5)

    folder = sets.write_v2(tmp_path / "set", edit_table=edit)
    with pytest.raises(DatasetError, match="2 more errors") as caught:
        prepare_dataset(folder, BlobStore(tmp_path / "blobs"))
    sentences = [fault.what for fault in caught.value.report.errors]
    assert "has no column 'action'" in sentences[0]
    assert "2 numbers a step are declared" in sentences[1]
    assert "not numbers" in sentences[2]


def test_shuffled_rows_and_foreign_tables_are_refused(tmp_path: Path) -> None:
    def edit(number: int, columns: dict[str, Any]) -> None:
        length = len(columns["index"])
        if number == 0:
            columns["frame_index"] = pa.array(np.arange(length)[::-1])
        if number == 1:
            columns["episode_index"] = pa.array(np.full(length, 7))

    report = check_dataset(sets.write_v2(tmp_path / "set", edit_table=edit))
    assert [fault.where for fault in report.errors] == ["episode 0", "episode 1"]
    assert "frame_index does not count" in report.errors[0].what
    assert "names another episode" in report.errors[1].what


def test_an_episode_without_a_task_is_refused(folder: Path, tmp_path: Path) -> None:
    sets.write_lines(folder / "meta/tasks.jsonl", [])
    rows = [{"episode_index": n, "tasks": ["valid"], "length": k} for n, k in enumerate((6, 4, 5))]
    sets.write_lines(folder / "meta/episodes.jsonl", rows)
    assert refusal(folder, tmp_path).startswith("episode 0: has no task text")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda v: v.update(codebase_version="v1.6"), "codebase_version is 'v1.6': only v2.0, v2.1 and v3.0"),
        (lambda v: v.update(fps=0), "fps is 0"),
        (lambda v: v.update(fps="fast"), "fps is 'fast'"),
        (lambda v: v.update(features=[]), "has no 'features'"),
        (lambda v: v["features"].pop("action"), "declares no action"),
        (lambda v: v["features"].pop("observation.state"), "declares no state"),
        (lambda v: v["features"]["action"].update(shape=[2, 2]), "must be one vector"),
        (lambda v: v["features"].update({"../x": {"dtype": "video"}}), "has a name that cannot be used"),
        (lambda v: v["features"].update({"observation.image.front": {"dtype": "video"}}), "two cameras are called"),
    ],
)
def test_metadata_that_cannot_be_understood_is_refused(
    folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    info(folder, edit)
    assert refusal(folder, tmp_path).startswith("meta/info.json: ")
    assert sentence in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("meta/info.json", "{", "is not valid JSON"),
        ("meta/info.json", "[1]", "is not a JSON object"),
        ("meta/info.json", "[" * 100_000, "is not valid JSON"),
        ("meta/episodes.jsonl", '{"episode_index": 0, "length": 6}\nnonsense', "line 2 is not valid JSON"),
        ("meta/episodes.jsonl", "[]", "line 1 is not a JSON object"),
        ("meta/episodes.jsonl", '{"episode_index": -1, "length": 6}', "without a valid episode_index"),
        ("meta/episodes.jsonl", '{"episode_index": 0, "length": 6}\n' * 2, "lists episode 0 twice"),
        ("meta/episodes.jsonl", "\n", "lists no episode"),
        ("meta/tasks.jsonl", '{"task": 5}', "without task_index and task"),
    ],
)
def test_broken_meta_files_are_named(folder: Path, tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (folder / name).write_text(text)
    assert refusal(folder, tmp_path).startswith(f"{name}: ")
    assert sentence in refusal(folder, tmp_path)


def test_missing_folder_missing_meta_and_not_text_are_named(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere", tmp_path)
    (folder / "meta/tasks.jsonl").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refusal(folder, tmp_path)
    (folder / "meta/tasks.jsonl").unlink()
    assert refusal(folder, tmp_path).startswith("meta/tasks.jsonl: is missing")


def test_two_files_for_one_episode_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "data/other").mkdir()
    shutil.copy(folder / "data/chunk-000/episode_000000.parquet", folder / "data/other/episode_0.parquet")
    assert check_dataset(folder).errors == ()  # the template decides
    info(folder, lambda v: v.pop("data_path"))
    assert "has several files" in refusal(folder, tmp_path)


# LeRobot v3.0's own


EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda c: c.update({"data/file_index": pa.array([0, 5, 0])}),
            "its parquet file (chunk, file) (0, 5) is missing",
        ),
        (lambda c: c.update(length=pa.array([6, 5, 4])), "has 4 rows but its listed length is 5"),
        (lambda c: c.update(episode_index=pa.array([0, 1, 7])), "its rows are missing or scattered"),
        (
            lambda c: c.update({"data/file_index": pa.array([[0]] * 3)}),
            "its parquet file (chunk, file) (-1, -1) is missing",
        ),
        (
            lambda c: c.update({f"videos/{sets.KEY}/chunk_index": pa.array([[0]] * 3)}),
            "'front': its videos are missing: copy them",
        ),
        (lambda c: c.update(episode_index=pa.array([0, 1, 1])), "lists episode 1 twice"),
        (lambda c: c.update(length=pa.array([6, 4, 0])), "without a valid episode_index and length"),
        (lambda c: c.update({f"videos/{sets.KEY}/file_index": pa.array([0, 0, 9])}), "is missing"),
        (lambda c: c.update({f"videos/{sets.KEY}/from_timestamp": pa.array([0.0, 0.6, 1.2])}), "but fewer frames"),
        (lambda c: c.update({f"videos/{sets.KEY}/from_timestamp": pa.array([0.0, 0.6, 90.0])}), "but fewer frames"),
    ],
)
def test_v3_places_that_do_not_hold_the_episode_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    folder = sets.write_v3(tmp_path / "set")
    sets.edit_parquet(folder / EPISODES, edit)
    assert sentence in refusal(folder, tmp_path)


def test_v3_task_texts_may_stand_in_a_column_or_in_json_lines(tmp_path: Path) -> None:
    folder = sets.write_v3(tmp_path / "set")
    path = folder / "meta/tasks.parquet"
    sets.edit_parquet(path, lambda c: c.update(task=c.pop("__index_level_0__")))
    assert check_dataset(folder).faults == ()
    path.unlink()
    sets.write_lines(folder / "meta/tasks.jsonl", [{"task_index": k, "task": f"task {k}"} for k in range(2)])
    assert "stands where v3.0 has meta/tasks.parquet" in warnings(check_dataset(folder))


def test_v3_without_episodes_or_task_texts_is_refused(tmp_path: Path) -> None:
    folder = sets.write_v3(tmp_path / "set")
    sets.edit_parquet(folder / "meta/tasks.parquet", lambda c: c.pop("__index_level_0__"))
    assert "lacks the task texts" in refusal(folder, tmp_path)
    shutil.copy(sets.write_v3(tmp_path / "numberless") / "meta/tasks.parquet", folder / "meta/tasks.parquet")
    sets.edit_parquet(folder / "meta/tasks.parquet", lambda c: c.update(task_index=pa.nulls(2)))
    assert "lacks the task texts or the column task_index" in refusal(folder, tmp_path)
    shutil.rmtree(folder / "meta/episodes")
    shutil.copy(sets.write_v3(tmp_path / "other") / "meta/tasks.parquet", folder / "meta/tasks.parquet")
    assert "was the set finalized" in refusal(folder, tmp_path)


def test_a_contract_file_that_contradicts_the_data_is_refused(tmp_path: Path) -> None:
    folder = sets.write_v3(tmp_path / "set")
    path = folder / "meta/joynexus_contract.json"
    sets.edit_json(path, lambda v: v.update(action_dim=5))
    assert "states action_dim 5 but the data has 2" in refusal(folder, tmp_path)
    path.write_text(json.dumps({"robot": 5}))
    assert "is no embodiment contract" in refusal(folder, tmp_path)


# Untrusted input


def test_links_that_leave_the_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    inside = folder / "data/chunk-000/episode_000000.parquet"
    outside = tmp_path / "outside.parquet"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert "symbolic link that leads out of the data set" in refusal(folder, tmp_path)
    inside.unlink()
    outside.rename(inside.with_name("moved.parquet"))
    inside.symlink_to("moved.parquet")  # within the folder a link is fine
    assert check_dataset(folder).errors == ()
    (folder / "videos/extra").symlink_to("/etc")
    assert "leads out" in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "/etc/{episode_index}",
        "../{episode_index}",
        "a/../../b",
        "{episode_index.__class__}",
        "{episode_index:099999d}",
        "{x}",
    ],
)
def test_templates_cannot_leave_the_folder_or_run_anything(template: str) -> None:
    assert fill_template(template, {"episode_index": 3}) is None


def test_templates_fill_numbers_with_and_without_width() -> None:
    values: dict[str, int | str] = {"episode_chunk": 0, "episode_index": 12, "video_key": "cam"}
    assert fill_template("d/{episode_chunk:03d}/{video_key}/e_{episode_index:06d}.x", values) == "d/000/cam/e_000012.x"
    assert fill_template("e_{episode_index}.x", values) == "e_12.x"


def test_a_set_that_is_wrong_everywhere_has_a_short_report(tmp_path: Path) -> None:
    folder = sets.write_v2(tmp_path / "set", lengths=(1,) * 300, video=False)
    for path in folder.glob("data/*/*.parquet"):
        path.unlink()
    report = check_dataset(folder)
    assert 0 < len(report.errors) <= 200


def test_a_report_of_megabytes_in_the_metadata_is_short(folder: Path) -> None:
    info(
        folder,
        lambda v: v.update(total_episodes=list(range(100_000)), splits={f"s{k}": "x" * 9000 for k in range(300)}),
    )
    report = check_dataset(folder)
    assert "total_episodes says [0, 1, 2" in warnings(report)
    assert "the files count" in warnings(report)
    assert len(msgspec.msgpack.encode(report)) < 200_000


def test_a_column_that_is_there_twice_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("action", table["action"]), path)
    assert "episode_000001.parquet: has several columns of one name" in refusal(folder, tmp_path)


def test_odd_types_of_optional_columns_are_as_good_as_none(tmp_path: Path) -> None:
    folder = sets.write_v3(tmp_path / "set")
    sets.edit_parquet(folder / EPISODES, lambda c: c.update(tasks=pa.array([5, 6, 7])))
    assert check_dataset(folder).faults == ()  # the steps name their tasks
    data = folder / "data/chunk-000/file-000.parquet"
    sets.edit_parquet(data, lambda c: c.update(task_index=pa.array(["none"] * len(c["index"]))))
    assert "has no task text" in refusal(folder, tmp_path)
