"""LeRobot v2.0 and v2.1: one parquet and one MP4 an episode, named by templates that real sets get wrong.

In: the JSON lines of `meta` and the names of the files that are there. Out: `Layout`. Never: a path that only a
template claims: files are found by their episode number, and where the template disagrees the report says so.
"""

from __future__ import annotations

import re
from typing import Any

from services.env.datasets.folder import DatasetFolder, fill_template
from services.env.datasets.layout import (
    EpisodeSource,
    Info,
    Layout,
    VideoSpan,
    check_counts,
    drop_cameras_without_files,
)

_NUMBERED = re.compile(r"episode_(\d{1,12})\.(parquet|mp4)")


def read_layout(folder: DatasetFolder, info: Info) -> Layout:
    """Return what a v2.0 or v2.1 folder holds; DatasetError if that cannot be told."""
    findings = folder.findings
    tasks = read_tasks(folder)
    rows = _episode_rows(folder)
    tables: dict[int, list[str]] = {}
    videos: dict[tuple[str, int], list[str]] = {}
    keys = {camera.key for camera in info.cameras if camera.video}
    for name in folder.files:
        top, *_, last = name.split("/")
        if match := _NUMBERED.fullmatch(last):
            number = int(match[1])
            if top == "data" and match[2] == "parquet":
                tables.setdefault(number, []).append(name)
            elif top == "videos" and match[2] == "mp4":
                for key in keys.intersection(name.split("/")):
                    videos.setdefault((key, number), []).append(name)
    episodes = []
    for index in sorted(rows):
        table = _choose(folder, info, "data_path", index, tables.get(index, []), "")
        if table is None:
            findings.error(f"episode {index}", "its parquet file is missing: copy it, or remove the episode")
            continue
        spans = {}
        for key in sorted(keys):
            video = _choose(folder, info, "video_path", index, videos.get((key, index), []), key)
            if video is not None:
                spans[key] = VideoSpan(video, None)
        length, names = rows[index]
        episodes.append(EpisodeSource(index, length, names, table, spans))
    findings.stop_if_failed()
    for index in sorted(set(tables) - set(rows)):
        findings.warn(tables[index][0], "belongs to no episode of meta/episodes.jsonl: it is left out")
    cameras = drop_cameras_without_files(info.cameras, tuple(episodes), findings)
    check_counts(info, len(episodes), sum(len(found) for found in videos.values()), findings)
    return Layout(
        source_format=f"lerobot-{info.version}",
        shared_files=False,
        robot=info.robot,
        fps=info.fps,
        state=info.state,
        action=info.action,
        cameras=cameras,
        tasks=tasks,
        episodes=tuple(episodes),
    )


def read_tasks(folder: DatasetFolder) -> dict[int, str]:
    """Return task texts by number from `meta/tasks.jsonl`."""
    tasks = {}
    for row in folder.json_lines("meta/tasks.jsonl"):
        number, text = row.get("task_index"), row.get("task")
        if not isinstance(number, int) or not isinstance(text, str):
            raise folder.findings.fail("meta/tasks.jsonl", f"has a row without task_index and task: {str(row)[:100]}")
        tasks[number] = text[:2000]
    return tasks


def _episode_rows(folder: DatasetFolder) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Return (length, tasks) by episode number, whatever the order of the lines."""
    where, findings = "meta/episodes.jsonl", folder.findings
    rows: dict[int, tuple[int, tuple[str, ...]]] = {}
    for row in folder.json_lines(where):
        index, length = row.get("episode_index"), row.get("length")
        if not isinstance(index, int) or index < 0 or not isinstance(length, int) or length < 1:
            raise findings.fail(where, f"has a row without a valid episode_index and length: {str(row)[:100]}")
        if index in rows:
            raise findings.fail(where, f"lists episode {index} twice: remove one of the lines")
        rows[index] = (length, read_texts(row.get("tasks")))
    if not rows:
        raise findings.fail(where, "lists no episode: there is nothing to train on")
    if list(rows) != sorted(rows):
        findings.warn(where, "does not list the episodes in the order of their numbers: they are read in that order")
    if sorted(rows) != list(range(len(rows))):
        findings.warn(where, "leaves out some episode numbers: the episodes that are there are read in order")
    return rows


def read_texts(value: Any) -> tuple[str, ...]:
    """Return the task texts of an episode, as far as they are any."""
    return tuple(text[:2000] for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _choose(folder: DatasetFolder, info: Info, field: str, index: int, found: list[str], key: str) -> str | None:
    """Return an episode's file: where the template says, else the one that was found by its number."""
    size = info.raw.get("chunks_size")
    chunk = index // size if isinstance(size, int) and size > 0 else 0
    expected = fill_template(info.template(field), {"episode_chunk": chunk, "episode_index": index, "video_key": key})
    if expected is not None and folder.has(expected):
        return expected
    if len(found) > 1:
        where = f"episode {index}"
        raise folder.findings.fail(where, f"has several files ({found[0]}, {found[1]}): remove all but one")
    if found:
        folder.findings.warn_often(
            "meta/info.json", f"{field} points to files that do not exist: the files were found by their numbers"
        )
        return found[0]
    return None
