"""LeRobot v3.0: many episodes in one parquet or MP4, their places listed in `meta/episodes`.

In: the parquet files of `meta` and the names of the files that are there. Out: `Layout`. Never: rows of steps,
or frames.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from services.env.datasets.folder import DatasetFolder, fill_template
from services.env.datasets.layout import (
    EpisodeSource,
    Info,
    Layout,
    VideoSpan,
    check_counts,
    drop_cameras_without_files,
)
from services.env.datasets.lerobot_v2 import read_tasks as read_json_tasks
from services.env.datasets.lerobot_v2 import read_texts
from services.env.datasets.tables import read_columns

_PLACE = re.compile(r"chunk-(\d{1,9})/file-(\d{1,9})\.(parquet|mp4)$")


def read_layout(folder: DatasetFolder, info: Info) -> Layout:
    """Return what a v3.0 folder holds; DatasetError if that cannot be told."""
    findings = folder.findings
    tasks = _tasks(folder)
    keys = sorted(camera.key for camera in info.cameras if camera.video)
    tables, videos = _files_by_place(folder, keys)
    episodes = []
    for row in _episode_rows(folder, keys):
        index = row["episode_index"]
        place = _place(row, "data")
        table = _choose(folder, info, "data_path", place, tables.get(place), "")
        if table is None:
            findings.error(f"episode {index}", f"its parquet file (chunk, file) {place} is missing: copy it")
            continue
        spans = {}
        for key in keys:
            place = _place(row, f"videos/{key}")
            start = row.get(f"videos/{key}/from_timestamp")
            video = _choose(folder, info, "video_path", place, videos.get((key, *place)), key)
            if video is not None and isinstance(start, float) and start >= 0:
                spans[key] = VideoSpan(video, start)
        episodes.append(EpisodeSource(index, row["length"], read_texts(row.get("tasks")), table, spans))
    findings.stop_if_failed()
    cameras = drop_cameras_without_files(info.cameras, tuple(episodes), findings)
    check_counts(info, len(episodes), None, findings)
    return Layout(
        source_format="lerobot-v3.0",
        shared_files=True,
        robot=info.robot,
        fps=info.fps,
        state=info.state,
        action=info.action,
        cameras=cameras,
        tasks=tasks,
        episodes=tuple(episodes),
    )


def _tasks(folder: DatasetFolder) -> dict[int, str]:
    """Return task texts by number; a text is the table's index ("__index_level_0__") or a column "task"."""
    where = "meta/tasks.parquet"
    if not folder.has(where) and folder.has("meta/tasks.jsonl"):
        folder.findings.warn("meta/tasks.jsonl", "stands where v3.0 has meta/tasks.parquet: it is read instead")
        return read_json_tasks(folder)
    table = read_columns(folder, where, ["task_index", "task", "__index_level_0__"]).to_pydict()
    texts = table.get("task") or table.get("__index_level_0__")
    numbers = table.get("task_index")
    if not (_all(int, numbers) and _all(str, texts)):
        raise folder.findings.fail(where, "lacks the task texts or the column task_index: write the set again")
    return {number: text[:2000] for number, text in zip(numbers, texts, strict=True)}


def _all(kind: type, values: list[Any] | None) -> TypeGuard[list[Any]]:
    return values is not None and all(isinstance(value, kind) for value in values)


def _episode_rows(folder: DatasetFolder, keys: list[str]) -> list[dict[str, Any]]:
    """Return the rows of all files in `meta/episodes`, by episode number."""
    findings = folder.findings
    columns = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index"]
    columns += [f"videos/{key}/{what}" for key in keys for what in ("chunk_index", "file_index", "from_timestamp")]
    rows: dict[int, dict[str, Any]] = {}
    for name in folder.files:
        if not (name.startswith("meta/episodes/") and name.endswith(".parquet")):
            continue
        for row in read_columns(folder, name, columns).to_pylist():
            index, length = row.get("episode_index"), row.get("length")
            if not isinstance(index, int) or index < 0 or not isinstance(length, int) or length < 1:
                raise findings.fail(name, "has a row without a valid episode_index and length: write the set again")
            if index in rows:
                raise findings.fail(name, f"lists episode {index} twice: remove one of the rows")
            rows[index] = row
    if not rows:
        raise findings.fail("meta/episodes", "lists no episode: was the set finalized after recording?")
    return [rows[index] for index in sorted(rows)]


Place = tuple[int, int]
_NOWHERE = (-1, -1)


def _place(row: dict[str, Any], what: str) -> Place:
    """Return the chunk and file number that a row of `meta/episodes` states, `_NOWHERE` if it states none."""
    chunk, file = row.get(f"{what}/chunk_index"), row.get(f"{what}/file_index")
    return (chunk, file) if isinstance(chunk, int) and isinstance(file, int) else _NOWHERE


def _files_by_place(folder: DatasetFolder, keys: list[str]) -> tuple[dict[Place, str], dict[tuple[str, int, int], str]]:
    tables: dict[Place, str] = {}
    videos: dict[tuple[str, int, int], str] = {}
    for name in folder.files:
        match = _PLACE.search(name)
        if match is None:
            continue
        place = (int(match[1]), int(match[2]))
        if name.startswith("data/") and match[3] == "parquet":
            tables[place] = name
        elif name.startswith("videos/") and match[3] == "mp4":
            for key in set(keys).intersection(name.split("/")):
                videos[(key, *place)] = name
    return tables, videos


def _choose(folder: DatasetFolder, info: Info, field: str, place: Place, found: str | None, key: str) -> str | None:
    """Return a file: where the template says, else the one that was found by its chunk and file number."""
    if min(place) < 0:
        return None
    expected = fill_template(info.template(field), {"chunk_index": place[0], "file_index": place[1], "video_key": key})
    if expected is not None and folder.has(expected):
        return expected
    if found is not None:
        folder.findings.warn_often(
            "meta/info.json", f"{field} points to files that do not exist: the files were found by their numbers"
        )
    return found
