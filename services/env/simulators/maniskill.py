"""ManiSkill 3 (SAPIEN and PhysX): https://github.com/haosulab/ManiSkill.

In: seeds and actions. Out: its state, with what only a simulator knows in it if the policy sees no picture; pictures,
rewards, success. Never: a picture drawn by a step, a question on the terminal, or an episode that depends on those
before it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract
from joynexus.simulation.interface import (
    Picture,
    SimObservation,
    SimulatorError,
    SimulatorOptions,
    StepResult,
    check_chunk,
)
from joynexus.simulation.process import Recycling
from services.env.simulators.family import Family
from services.env.simulators.maniskill_driver import choose_driver, missing_driver
from services.env.simulators.maniskill_tasks import EE_DELTA_POSE, FAMILY, NO_TASKS, TASKS

_INSTALL = "run `make install-simulators`, or pip install 'joynexus[maniskill]'"
_VIDEO_SIDE = 256
_EE_NAMES = ("dx", "dy", "dz", "rx", "ry", "rz")
_POSE_NAMES = ("x", "y", "z", "qw", "qx", "qy", "qz")
# ManiSkill's controller turns by euler angles about the axes of the robot's base and multiplies them by its *lower*
# limit, -0.1 rad: an action of +1 turns by -0.1 rad. Policies of other simulators turn the wrong way here.
_EE_ROTATION = "action:-0.1*euler_xyz_base,state:quat_wxyz"


class ManiSkillFamily(Family):
    """The tasks of the table, of which those run that need no download."""

    name = FAMILY
    example = "PickCube-v1"
    preload = ("mani_skill.envs",)
    recycling = Recycling(episodes=500, memory_mib=1024, handles=64)
    packages = ("mani-skill", "sapien", "torch")

    def tasks(self) -> tuple[str, ...]:
        """Return every name."""
        return tuple(sorted(TASKS))

    def check(self, task: str) -> None:
        """Refuse also ManiSkill's scenes, in which there is nothing to do."""
        if task in NO_TASKS:
            raise ValueError(f"{FAMILY}/{task} {NO_TASKS[task]}: nothing can succeed in it, choose a task")
        super().check(task)

    def missing(self) -> str:
        """Say whether ManiSkill and a Vulkan driver are installed: it needs one for states too."""
        if find_spec("mani_skill") is None:
            return f"ManiSkill is not installed: {_INSTALL}"
        return missing_driver()

    def prepare(self) -> None:
        """Choose the driver, and one thread a process."""
        choose_driver()
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")

    def renderer(self) -> str:
        """Return where SAPIEN draws."""
        backend = choose_driver()
        return f"vulkan {backend}" if backend else ""

    def make(self, task: str, options: SimulatorOptions) -> ManiSkill:
        """Make an environment; see `Family`."""
        return ManiSkill(task, options)


