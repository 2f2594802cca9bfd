"""Write a LeRobot v3.0 data set.

In: episodes, one after the other. Out: a folder that LeRobot and our own reader understand, with the embodiment
contract beside LeRobot's metadata. Never: a folder that looks complete before `finalize`, or an episode half added.

All steps go into one parquet file and one MP4 a camera (LeRobot's file sizes are a preference, not a rule); the layout
is described in https://github.com/huggingface/lerobot, docs/source/lerobot-dataset-v3.mdx.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from joynexus.contract import Contract
from services.env.datasets.lerobot import CONTRACT_FILE
from services.env.encoding import Codec, VideoWriter, encode_png

_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_STATS_PICTURES = 20  # of an episode, evenly spread, are enough for a camera's statistics
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_PICTURE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class LeRobotWriter:
    """Writes one data set; a context manager that finalizes when its block ends well.

    Args:
        folder: where to write; it must not exist, or be empty.
        fps: steps per second.
        contract: what states, actions and pictures mean. Pictures are stored as the policy sees them, that is after the
            contract's rotation.
        video: store pictures as MP4; otherwise lossless, as PNG in the parquet file.
        codec: of the MP4 files.

    Raises:
        ValueError: if the folder has files, or fps is not positive.
    """

    def __init__(
        self, folder: Path, fps: float, contract: Contract, *, video: bool = True, codec: Codec = "h264"
    ) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"'{folder.name}' is not an empty folder: choose another place for the data set")
        if fps <= 0:
            raise ValueError(f"fps is {fps}: it must be the number of steps per second")
        self._folder, self._fps, self._contract, self._video, self._codec = folder, fps, contract, video, codec
        self._keys = {camera.name: f"observation.images.{camera.name}" for camera in contract.cameras}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._values: dict[str, list[npt.NDArray[np.generic]]] = {}
        self._steps = 0
        data = folder / _DATA.format(chunk_index=0, file_index=0)
        data.parent.mkdir(parents=True)
        self._schema = self._make_schema()
        self._table = pq.ParquetWriter(data, self._schema)
        self._videos: dict[str, VideoWriter] = {}
        for camera in contract.cameras if video else ():
            path = folder / _VIDEO.format(video_key=self._keys[camera.name], chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True)
            self._videos[camera.name] = VideoWriter(path, fps, camera.height, camera.width, codec)

    def add_episode(
        self,
        states: npt.NDArray[np.float32],
        actions: npt.NDArray[np.float32],
        images: Mapping[str, npt.NDArray[np.uint8]],
        instruction: str,
    ) -> None:
        """Append one episode of T steps.

        Args:
            states: [T, S] float32.
            actions: [T, A] float32; actions[t] was taken on states[t].
            images: [T, H, W, 3] uint8 for each camera of the contract, by name.
            instruction: task text.

        Raises:
            ValueError: if a shape, a camera or the text does not fit; nothing is written then.
        """
        self._check(states, actions, images, instruction)
        steps, index = len(states), len(self._episodes)
        task = self._tasks.setdefault(instruction, len(self._tasks))
        columns: dict[str, Any] = {
            "observation.state": np.asarray(states, np.float32),
            "action": np.asarray(actions, np.float32),
            "timestamp": (np.arange(steps) / self._fps).astype(np.float32),
            "frame_index": np.arange(steps),
            "episode_index": np.full(steps, index),
            "index": self._steps + np.arange(steps),
            "task_index": np.full(steps, task),
        }
        sample = np.unique(np.linspace(0, steps - 1, min(steps, _STATS_PICTURES)).astype(int))
        values = columns | {key: images[name][sample] for name, key in self._keys.items()}
        episode: dict[str, Any] = {
            "episode_index": index,
            "tasks": [instruction],
            "length": steps,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": self._steps,
            "dataset_to_index": self._steps + steps,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for key in self._keys.values() if self._video else ():
            episode[f"videos/{key}/chunk_index"] = episode[f"videos/{key}/file_index"] = 0
            episode[f"videos/{key}/from_timestamp"] = self._steps / self._fps
            episode[f"videos/{key}/to_timestamp"] = (self._steps + steps) / self._fps
        for key, value in values.items():
            self._values.setdefault(key, []).append(value)
            episode |= {f"stats/{key}/{name}": number for name, number in _statistics([value]).items()}
        for name, key in self._keys.items():
            if self._video:
                for picture in images[name]:
                    self._videos[name].add(picture)
            else:
                columns[key] = [{"bytes": encode_png(picture), "path": None} for picture in images[name]]
        arrays = [_arrow(columns[field.name], field.type) for field in self._schema]
        self._table.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._episodes.append(episode)
        self._steps += steps

    def _check(self, states: Any, actions: Any, images: Mapping[str, Any], instruction: str) -> None:
        contract, steps = self._contract, len(states)
        if steps == 0 or not instruction.strip():
            raise ValueError("an episode needs at least one step and an instruction")
        expected = {"states": (steps, contract.state_dim), "actions": (steps, contract.action_dim)}
        for what, value in (("states", states), ("actions", actions)):
            if value.shape != expected[what]:
                raise ValueError(
                    f"{what} have shape {value.shape}, but the contract and the length ask {expected[what]}"
                )
            if not np.isfinite(value).all():
                raise ValueError(f"{what} hold numbers that are not finite: such an episode cannot be learned from")
        if set(images) != set(self._keys):
            raise ValueError(f"pictures are of cameras {sorted(images)}, but the contract has {sorted(self._keys)}")
        for camera in contract.cameras:
            shape = (steps, camera.height, camera.width, 3)
            if images[camera.name].shape != shape or images[camera.name].dtype != np.uint8:
                raise ValueError(
                    f"pictures of '{camera.name}' have shape {images[camera.name].shape}, not {shape} uint8"
                )

    def finalize(self) -> None:
        """Write the metadata; the data set is complete afterwards. ValueError if it has no episode."""
        if not self._episodes:
            raise ValueError("a data set without episodes cannot be written: add one first")
        self._close()
        meta = self._folder / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), meta / "episodes/chunk-000/file-000.parquet")
        pq.write_table(_task_table(self._tasks), meta / "tasks.parquet")
        stats = {key: _statistics(values) for key, values in self._values.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=2))
        (self._folder / CONTRACT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self._contract)))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=2))

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0",
            "robot_type": self._contract.robot,
            "total_episodes": len(self._episodes),
            "total_frames": self._steps,
            "total_tasks": len(self._tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps == int(self._fps) else self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": _DATA,
            "video_path": _VIDEO if self._videos else None,
            "features": self._features(),
        }

    def _features(self) -> dict[str, Any]:
        contract = self._contract

        def vector(dim: int, names: tuple[str, ...]) -> dict[str, Any]:
            return {"dtype": "float32", "shape": [dim], "names": list(names) or None}

        features: dict[str, Any] = {
            "observation.state": vector(contract.state_dim, contract.state_names),
            "action": vector(contract.action_dim, contract.action_names),
        }
        for camera in contract.cameras:
            features[self._keys[camera.name]] = {
                "dtype": "video" if self._video else "image",
                "shape": [camera.height, camera.width, 3],
                "names": ["height", "width", "channels"],
            }
            if self._video:
                features[self._keys[camera.name]]["info"] = {
                    "video.height": camera.height,
                    "video.width": camera.width,
                    "video.codec": self._codec,
                    "video.pix_fmt": "yuv420p",
                    "video.is_depth_map": False,
                    "video.fps": self._fps,
                    "video.channels": 3,
                    "has_audio": False,
                }
        features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        for name in ("frame_index", "episode_index", "index", "task_index"):
            features[name] = {"dtype": "int64", "shape": [1], "names": None}
        return features

    def _make_schema(self) -> pa.Schema:
        fields = [
            ("observation.state", pa.list_(pa.float32(), self._contract.state_dim)),
            ("action", pa.list_(pa.float32(), self._contract.action_dim)),
        ]
        fields += [(key, _PICTURE_TYPE) for key in self._keys.values() if not self._video]
        fields += [("timestamp", pa.float32())]
        return pa.schema(fields + [(n, pa.int64()) for n in ("frame_index", "episode_index", "index", "task_index")])

    def _close(self) -> None:
        self._table.close()
        for writer in self._videos.values():
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()
        else:
            self._close()


def _arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=kind)
    return pa.array(values, type=kind)


def _statistics(parts: list[npt.NDArray[Any]]) -> dict[str, Any]:
    """Return LeRobot's statistics of a column: of vectors a number each, of pictures [3, 1, 1] in 0 … 1."""
    count = sum(len(part) for part in parts)
    pictures = parts[0].ndim == 4
    if pictures:
        values = np.concatenate([part.reshape(-1, 3) for part in parts]) / 255.0
    else:
        values = np.concatenate([part.reshape(len(part), -1) for part in parts]).astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {name: np.quantile(values, q, axis=0) for name, q in _QUANTILES.items()}
    shape = (3, 1, 1) if pictures else (-1,)
    return {name: number.reshape(shape).tolist() for name, number in found.items()} | {"count": [count]}


def _task_table(tasks: dict[str, int]) -> pa.Table:
    """Return the task table as pandas would write it, with the texts as index, which LeRobot relies on."""
    texts, numbers = pa.array(list(tasks), pa.string()), pa.array(list(tasks.values()), pa.int64())
    column = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    index = {"name": None, "field_name": "__index_level_0__", "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [],
        "columns": [column | {"metadata": None}, index | {"metadata": None}],
        "pandas_version": "2.2.3",
    }
    table = pa.table({"task_index": numbers, "__index_level_0__": texts})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
