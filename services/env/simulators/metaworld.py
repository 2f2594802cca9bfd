"""MetaWorld (Sawyer arm, 50 tasks, MuJoCo): https://github.com/Farama-Foundation/Metaworld.

In: seeds and actions. Out: the 39 numbers of its observation with the goal in it, pictures, success. Never: MetaWorld's
own seeding by `reset(seed=...)`, which it ignores, or its own renderer, which takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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
from services.env.simulators import metaworld_tasks
from services.env.simulators.family import Family
from services.env.simulators.rendering import PACKAGES, choose_renderer, missing_opengl

_INSTALL = "pip install 'joynexus[metaworld]'"
_VIDEO_SIDE = 256
_SUPERSAMPLING = 2  # 2x2 averaging costs half of what MuJoCo's own 4-fold multisampling costs on a CPU, and looks alike


class MetaWorldFamily(Family):
    """The 50 tasks."""

    name = metaworld_tasks.FAMILY
    example = "reach-v3"
    rows = 8  # their questions go to the policy together
    preload = ("metaworld",)
    recycling = Recycling(episodes=400, memory_mib=512, handles=64)
    packages = ("metaworld", "mujoco")

    def tasks(self) -> tuple[str, ...]:
        """Return the 50 names."""
        return tuple(sorted(metaworld_tasks.INSTRUCTIONS))

    def missing(self) -> str:
        """Say whether MetaWorld is installed."""
        return "" if find_spec("metaworld") else f"MetaWorld is not installed: {_INSTALL}"

    def pictures_missing(self) -> str:
        """Say whether OpenGL is installed."""
        return missing_opengl()

    def prepare(self) -> None:
        """Choose how MuJoCo draws."""
        choose_renderer()

    def renderer(self) -> str:
        """Return MuJoCo's OpenGL backend."""
        return choose_renderer()

    def make(self, task: str, options: SimulatorOptions) -> MetaWorld:
        """Make an environment; see `Family`."""
        return MetaWorld(task, metaworld_tasks.contract(options), end_at_success=options.end_at_success)


