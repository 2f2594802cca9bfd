"""Write demonstrations in HDF5 as LIBERO's own `create_dataset.py` lays them out.

In: episodes, one after the other. Out: one file `<task>_demo.hdf5` that LIBERO's, robomimic's and our own reader
understand. Never: a picture turned away from how LIBERO stores it (from the bottom up), or a file that looks complete
before `finalize`.

One thing differs from LIBERO's script, as in the sets that others have made anew since: row t of the observations was
seen *before* action t.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import h5py
import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract

_KEYS = {"agentview": "agentview_rgb", "robot0_eye_in_hand": "eye_in_hand_rgb"}
_CHUNK_ROWS = 16


class LiberoTask(NamedTuple):
    """What a file says of its task: suite, LIBERO's name of it, its text, and the content of its BDDL file."""

    suite: str
    name: str
    problem: str
    instruction: str
    description: str


class LiberoEpisode(NamedTuple):
    """One demonstration of T steps.

    Attributes:
        states: [T, 8] float32, as in LIBERO's contract.
        actions: [T, 7] float32.
        images: [T, H, W, 3] uint8 for each camera, turned as the contract says.
        simulation: [T, D] float64, flattened MuJoCo states, each before its action.
        joints: [T, 7] float64 rad.
        quaternions: [T, 4] float64, of the hand, x y z w.
        model: MuJoCo's XML.
    """

    states: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    images: tuple[npt.NDArray[np.uint8], ...]
    simulation: npt.NDArray[np.float64]
    joints: npt.NDArray[np.float64]
    quaternions: npt.NDArray[np.float64]
    model: str


class LiberoWriter:
    """Writes one file; a context manager that finalizes when its block ends well.

    Args:
        folder: where to write; made if it does not exist.
        contract: cameras, their rotation, and the rate.
        task: whose demonstrations they are.

    Raises:
        ValueError: if the file exists already, or a camera is none of LIBERO's.
    """

    def __init__(self, folder: Path, contract: Contract, task: LiberoTask) -> None:
        self._path = folder / f"{task.name}_demo.hdf5"
        self._part = self._path.with_suffix(".part")
        if self._path.exists():
            raise ValueError(f"'{self._path.name}' exists already: choose another place for the data set")
        unknown = [camera.name for camera in contract.cameras if camera.name not in _KEYS]
        if unknown:
            raise ValueError(f"camera '{unknown[0]}' is none of LIBERO's: they are {' and '.join(_KEYS)}")
        folder.mkdir(parents=True, exist_ok=True)
        self._contract, self._episodes, self._steps = contract, 0, 0
        self._file = h5py.File(self._part, "w")
        self._data = self._file.create_group("data")
        self._describe(task)

    def add_episode(self, episode: LiberoEpisode) -> None:
        """Append one demonstration; ValueError if its arrays do not fit each other, nothing is written then."""
        steps = len(episode.actions)
        rows = {len(episode.states), len(episode.simulation), len(episode.joints), len(episode.quaternions)}
        rows |= {len(pictures) for pictures in episode.images}
        if steps == 0 or rows != {steps}:
            raise ValueError(f"an episode of {steps} actions has arrays of {sorted(rows)} rows: one a step is needed")
        if len(episode.images) != len(self._contract.cameras):
            raise ValueError(f"pictures of {len(episode.images)} cameras do not fit the contract's")
        position, rotation, fingers = np.split(episode.states.astype(np.float64), [3, 6], axis=1)
        last = np.zeros(steps, np.uint8)
        last[-1] = 1
        group = self._data.create_group(f"demo_{self._episodes}")
        columns = {
            "actions": episode.actions.astype(np.float64),
            "states": episode.simulation,
            "robot_states": np.concatenate([fingers, position, episode.quaternions], axis=1),
            "rewards": last,
            "dones": last,
            "obs/ee_pos": position,
            "obs/ee_ori": rotation,
            "obs/ee_states": np.concatenate([position, rotation], axis=1),
            "obs/gripper_states": fingers,
            "obs/joint_states": episode.joints,
        }
        for name, values in columns.items():
            group.create_dataset(name, data=values)
        for camera, pictures in zip(self._contract.cameras, episode.images, strict=True):
            stored = np.rot90(pictures, k=camera.rotation_deg // 90, axes=(1, 2))
            chunks = (min(_CHUNK_ROWS, steps), *stored.shape[1:])
            group.create_dataset(f"obs/{_KEYS[camera.name]}", data=stored, chunks=chunks, compression="gzip")
        group.attrs["num_samples"] = steps
        group.attrs["init_state"] = episode.simulation[0]
        group.attrs["model_file"] = episode.model
        self._episodes += 1
        self._steps += steps

    def finalize(self) -> None:
        """Complete the file; ValueError if it has no episode."""
        if not self._episodes:
            raise ValueError("a data set without episodes cannot be written: add one first")
        self._data.attrs["num_demos"] = self._episodes
        self._data.attrs["total"] = self._steps
        self._file.close()
        self._part.rename(self._path)

    def _describe(self, task: LiberoTask) -> None:
        cameras: tuple[Camera, ...] = self._contract.cameras
        kwargs = {
            "robots": ["Panda"],
            "controller_configs": {"type": "OSC_POSE"},
            "control_freq": int(self._contract.rate_hz),
            "camera_names": [camera.name for camera in cameras],
            "camera_heights": [camera.height for camera in cameras],
            "camera_widths": [camera.width for camera in cameras],
            "ignore_done": True,
        }
        file = f"libero/libero/bddl_files/{task.suite}/{task.name}.bddl"
        problem = {"problem_name": task.problem, "domain_name": "robosuite", "language_instruction": task.instruction}
        env = {
            "type": 1,
            "env_name": task.problem,
            "problem_name": task.problem,
            "bddl_file": file,
            "env_kwargs": kwargs,
        }
        self._data.attrs["env_name"] = task.problem
        self._data.attrs["problem_info"] = json.dumps(problem)
        self._data.attrs["macros_image_convention"] = "opengl"
        self._data.attrs["bddl_file_name"] = file
        self._data.attrs["bddl_file_content"] = task.description
        self._data.attrs["env_args"] = json.dumps(env)
        self._data.attrs["tag"] = "libero-v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()
        else:
            self._file.close()
            self._part.unlink()
