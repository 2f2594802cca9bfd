"""Read demonstrations in HDF5 as LIBERO and robomimic write them: `data/demo_i` with `actions` and `obs/<key>`.

In: a folder with such files at its top, one or several. Out: a `Scan`. Never: a picture whose orientation is a guess,
or an observation paired with an action that was taken before it.

Layouts: https://github.com/Lifelong-Robot-Learning/LIBERO, `scripts/create_dataset.py`;
https://robomimic.github.io/docs/datasets/overview.html. LIBERO's pictures are stored as OpenGL has them, from the
bottom up: they are turned by half a circle here, and the contract says so, as for those that the simulator draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract
from services.env.datasets.folder import DatasetFolder
from services.env.datasets.hdf5_file import ArrayInfo, Hdf5File
from services.env.datasets.layout import CAMERA_NAME
from services.env.datasets.pictures import MAX_PIXELS, Picture, resize
from services.env.datasets.scan import Scan, make_scan
from services.env.datasets.tables import EpisodeRows, Floats
from services.env.simulators import libero_tasks

_SUFFIXES = (".hdf5", ".h5")
_LIBERO_CAMERAS = {"agentview_rgb": "agentview", "eye_in_hand_rgb": "robot0_eye_in_hand"}
_LIBERO_HZ = 20.0
# State vectors that are understood: the convention of their rotation, and the observations they are made of.
_STATES = (
    ("axis_angle", ("ee_pos", "ee_ori", "gripper_states")),
    ("axis_angle", ("ee_states", "gripper_states")),
    ("quat_xyzw", ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")),
)


class _Source(NamedTuple):
    """What the attributes of a file say of all its demonstrations."""

    libero: bool
    instruction: str
    fps: float
    robot: str
    pose_control: bool
    episode_limit: int


class _Demo(NamedTuple):
    """One demonstration: its group, its length, and the key of each camera's pictures."""

    file: Hdf5File
    path: str
    steps: int
    keys: dict[str, str]


def hdf5_files(names: list[str]) -> list[str]:
    """Return the HDF5 files at the top of a folder, in order."""
    return [name for name in names if "/" not in name and name.endswith(_SUFFIXES)]


