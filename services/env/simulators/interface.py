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
    """

    cameras: tuple[Camera, ...] | None = None
    episode_limit: int = 0


class SimObservation(NamedTuple):
    """What a policy sees: state [S] float32; pictures [H, W, 3] uint8 in the contract's order, none if not rendered."""

    state: npt.NDArray[np.float32]
    images: tuple[Picture, ...]


class StepResult(NamedTuple):
    """What a chunk of actions led to.

    Attributes:
        observation: after the last executed action; its pictures are missing if the episode is done.
        reward: sum over the executed actions.
        success: whether the task is solved; that ends the episode.
        done: whether the episode ended, by success or by its limit.
        steps: actions executed, fewer than given if the episode ended on the way.
        frames: one picture a step of the first camera, for a video, if they were asked for.
    """

    observation: SimObservation
    reward: float
    success: bool
    done: bool
    steps: int
    frames: tuple[Picture, ...] = ()


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

    def step_chunk(self, actions: npt.NDArray[np.float32], *, render: bool = True, record: bool = False) -> StepResult:
        """Execute actions [k, A] until they or the episode end.

        Args:
            actions: raw actions, clipped to the contract's limits.
            render: draw the pictures of the observation after the chunk.
            record: draw a picture of every step too, larger and from the first camera.

        Raises:
            ValueError: if the actions have another shape or are not finite, or the episode has ended.
        """

    def close(self) -> None:
        """Free what the simulator holds."""


class SimulatorError(RuntimeError):
    """A simulator cannot be made on this machine; the sentence says what is missing."""