class ManiSkill:
    """One environment; see `Simulator`.

    With cameras the state is what a robot can measure and what it is told (ManiSkill's observation mode `rgb`);
    without, the poses of all things are in it too (`state`).

    Args:
        task: name such as `PickCube-v1`.
        options: cameras, episode limit, whether success ends an episode.

    Raises:
        ValueError: if the task has no such camera, or for an episode limit below 0.
        SimulatorError: if a package, the driver or assets are missing.
    """

    def __init__(self, task: str, options: SimulatorOptions) -> None:
        self._task, self._end_at_success = TASKS[task], options.end_at_success
        self.instruction = self._task.instruction
        for camera in options.cameras or ():
            if camera.name not in self._task.cameras:
                raise ValueError(
                    f"{task} has no camera '{camera.name}': use {' or '.join(self._task.cameras) or 'none'}"
                )
        blind = not (self._task.cameras if options.cameras is None else options.cameras)
        sizes = {camera.name: _size(camera) for camera in options.cameras or ()}
        self._env = env = _make(task, "state_dict" if blind else "rgb", sizes)
        env._get_obs_sensor_data = lambda *_, **__: {}  # steps draw nothing, …
        env.get_sensor_params = dict  # … and do not tell where cameras stand
        own = tuple(Camera(name=n, height=s.config.height, width=s.config.width) for n, s in env._sensors.items())
        cameras = own if options.cameras is None else options.cameras
        self.contract = self._contract(cameras, options.episode_limit or self._task.limit)
        self._low, self._high = (np.array(limits, np.float32) for limits in self._limits())
        self._video: tuple[Any, Any] | None = None
        self._steps, self._done = 0, True

    @property
    def environment(self) -> Any:
        """ManiSkill's own, for experts, which may know all."""
        return self._env

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin the episode of a seed (0 to 2**32 - 1)."""
        # In a new scene, which takes half a second: PhysX remembers contacts of earlier episodes in an old one.
        raw, _ = self._env.reset(seed=seed, options={"reconfigure": True})
        self._steps, self._done = 0, False
        return self._observe(raw, render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, A] until they or the episode end."""
        check_chunk(actions, self.contract.action_dim, self._done)
        rewards: list[float] = []
        success, failed, frames, raw = False, False, [], None
        for action in np.clip(actions, self._low, self._high):
            raw, reward, _, _, info = self._env.step(self._split(action))
            rewards.append(float(reward))
            self._steps += 1
            success = success or bool(info.get("success", False))
            failed = bool(info.get("fail", False))
            terminated = failed or (success and self._end_at_success)
            self._done = terminated or self._steps >= self.contract.episode_limit
            if record and self.contract.cameras:
                frames.append(self._draw_frame())
            if self._done:
                break
        observation = self._observe(raw, final if self._done else render)
        paid = np.array(rewards, np.float32)
        return StepResult(observation, paid, success, self._done, terminated, tuple(frames))

    def close(self) -> None:
        """Free the scene; what Vulkan holds lives as long as the process."""
        self._env.close()

    def _observe(self, raw: Any, render: bool) -> SimObservation:
        state = np.concatenate([values for _, values in _leaves(raw)])
        if not (render and self.contract.cameras):
            return SimObservation(state, ())
        pictures = self._draw([self._env._sensors[camera.name] for camera in self.contract.cameras])
        views = zip(pictures, self.contract.cameras, strict=True)
        return SimObservation(state, tuple(_turn(picture, camera) for picture, camera in views))

    def _draw(self, sensors: Sequence[Any]) -> list[Picture]:
        """Draw what these sensors see now, without the marks that ManiSkill hides from policies."""
        for thing in self._env._hidden_objects:
            thing.hide_visual()
        self._env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        for sensor in sensors:
            sensor.capture()
        colours = {"rgb": True, "depth": False, "position": False, "segmentation": False}
        return [sensor.get_obs(**colours)["rgb"][0].cpu().numpy() for sensor in sensors]

    def _draw_frame(self) -> Picture:
        """Draw the first camera larger, with a sensor that is made when it is first asked for in a scene."""
        env, first = self._env, self.contract.cameras[0]
        if self._video is None or self._video[0] is not env.scene:
            from mani_skill.sensors.camera import Camera as Sensor

            sensor = env._sensors[first.name]
            scale = _VIDEO_SIDE / max(sensor.config.height, sensor.config.width) / 2  # video wants even sides
            height, width = (2 * round(side * scale) for side in (sensor.config.height, sensor.config.width))
            config = dataclasses.replace(
                sensor.config, uid="video", height=height, width=width, mount=sensor.entity, entity_uid=None
            )
            self._video = env.scene, Sensor(config, env.scene)
        (picture,) = self._draw([self._video[1]])
        return _turn(picture, first)

    def _split(self, action: npt.NDArray[np.float32]) -> Any:
        """Return an action as ManiSkill takes it: by robot where there are several."""
        space = self._env.single_action_space
        if not hasattr(space, "spaces"):
            return action
        parts, start = {}, 0
        for robot, part in space.spaces.items():
            parts[robot] = action[None, start : start + part.shape[0]]
            start += part.shape[0]
        return parts

    def _limits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        space = self._env.single_action_space
        parts = list(space.spaces.values()) if hasattr(space, "spaces") else [space]
        low, high = (np.concatenate([getattr(part, side) for part in parts]).tolist() for side in ("low", "high"))
        return tuple(low), tuple(high)

    def _contract(self, cameras: tuple[Camera, ...], limit: int) -> Contract:
        if limit < 1:
            raise ValueError(f"episode_limit is {limit}: it is a number of steps, or 0 for ManiSkill's own")
        env = self._env
        raw = env.get_obs()
        leaves, (low, high) = list(_leaves(raw)), self._limits()
        robots = getattr(env.agent, "agents", [env.agent])
        names = tuple(name for robot in robots for name in _action_names(robot))
        return Contract(
            robot="+".join(robot.uid for robot in robots),
            cameras=cameras,
            state_dim=sum(len(values) for _, values in leaves),
            action_dim=len(low),
            state_names=tuple(name for key, values in leaves for name in _names(key, len(values))),
            action_names=names,
            control_mode=robots[0].control_mode,
            gripper="-1_close_+1_open" if any(name.startswith("gripper") for name in names) else "none",
            rotation=_EE_ROTATION if robots[0].control_mode == EE_DELTA_POSE else "state:quat_wxyz",
            action_low=low,
            action_high=high,
            rate_hz=float(env.control_freq),
            episode_limit=limit,
            rendering=("shader=minimal", "shadows=off") if cameras else (),
        )


