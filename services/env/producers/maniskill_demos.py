"""ManiSkill's motion planner at work: `Expert`.

The planner knows all that the simulator knows and moves joints to positions. What is recorded is our own simulator, of
the same seed, made to follow the planner's gripper with the actions that policies have (`pd_ee_delta_pose`).

In: a task, seeds. Out: recordings. Never: the planner in a process of the service (its native code can crash), or
planner and policy in one scene.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.episodes import Actions, Question, run_episodes
from joynexus.simulation.interface import SimObservation, SimulatorOptions, StepResult
from joynexus.simulation.pool import Deadlines, SimulatorPool
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

_DEADLINES = Deadlines(make_s=300.0, reset_s=120.0)  # an episode is planned and acted out when it is reset
_STRIDE = 2  # the planner moves slowly: at every second of its points episodes fit ManiSkill's own limit of steps
_REACH = 4  # steps for a point that is further away than an action reaches
_SETTLE = 12  # steps at the last point: tasks want the robot to stand still


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
        family = family_of(task)
        family.prepare()
        self._pool = SimulatorPool(
            task,
            processes,
            make=make_planned,
            preload=family.preload,
            processes=processes,
            options=options,
            deadlines=_DEADLINES,
            recycling=family.recycling,
        )

    @property
    def contract(self) -> Contract:
        """The simulator's; SimulatorError if it cannot be made."""
        return self._pool.contract

    @property
    def instruction(self) -> str:
        """Task text."""
        return self._pool.instruction

    def record(self, seeds: Sequence[int]) -> list[Recording]:
        """Act in the episodes of these seeds; those that fail have no steps."""
        # All processes plan at once: rows that begin at different times would wait for each other's plans.
        rounds = (seeds[first : first + self._pool.rows] for first in range(0, len(seeds), self._pool.rows))
        return [recording for some in rounds for recording in self._record(some)]

    def _record(self, seeds: Sequence[int]) -> list[Recording]:
        contract = self.contract
        seen: dict[int, list[SimObservation]] = {seed: [] for seed in seeds}

        def act(questions: list[Question]) -> Actions:
            for question in questions:
                seen[question.seed].append(question.observation)
            return np.zeros((len(questions), 1, contract.action_dim), np.float32)

        results = run_episodes(self._pool, act, seeds, episode_limit=contract.episode_limit, attempts=1)
        return [_recording(r.seed, seen[r.seed] if r.success else [], contract) for r in results]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()


def _recording(seed: int, seen: list[SimObservation], contract: Contract) -> Recording:
    size, width = contract.state_dim, contract.state_dim + contract.action_dim
    numbers = np.array([observation.state for observation in seen], np.float32).reshape(-1, width)
    images = tuple(zip(*(observation.images for observation in seen), strict=True))
    return Recording(seed, bool(seen), numbers[:, :size], numbers[:, size:], images)


def make_planned(task: str, options: SimulatorOptions) -> Planned:
    """Make the simulator that the expert reads its episodes from; see `registry.make_simulator`."""
    simulator = make_simulator(task, options)
    assert isinstance(simulator, ManiSkill)
    return Planned(task.partition("/")[2], simulator)


class Planned:
    """A `Simulator` whose episode the planner acts out when it begins, whatever it is told afterwards.

    A state goes on behind the policy's with the action that was taken in it. An episode that it does not solve cannot
    begin.
    """

    def __init__(self, task: str, simulator: ManiSkill) -> None:
        self.contract, self.instruction = simulator.contract, simulator.instruction
        self._simulator, self._follower = simulator, _Follower(task, simulator)
        self._moments: list[SimObservation] = []
        self._step = 0

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Act in the episode of a seed, and return to its first moment; ValueError if the planner does not solve it."""
        steps = self._follower.record(seed)
        if not steps:
            raise ValueError(f"the planner does not solve the episode of seed {seed}")
        self._moments = [SimObservation(np.append(seen.state, action), seen.images) for seen, action in steps]
        self._step = 0
        return self._moments[0]

    def step_chunk(
        self, actions: Actions, *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Go on to the next moment; the last one stands for what comes behind it."""
        self._step += 1
        done = self._step == len(self._moments)
        return StepResult(self._moments[self._step - done], np.zeros(1, np.float32), done, done, done, ())

    def close(self) -> None:
        """Free the recorded scene."""
        self._simulator.close()


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

    def record(self, seed: int) -> list[tuple[SimObservation, npt.NDArray[np.float32]]]:
        """Plan and act in the episode of a seed; returns what was seen and done, nothing if that did not solve it."""
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
        return self._steps if self._success else []

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
