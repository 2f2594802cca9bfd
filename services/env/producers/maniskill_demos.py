"""ManiSkill's motion planner at work: `Expert`.

The planner knows all that the simulator knows and moves joints to positions. What is recorded is our own simulator, of
the same seed, made to follow the planner's gripper with the actions that policies have (`pd_ee_delta_pose`).

In: a task, seeds. Out: recordings. Never: the planner in a process of the service (its native code can crash), or
planner and policy in one scene.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.interface import SimObservation, SimulatorError, SimulatorOptions
from joynexus.simulation.protocol import Array, Made, MakeFailed, pack, unpack_float32, unpack_uint8
from services.env.producers.recording import Recording
from services.env.simulators.maniskill import ManiSkill
from services.env.simulators.maniskill_driver import choose_driver
from services.env.simulators.registry import family_of, make_simulator

PLANNED = {
    "DrawTriangle-v1": "draw_triangle",
    "LiftPegUpright-v1": "lift_peg_upright",
    "PegInsertionSide-v1": "peg_insertion_side",
    "PickCube-v1": "pick_cube",
    "PlaceSphere-v1": "place_sphere",
    "PlugCharger-v1": "plug_charger",
    "PullCube-v1": "pull_cube",
    "PullCubeTool-v1": "pull_cube_tool",
    "PushCube-v1": "push_cube",
    "StackCube-v1": "stack_cube",
    "StackPyramid-v1": "stack_pyramid",
}
"""Tasks that ManiSkill has a plan for, and its module."""

MAKE_S, EPISODE_S = 300.0, 120.0
_STRIDE = 2  # the planner moves slowly: at every second of its points episodes fit ManiSkill's own limit of steps
_REACH = 4  # steps for a point that is further away than an action reaches
_SETTLE = 12  # steps at the last point: tasks want the robot to stand still


class _Recorded(msgspec.Struct, frozen=True):
    """A `Recording` between processes; `pictures` of all cameras, camera by camera."""

    success: bool
    states: Array
    actions: Array
    pictures: tuple[Array, ...]


_encode = msgspec.msgpack.encode
_decode_made = msgspec.msgpack.Decoder(Made | MakeFailed)
_decode_recorded = msgspec.msgpack.Decoder(_Recorded)


class ManiSkillExpert:
    """The planner of one task.

    Args:
        task: such as `maniskill/PickCube-v1`.
        options: cameras and episode limit.
        processes: each plans one episode at a time.

    Raises:
        ValueError: if ManiSkill has no plan for the task.
    """

    def __init__(self, task: str, options: SimulatorOptions, processes: int) -> None:
        if task.partition("/")[2] not in PLANNED:
            raise ValueError(f"ManiSkill has no plan for {task}: it has plans for {', '.join(PLANNED)}")
        family_of(task).prepare()
        self._planners = [_Planner(task, options) for _ in range(processes)]
        self._made: Made | None = None

    @property
    def contract(self) -> Contract:
        """The simulator's; SimulatorError if it cannot be made."""
        return self._description().contract

    @property
    def instruction(self) -> str:
        """Task text."""
        return self._description().instruction

    def record(self, seeds: Sequence[int]) -> list[Recording]:
        """Act in the episodes of these seeds."""
        cameras = len(self.contract.cameras)
        idle: SimpleQueue[_Planner] = SimpleQueue()
        for planner in self._planners:
            idle.put(planner)

        def record(seed: int) -> Recording:
            planner = idle.get()
            try:
                return planner.record(seed, cameras)
            finally:
                idle.put(planner)

        with ThreadPoolExecutor(len(self._planners)) as threads:
            return list(threads.map(record, seeds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for planner in self._planners:
            planner.end()

    def _description(self) -> Made:
        if self._made is None:
            self._made = self._planners[0].made()
        return self._made


class _Planner:
    """One process that plans, and is started again when it crashes or hangs."""

    def __init__(self, task: str, options: SimulatorOptions) -> None:
        self._task, self._options = task, options
        self._made: Made | None = None
        self._start()

    def made(self) -> Made:
        """Wait until the simulator is made; SimulatorError if it cannot be."""
        if self._made is None:
            data = self._receive(MAKE_S)
            reply = _decode_made.decode(data) if data else MakeFailed("its process died or took too long: see its log")
            if isinstance(reply, MakeFailed):
                raise SimulatorError(f"simulator {self._task} cannot be made: {reply.reason}")
            self._made = reply
        return self._made

    def record(self, seed: int, cameras: int) -> Recording:
        """Plan and act in one episode; a crash or a missed deadline is a failed one."""
        self.made()
        self._pipe.send_bytes(_encode(seed))
        data = self._receive(EPISODE_S)
        if data is None:
            self.end()
            self._start()
            nothing = np.zeros((0, 0), np.float32)
            return Recording(seed, False, nothing, nothing, ())
        reply = _decode_recorded.decode(data)
        states, actions = unpack_float32(reply.states), unpack_float32(reply.actions)
        pictures = [unpack_uint8(picture) for picture in reply.pictures]
        views = tuple(pictures[i * len(states) : (i + 1) * len(states)] for i in range(cameras))
        return Recording(seed, reply.success, states, actions, views)

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._task, self._options), daemon=True)
        self._process.start()
        theirs.close()
        self._made = None

    def _receive(self, seconds: float) -> bytes | None:
        try:
            return self._pipe.recv_bytes() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            return None