def _make(task: str, mode: str, sizes: dict[str, dict[str, int]]) -> Any:
    """Make ManiSkill's environment; SimulatorError says what it lacks."""
    entry = TASKS[task]
    for package in entry.packages:
        if find_spec(package) is None:
            raise SimulatorError(f"{task} needs the Python package {package}: pip install {package}")
    backend = choose_driver()
    import mani_skill.envs  # noqa: F401 (registers the tasks)
    from mani_skill import logger
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    logger.setLevel("ERROR")  # it warns of every thing that is placed later
    absent = [name for name in entry.assets if not _downloaded(assets, name)]
    if absent:
        raise SimulatorError(
            f"{task} needs assets that ManiSkill downloads: on the machines of env workers run "
            + " and ".join(f"python -m mani_skill.utils.download_asset {name}" for name in absent)
        )
    try:
        return REGISTERED_ENVS[task].make(
            num_envs=1,
            obs_mode=mode,
            reward_mode=entry.reward,
            control_mode=entry.control or None,
            sim_backend="physx_cpu",  # the one that gives the same episode for the same seed, and needs no GPU
            render_backend=backend,
            sensor_configs=sizes,
        )
    except RuntimeError as error:  # SAPIEN's, for a driver that is there and does not do
        if any(word in str(error) for word in ("vk::", "rendering device", "physical device")):
            raise SimulatorError(
                f"ManiSkill cannot use this machine's Vulkan driver ({error}): run `make system-packages` as root, "
                "or name another driver's manifest in VK_DRIVER_FILES"
            ) from error
        raise


def _downloaded(assets: Any, name: str) -> bool:
    sources = assets.expand_data_group_into_individual_data_source_ids(name) if name in assets.DATA_GROUPS else [name]
    return all(assets.is_data_source_downloaded(source) for source in sources)


def _size(camera: Camera) -> dict[str, int]:
    if not (1 <= camera.height <= 1024 and 1 <= camera.width <= 1024):
        raise ValueError(f"camera '{camera.name}' asks for {camera.width}x{camera.height} pixels: 1 to 1024 a side")
    turned = camera.rotation_deg in (90, 270)
    return {"height": camera.width if turned else camera.height, "width": camera.height if turned else camera.width}


def _turn(picture: Picture, camera: Camera) -> Picture:
    return np.ascontiguousarray(np.rot90(picture, k=-camera.rotation_deg // 90))


def _leaves(raw: Any, path: str = "") -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield what is no picture, in ManiSkill's order, each with its name: `agent.qpos` is `qpos`."""
    for key, value in raw.items():
        if key.startswith("sensor_"):
            continue
        if isinstance(value, dict):
            yield from _leaves(value, path if key in ("agent", "extra") else f"{path}{key}.")
        else:
            yield f"{path}{key}", np.asarray(value, np.float32).reshape(-1)


def _names(key: str, count: int) -> list[str]:
    suffixes = _POSE_NAMES if key.endswith("pose") and count == len(_POSE_NAMES) else range(count)
    return [key] if count == 1 else [f"{key}_{suffix}" for suffix in suffixes]


def _action_names(robot: Any) -> list[str]:
    parts = getattr(robot.controller, "action_mapping", {"joint": (0, robot.single_action_space.shape[0])})
    names: list[str] = []
    for part, (start, end) in parts.items():
        count = end - start
        ee = part == "arm" and robot.control_mode == EE_DELTA_POSE
        names += [f"ee_{suffix}" for suffix in _EE_NAMES] if ee else _names(part, count)
    return names
