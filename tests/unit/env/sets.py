"""Small LeRobot sets in the v2.0, v2.1 and v3.0 layouts, for tests to break in the ways that real sets are broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from joynexus.contract import Camera, Contract
from services.env.datasets.writer import LeRobotWriter
from services.env.encoding import encode_png, write_video

FPS = 10
STATE_DIM, ACTION_DIM = 3, 2
SIDE = 16
KEY = "observation.images.front"
CONTRACT = Contract(
    robot="arm",
    cameras=(Camera(name="front", height=SIDE, width=SIDE),),
    state_dim=STATE_DIM,
    action_dim=ACTION_DIM,
    rate_hz=FPS,
    gripper="-1_open_+1_close",
)


def states(number: int, length: int) -> np.ndarray:
    return (number + np.arange(length)[:, None] / 100 + np.arange(STATE_DIM) / 10).astype(np.float32)


def actions(number: int, length: int) -> np.ndarray:
    return (-number - np.arange(length)[:, None] / 100 + np.arange(ACTION_DIM) / 10).astype(np.float32)


def pictures(number: int, length: int, side: int = SIDE) -> np.ndarray:
    """Each step's grey level tells episode and step, far enough apart to survive a video codec."""
    level = 20 + 60 * (number % 3) + 8 * (np.arange(length) % 8)
    return np.broadcast_to(level[:, None, None, None], (length, side, side, 3)).astype(np.uint8)


def write_v2(
    folder: Path,
    *,
    version: str = "v2.0",
    lengths: tuple[int, ...] = (6, 4, 5),
    video: bool = True,
    edit_table: Callable[[int, dict[str, Any]], None] = lambda number, columns: None,
) -> Path:
    """Write a sound v2 set; `edit_table(number, columns)` may break an episode's columns first."""
    camera = {"dtype": "video" if video else "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channel"]}
    info = {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_videos": len(lengths) if video else 0,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            "observation.state": {"dtype": "float32", "shape": [STATE_DIM], "names": ["x", "y", "z"]},
            "action": {"dtype": "float32", "shape": [ACTION_DIM], "names": {"motors": ["turn", "grip"]}},
            KEY: camera,
        },
    }
    for name in ("meta", "data/chunk-000", f"videos/chunk-000/{KEY}" if video else "meta"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    episodes, start = [], 0
    for number, length in enumerate(lengths):
        columns: dict[str, Any] = {
            "observation.state": pa.array(states(number, length).tolist(), pa.list_(pa.float32(), STATE_DIM)),
            "action": pa.array(actions(number, length).tolist(), pa.list_(pa.float32(), ACTION_DIM)),
            "timestamp": pa.array((np.arange(length) / FPS).astype(np.float32)),
            "frame_index": pa.array(np.arange(length)),
            "episode_index": pa.array(np.full(length, number)),
            "index": pa.array(start + np.arange(length)),
            "task_index": pa.array(np.full(length, number % 2)),
        }
        if video:
            write_video(folder / f"videos/chunk-000/{KEY}/episode_{number:06d}.mp4", pictures(number, length), FPS)
        else:
            columns[KEY] = pa.array([{"bytes": encode_png(p), "path": None} for p in pictures(number, length)])
        edit_table(number, columns)
        pq.write_table(pa.table(columns), folder / f"data/chunk-000/episode_{number:06d}.parquet")
        episodes.append({"episode_index": number, "tasks": [f"task {number % 2}"], "length": length})
        start += length
    (folder / "meta/info.json").write_text(json.dumps(info))
    write_lines(folder / "meta/episodes.jsonl", episodes)
    write_lines(folder / "meta/tasks.jsonl", [{"task_index": k, "task": f"task {k}"} for k in range(2)])
    return folder


def write_v3(folder: Path, *, lengths: tuple[int, ...] = (6, 4, 5), video: bool = True, **options: Any) -> Path:
    with LeRobotWriter(folder, FPS, CONTRACT, video=video, **options) as writer:
        for number, length in enumerate(lengths):
            images = {"front": pictures(number, length)}
            writer.add_episode(states(number, length), actions(number, length), images, f"task {number % 2}")
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_parquet(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    table = pq.read_table(path)
    columns = {name: table[name] for name in table.column_names}
    edit(columns)
    pq.write_table(pa.table(columns), path)
