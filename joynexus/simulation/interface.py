"""What a simulator is to the rest of the env role.

In: a seed, then chunks of actions. Out: observations, rewards, success. Never: a picture that nobody needs (rendering
costs ten times the physics), or randomness that the seed does not decide.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract

Picture = npt.NDArray[np.uint8]


class SimulatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a task.

    Attributes:
        cameras: pictures wanted, in order, with size and rotation; None takes the simulator's own choice, an empty
            tuple means a policy that sees no picture.
        episode_limit: steps after which an episode ends unsuccessful; 0 takes the simulator's own.
        end_at_success: whether solving the task ends the episode. Dense rewards are paid at each step, so that a policy
            that learns from them would do well never to solve a task that ends then.
    """

    cameras: tuple[Camera, ...] | None = None
    episode_limit: int = 0
    end_at_success: bool = True


class SimObservation(NamedTuple):
    """What a policy sees: state [S] float32; pictures [H, W, 3] uint8 in the contract's order, none if not rendered."""

    state: npt.NDArray[np.float32]
    images: tuple[Picture, ...]


class StepResult(NamedTuple):
    """What a chunk of actions led to.

    Attributes:
        observation: after the last executed action; its pictures are missing if they were not asked for.
        rewards: [k] float32, one an executed action: fewer than given if the episode ended on the way.
        success: whether the task was solved at one of these steps.
        done: whether the episode ended: by success, by failing for good, or by its limit.
        terminated: whether the task itself ended it, so that nothing more could come; False at the limit.
        frames: one picture a step of the first camera, for a video, if they were asked for.
    """

    observation: SimObservation
    rewards: npt.NDArray[np.float32]
    success: bool
    done: bool
    terminated: bool
    frames: tuple[Picture, ...] = ()

    @property
    def steps(self) -> int:
        """Actions executed."""
        return len(self.rewards)

    @property
    def reward(self) -> float:
        """Sum over the executed actions."""
        return float(self.rewards.sum(dtype=np.float64))


class Simulator(Protocol):
    """One environment of one task."""

    @property
    def contract(self) -> Contract:
        """What observations and actions mean."""

    @property
    def instruction(self) -> str:
        """Task text."""

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        """Begin the episode that this seed stands for: the same seed gives the same episode, to the bit."""

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        """Execute actions [k, A] until they or the episode end.

        Args:
            actions: raw actions, clipped to the contract's limits.
            render: draw the pictures of the observation after the chunk, unless the episode has ended.
            final: draw them also then, for whoever wants to know what the last moment is worth.
            record: draw a picture of every step too, larger and from the first camera.

        Raises:
            ValueError: if the actions have another shape or are not finite, or the episode has ended.
        """

    def close(self) -> None:
        """Free what the simulator holds."""


def check_chunk(actions: npt.NDArray[np.float32], action_dim: int, ended: bool) -> None:
    """Refuse a chunk that no simulator can execute; ValueError as `Simulator.step_chunk`."""
    if actions.ndim != 2 or actions.shape[1] != action_dim or len(actions) == 0:
        raise ValueError(f"actions have shape {actions.shape}: a chunk is [k, {action_dim}]")
    if not np.isfinite(actions).all():
        raise ValueError("actions hold numbers that are not finite: the policy's version is broken")
    if ended:
        raise ValueError("the episode has ended: reset the simulator with a seed")


class SimulatorError(RuntimeError):
    """A simulator cannot be made on this machine; the sentence says what is missing."""