def scan_hdf5(folder: DatasetFolder, alive: Callable[[], None]) -> Scan:
    """Read a set, all but its pictures; see `check.scan_dataset`."""
    findings = folder.findings
    demos: list[_Demo] = []
    rows: list[EpisodeRows] = []
    instructions: list[str] = []
    contracts: list[Contract] = []
    source = None
    for name in hdf5_files(folder.files):
        file = Hdf5File(folder, name)
        source = _read_source(file)
        for path in sorted((f"data/{group}" for group in file.groups("data")), key=_by_number):
            alive()
            where = f"{name}, {path}"
            numbers, late, rotation = _read_numbers(file, path, source)
            if numbers is None:
                continue
            keys, cameras = _cameras(file, path, source, len(numbers.state) + late)
            contracts.append(_contract(source, cameras, numbers, rotation))
            if contracts[-1] != contracts[0]:
                findings.error(
                    where, "has another robot, rate, state or cameras than the first demonstration: split it"
                )
            demos.append(_Demo(file, path, len(numbers.state), keys))
            rows.append(numbers)
            instructions.append(source.instruction)
    findings.stop_if_failed()
    if source is None or not demos:
        raise findings.fail(folder.root.name, "has no demonstration: each is a group 'data/demo_0', 'data/demo_1' …")
    if source.libero:
        _check_gripper(rows, folder)

    def pictures(number: int, camera: Camera) -> Iterator[Picture]:
        demo, size = demos[number], (camera.height, camera.width)
        stored = demo.file.read_parts(f"{demo.path}/obs", demo.keys[camera.name], demo.steps)
        for picture in (picture for part in stored for picture in part):
            yield resize(np.ascontiguousarray(np.rot90(picture, k=-camera.rotation_deg // 90)), size)

    kind = "libero-hdf5" if source.libero else "robomimic-hdf5"
    return make_scan(folder, kind, source.fps, contracts[0], tuple(rows), tuple(instructions), pictures)


def _by_number(name: str) -> tuple[str, int]:
    """Sort `demo_10` behind `demo_2`."""
    match = re.fullmatch(r"(.*?)(\d{1,9})", name)
    return (match[1], int(match[2])) if match else (name, -1)


def _read_source(file: Hdf5File) -> _Source:
    problem, env = file.json("data", "problem_info"), file.json("data", "env_args")
    details = env.get("env_kwargs")
    details = details if isinstance(details, dict) else {}
    libero = bool(problem)
    convention = file.text("data", "macros_image_convention")
    if libero and convention not in ("", "opengl"):
        raise file.findings.fail(
            file.name, f"its pictures follow the convention '{convention[:40]}': render them with robosuite's 'opengl'"
        )
    told = (problem.get("language_instruction"), file.text("data", "language_instruction"), env.get("lang"))
    instruction = next((text.strip() for text in map(_text, told) if text.strip()), "")
    if not instruction:
        file.findings.error(file.name, "has no task text: add the attribute 'language_instruction' to the group 'data'")
    rate = details.get("control_freq")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate <= 10_000:
        file.findings.warn_often(
            file.name, f"env_args states no control_freq: {_LIBERO_HZ:g} steps per second are taken"
        )
        rate = _LIBERO_HZ
    robots = details.get("robots")
    robot = robots[0] if isinstance(robots, list) and robots else robots
    controller = details.get("controller_configs")
    kind = controller.get("type") if isinstance(controller, dict) else None
    suite = PurePosixPath(file.text("data", "bddl_file_name")).parent.name
    return _Source(
        libero=libero,
        instruction=instruction[:2000],
        fps=float(rate),
        robot=_text(robot)[:64].lower() or ("panda" if libero else "unspecified"),
        pose_control=kind == "OSC_POSE" or (libero and kind is None),
        episode_limit=libero_tasks.EPISODE_LIMITS.get(suite, 0),
    )


def _text(value: Any) -> str:
    """Return text, also where LIBERO's own files have it as a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value.strip('" ') if isinstance(value, str) else ""


def _read_numbers(file: Hdf5File, path: str, source: _Source) -> tuple[EpisodeRows | None, int, str]:
    """Return a demonstration's rows (None after noting an error), whether they were late, and the state's rotation."""
    findings, where = file.findings, f"{file.name}, {path}"
    top, seen = file.arrays(path), file.arrays(f"{path}/obs")
    found = next(((rotation, keys) for rotation, keys in _STATES if set(keys) <= set(seen)), None)
    if "actions" not in top or found is None:
        lacks = "'actions'" if "actions" not in top else "a state in 'obs' (ee_pos, ee_ori and gripper_states)"
        findings.error(where, f"lacks {lacks}: replay it in its simulator, writing observations")
        return None, 0, ""
    rotation, keys = found
    steps = top["actions"].shape[0]
    shape = top["actions"].shape
    wrong = next((key for key in keys if len(seen[key].shape) != 2 or seen[key].shape[0] != steps), None)
    if wrong:
        findings.error(
            where, f"'obs/{wrong}' has shape {seen[wrong].shape} but 'actions' {shape}: one row a step is needed"
        )
        return None, 0, ""
    if len(shape) != 2 or 0 in shape:
        findings.error(where, f"'actions' has shape {shape}: one row of numbers a step is needed")
        return None, 0, ""
    declared = file.number(path, "num_samples")
    if declared not in (None, steps):
        findings.warn_often(where, f"num_samples says {declared} but there are {steps}: the rows count")
    late = _late(file, path, top, seen)
    if late:
        findings.warn_often(
            where, "each observation was seen after the action of its row: it is paired with the next row's action"
        )
    state = _finite(file, where, "obs", np.concatenate([file.read(f"{path}/obs", key) for key in keys], axis=1))
    action = _finite(file, where, "actions", file.read(path, "actions"))
    if state is None or action is None:
        return None, 0, ""
    state, action = state[: steps - late], action[late:]
    return EpisodeRows(state, action, np.arange(len(state)) / source.fps, None, 0), late, rotation


def _late(file: Hdf5File, path: str, top: dict[str, ArrayInfo], seen: dict[str, ArrayInfo]) -> int:
    """Return 1 if the observations stand one row late: LIBERO's `create_dataset.py` writes them after each step.

    The first numbers of a flattened simulation state, behind the time, are the arm's joints, which tell.
    """
    steps = top["actions"].shape[0]
    joints, states = seen.get("joint_states"), top.get("states")
    if joints is None or states is None or joints.shape != (steps, 7) or states.shape[0] != steps or steps < 3:
        return 0
    if len(states.shape) != 2 or states.shape[1] < 8:
        return 0
    observed = file.read(f"{path}/obs", "joint_states").astype(np.float64)
    simulated = file.read(path, "states")[:, 1:8].astype(np.float64)
    if not (np.isfinite(observed).all() and np.isfinite(simulated).all()):
        return 0
    now, next_ = np.abs(observed - simulated).mean(), np.abs(observed[:-1] - simulated[1:]).mean()
    return int(next_ < 0.5 * now)


def _finite(file: Hdf5File, where: str, what: str, values: npt.NDArray[Any]) -> Floats | None:
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused below
        numbers: Floats = values.astype(np.float32)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        step, element = bad[0].tolist()
        file.findings.error(
            where, f"'{what}' number {element} is {values[step, element]} at step {step}: repair or remove it"
        )
        return None
    return numbers


def _cameras(file: Hdf5File, path: str, source: _Source, steps: int) -> tuple[dict[str, str], tuple[Camera, ...]]:
    """Return the key of each camera's pictures by its name, and the cameras, sorted by name."""
    findings, where = file.findings, f"{file.name}, {path}"
    keys: dict[str, str] = {}
    cameras = []
    for key, (shape, dtype) in sorted(file.arrays(f"{path}/obs").items()):
        if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8:
            continue
        name = _LIBERO_CAMERAS.get(key) or key.removesuffix("_image").removesuffix("_rgb")
        if not CAMERA_NAME.fullmatch(name) or name in keys:
            findings.error(where, f"'obs/{key[:80]}' gives no camera a name of its own: rename it")
        elif shape[0] != steps:
            findings.error(
                where, f"'obs/{key[:80]}' has {shape[0]} pictures but there are {steps} steps: record it again"
            )
        elif not 0 < shape[1] * shape[2] <= MAX_PIXELS:
            findings.error(where, f"'obs/{key[:80]}' has pictures of {shape[2]}x{shape[1]} pixels: record it again")
        else:
            keys[name] = key
            cameras.append(Camera(name=name, height=shape[1], width=shape[2], rotation_deg=180 if source.libero else 0))
    return keys, tuple(sorted(cameras, key=lambda camera: camera.name))


def _contract(source: _Source, cameras: tuple[Camera, ...], rows: EpisodeRows, rotation: str) -> Contract:
    """Return LIBERO's contract where the numbers are LIBERO's, else what the file tells."""
    usual = libero_tasks.embodiment(cameras, source.episode_limit)
    state_dim, action_dim = rows.state.shape[1], rows.action.shape[1]
    same = (usual.state_dim, usual.action_dim, usual.robot, usual.rotation)
    if source.libero and source.pose_control and same == (state_dim, action_dim, source.robot, rotation):
        return msgspec.structs.replace(usual, rate_hz=source.fps)
    return Contract(
        robot=source.robot,
        cameras=cameras,
        state_dim=state_dim,
        action_dim=action_dim,
        control_mode="delta_ee_pose" if source.pose_control and action_dim == usual.action_dim else "unspecified",
        rotation=rotation,
        rate_hz=source.fps,
    )


def _check_gripper(rows: list[EpisodeRows], folder: DatasetFolder) -> None:
    """Refuse a set whose gripper runs from 0 to 1, as in sets that were converted for other models."""
    grips = np.concatenate([numbers.action[:, -1] for numbers in rows])
    if grips.min() >= 0 and (grips == 0).any():
        folder.findings.error(
            "actions",
            "the gripper's numbers run from 0 to 1: LIBERO opens it with -1 and closes it with +1, convert them",
        )