class MetaWorld:
    """One environment; see `Simulator`.

    Args:
        task: name such as `reach-v3`.
        contract: from `metaworld_tasks.contract`; cameras, rotation and episode limit are taken from it.
        end_at_success: as in `SimulatorOptions`.

    Raises:
        SimulatorError: if MetaWorld is not installed, or pictures are wanted and no OpenGL library is there.
    """

    def __init__(self, task: str, contract: Contract, *, end_at_success: bool = True) -> None:
        if (problem := missing_opengl()) and contract.cameras:
            raise SimulatorError(problem)
        try:
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        except ImportError as error:
            raise SimulatorError(f"MetaWorld cannot be imported ({error}): {_INSTALL}") from error
        self.contract = contract
        self.instruction = metaworld_tasks.INSTRUCTIONS[task]
        self._env: Any = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]()
        self._env._freeze_rand_vec = False  # draw positions anew at each reset …
        self._env.seeded_rand_vec = True  # … from the generator that `seed` sets
        self._painter: _Painter | None = None
        self._end_at_success = end_at_success
        self._steps = 0
        self._done = True

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin the episode of a seed (0 or more)."""
        self._env.seed(seed)
        state, _ = self._env.reset()
        self._steps, self._done = 0, False
        return self._observe(state, render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, 4] until they or the episode end."""
        check_chunk(actions, self.contract.action_dim, self._done)
        rewards: list[float] = []
        success, frames, state = False, [], None
        for action in np.clip(actions, -1.0, 1.0).astype(np.float64):
            state, step_reward, _, _, info = self._env.step(action)
            rewards.append(float(step_reward))
            self._steps += 1
            success = success or bool(info["success"] > 0)
            ended = success and self._end_at_success
            self._done = ended or self._steps >= self.contract.episode_limit
            if record and self.contract.cameras:
                camera = self.contract.cameras[0]
                half = _VIDEO_SIDE / max(camera.height, camera.width) / 2  # video wants even sides
                frames.append(self._draw(camera, 2 * round(camera.height * half), 2 * round(camera.width * half)))
            if self._done:
                break
        observation = self._observe(state, final if self._done else render)
        paid = np.array(rewards, np.float32)
        return StepResult(observation, paid, success, self._done, success and self._end_at_success, tuple(frames))

    def close(self) -> None:
        """Free the environment; the OpenGL context lives as long as the process, which has one for each size."""
        self._env.close()

    def _observe(self, state: Any, render: bool) -> SimObservation:
        cameras = self.contract.cameras if render else ()
        images = tuple(self._draw(camera, camera.height, camera.width) for camera in cameras)
        return SimObservation(np.asarray(state, np.float32), images)

    def _draw(self, camera: Camera, height: int, width: int) -> Picture:
        turned = camera.rotation_deg in (90, 270)
        if self._painter is None:
            self._painter = _Painter(self._env.model, self._env.data)
        picture = self._painter.draw(camera.name, *((width, height) if turned else (height, width)))
        return np.ascontiguousarray(np.rot90(picture, k=-camera.rotation_deg // 90))


class _Painter:
    """Draws one environment off screen, without shadows and reflections."""

    # Making an OpenGL context and uploading the meshes takes a second: environments of one task share it.
    _contexts: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __init__(self, model: Any, data: Any) -> None:
        import mujoco

        self._mujoco, self._model, self._data = mujoco, model, data
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._options, self._perturbation = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def draw(self, camera: str, height: int, width: int) -> Picture:
        """Return the view of a camera, [height, width, 3] uint8, upright as MuJoCo sees it."""
        mujoco = self._mujoco
        tall, wide = height * _SUPERSAMPLING, width * _SUPERSAMPLING
        gl, context = self._context(tall, wide)
        gl.make_current()
        self._camera.fixedcamid = self._model.camera(camera).id
        mujoco.mjv_updateScene(
            self._model,
            self._data,
            self._options,
            self._perturbation,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        area = mujoco.MjrRect(0, 0, wide, tall)
        mujoco.mjr_render(area, self._scene, context)
        pixels = np.empty((tall, wide, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, area, context)
        blocks = pixels[::-1].reshape(height, _SUPERSAMPLING, width, _SUPERSAMPLING, 3)  # OpenGL's rows rise
        mean: Picture = ((blocks.sum((1, 3), dtype=np.uint16) + 2) // _SUPERSAMPLING**2).astype(np.uint8)
        return mean

    def _context(self, tall: int, wide: int) -> tuple[Any, Any]:
        mujoco, model = self._mujoco, self._model
        key = (tall, wide, model.ngeom, model.nmesh, model.nmeshvert, model.ntexdata)
        if key not in self._contexts:
            model.vis.global_.offheight, model.vis.global_.offwidth = tall, wide
            model.vis.quality.offsamples = 0
            backend = choose_renderer()
            try:
                # Not mujoco.GLContext: that is fixed when MuJoCo is first imported, perhaps before the choice was made.
                gl = import_module(f"mujoco.{backend}").GLContext(wide, tall)
                gl.make_current()
                context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
            except Exception as error:  # the OpenGL bindings raise types of their own, different for each backend
                raise SimulatorError(
                    f"pictures cannot be drawn with {backend} ({error}): install {PACKAGES}"
                ) from error
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
            self._contexts[key] = (gl, context)
        return self._contexts[key]


def expert(task: str) -> Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
    """Return MetaWorld's scripted expert of a task: state [39] to action [4] within [-1, 1]."""
    choose_renderer()
    from metaworld.policies import ENV_POLICY_MAP

    policies: dict[str, Any] = ENV_POLICY_MAP  # typed as the abstract class, which cannot be made
    policy = policies[task]()

    def act(state: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        action: npt.NDArray[np.float64] = policy.get_action(state.astype(np.float64))
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    return act