def _serve(pipe: Connection, task: str, options: SimulatorOptions) -> None:
    """Record one episode for each seed, until the pipe closes."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody answers what ManiSkill may ask
    try:
        simulator = make_simulator(task, options)
        assert isinstance(simulator, ManiSkill)
        follower = _Follower(task.partition("/")[2], simulator)
    except (SimulatorError, ValueError) as error:
        pipe.send_bytes(_encode(MakeFailed(str(error))))
        return
    pipe.send_bytes(_encode(Made(simulator.contract, simulator.instruction)))
    while True:
        try:
            seed = msgspec.msgpack.decode(pipe.recv_bytes(), type=int)
        except EOFError:
            return
        pipe.send_bytes(_encode(follower.record(seed)))


class _Ended(Exception):  # noqa: N818 - not an error: the way out of a plan whose episode has ended
    """The recorded episode has ended."""


class _Follower:
    """Stands between the planner and its environment, and has the recorded simulator follow.

    Args:
        task: such as `PickCube-v1`.
        simulator: what is recorded.
    """

    def __init__(self, task: str, simulator: ManiSkill) -> None:
        from mani_skill.utils.registration import REGISTERED_ENVS

        self._simulator, self._scene = simulator, simulator.environment
        self._solve: Callable[..., Any] = import_module(
            f"mani_skill.examples.motionplanning.panda.solutions.{PLANNED[task]}"
        ).solve
        self.unwrapped = REGISTERED_ENVS[task].make(
            num_envs=1,
            obs_mode="none",
            reward_mode="none",
            control_mode="pd_joint_pos",
            sim_backend="physx_cpu",
            render_backend=choose_driver(),
        )
        self._gripper = simulator.contract.gripper != "none"

    def record(self, seed: int) -> _Recorded:
        """Plan and act in the episode of a seed."""
        self._steps: list[tuple[SimObservation, npt.NDArray[np.float32]]] = []
        self._observation = self._simulator.reset(seed)
        self._success, self._planned, self._last = False, 0, np.zeros(0, np.float32)
        try:
            self._solve(self, seed=seed)
            for _ in range(_SETTLE):
                self._follow(self._last)
        except _Ended:
            pass
        except Exception as error:  # plans raise what they like when an episode has no solution
            logging.getLogger(__name__).warning("seed %d has no plan: %s: %s", seed, type(error).__name__, error)
        observations = [observation for observation, _ in self._steps]
        views = zip(*(observation.images for observation in observations), strict=True)
        return _Recorded(
            success=self._success,
            states=pack(np.array([observation.state for observation in observations], np.float32)),
            actions=pack(np.array([action for _, action in self._steps], np.float32)),
            pictures=tuple(pack(picture) for view in views for picture in view),
        )

    def reset(self, seed: int) -> Any:
        """Reset the planner's environment, for the planner."""
        result = self.unwrapped.reset(seed=seed, options={"reconfigure": True})
        self._model = self.unwrapped.agent.robot.create_pinocchio_model()
        return result

    def step(self, action: npt.NDArray[np.float32]) -> Any:
        """Step the planner's environment, for the planner, and follow."""
        result = self.unwrapped.step(action)
        gripper_moves = self._gripper and self._last.size > 0 and action[-1] != self._last[-1]
        self._last, self._planned = np.asarray(action, np.float32), self._planned + 1
        if gripper_moves or self._planned % _STRIDE == 0:
            self._follow(self._last)
        return result

    def _follow(self, action: npt.NDArray[np.float32]) -> None:
        """Act until the recorded gripper is where this joint position has the planner's."""
        target = self._target(action)
        for _ in range(_REACH):
            move, reaches = self._move(target)
            chunk = np.append(move, action[-1:] if self._gripper else []).astype(np.float32)
            self._steps.append((self._observation, chunk))
            result = self._simulator.step_chunk(chunk[None])
            self._observation = result.observation
            self._success = self._success or result.success
            if result.done:
                raise _Ended
            if reaches:
                return

    def _target(self, action: npt.NDArray[np.float32]) -> Any:
        """Return the pose in the robot's frame that the planner's gripper has at an action's joint positions."""
        arm = self.unwrapped.agent.controller
        controller = arm.controllers["arm"] if hasattr(arm, "controllers") else arm
        joints = self.unwrapped.agent.robot.get_qpos()[0].numpy().copy()
        indices = controller.active_joint_indices.numpy()
        joints[indices] = action[: len(indices)]
        self._model.compute_forward_kinematics(joints)
        return self._model.get_link_pose(self._arm().ee_link.index)

    def _arm(self) -> Any:
        controller = self._scene.agent.controller
        return controller.controllers["arm"] if hasattr(controller, "controllers") else controller

    def _move(self, target: Any) -> tuple[npt.NDArray[np.float64], bool]:
        """Return the action of the arm towards a pose, and whether it reaches it."""
        from mani_skill.utils.geometry.rotation_conversions import matrix_to_euler_angles, quaternion_to_matrix
        from mani_skill.utils.structs.pose import Pose

        arm = self._arm()
        now, target = arm.ee_pose_at_base, Pose.create(target)
        turn = Pose.create_from_pq(q=target.q) * Pose.create_from_pq(q=now.q).inv()
        angles = matrix_to_euler_angles(quaternion_to_matrix(turn.q), "XYZ")[0].numpy()
        position = (target.p - now.p)[0].numpy() / arm.config.pos_upper
        rotation = angles / arm.config.rot_lower  # its sign is the controller's: see `_EE_ROTATION` of the simulator
        far, turned = np.abs(position).max(), np.linalg.norm(rotation)
        return np.concatenate([np.clip(position, -1, 1), rotation / max(1.0, turned)]), bool(far <= 1 and turned <= 1)
