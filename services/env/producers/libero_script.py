"""A scripted expert that picks an object up and puts it where it belongs, told where both are.

In: positions in metres. Out: LIBERO's actions, one a step. Never: a picture, or anything but the positions.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Position = npt.NDArray[np.float64]

_OPEN, _CLOSE = -1.0, 1.0
_GAIN = 60.0  # of the error in metres to an action, which is 5 cm at 1
_REACHED_M = 0.012
# Where the hand grips, seen from the object's centre: bowls are held by their rim.
_OFFSETS = {"libero_object": (0.0, 0.0, 0.0), "libero_spatial": (0.0, 0.05, 0.0)}


def grasp_offset(suite: str) -> Position:
    """Return where objects of a suite are gripped, [3] m from their centre; ValueError if there is no expert of it."""
    if suite not in _OFFSETS:
        raise ValueError(f"there is no expert for {suite}: those of {' and '.join(_OFFSETS)} can be recorded")
    return np.array(_OFFSETS[suite])


class Scene(NamedTuple):
    """Where the hand, the object that is to be moved and its destination are, [3] each."""

    hand: Position
    thing: Position
    target: Position

    @classmethod
    def told_in(cls, state: npt.NDArray[np.float32]) -> Self:
        """Take a scene out of a state that begins with the hand's position and ends with those of both objects."""
        numbers = state.astype(np.float64)
        return cls(numbers[:3], numbers[-6:-3], numbers[-3:])


class _Leg(NamedTuple):
    """A part of the way: to a place (or staying, if None) with the gripper so, for at most so many steps."""

    place: Position | None
    grip: float
    steps: int


class PickAndPlace:
    """One episode.

    Args:
        scene: its first moment.
        offset: as `grasp_offset`.
    """

    def __init__(self, scene: Scene, offset: Position) -> None:
        grasp = scene.thing + offset
        drop = np.array([*(scene.target + offset)[:2], grasp[2]])

        def above(place: Position, height: float) -> Position:
            return np.asarray(place + np.array([0.0, 0.0, height]))

        self._legs = deque(
            [
                _Leg(above(grasp, 0.15), _OPEN, 60),
                _Leg(grasp, _OPEN, 60),
                _Leg(None, _CLOSE, 10),
                _Leg(above(grasp, 0.28), _CLOSE, 60),
                _Leg(above(drop, 0.28), _CLOSE, 100),
                _Leg(above(drop, 0.13), _CLOSE, 40),
                _Leg(None, _OPEN, 40),
            ]
        )
        self._taken = 0

    def act(self, hand: Position) -> npt.NDArray[np.float32]:
        """Return the next action, [7] float32 within [-1, 1]; once all is done the hand stays, open."""
        action = np.zeros(7, np.float32)
        if not self._legs:
            action[6] = _OPEN
            return action
        leg = self._legs[0]
        error = leg.place - hand if leg.place is not None else np.zeros(3)
        action[:3], action[6] = np.clip(_GAIN * error, -1.0, 1.0), leg.grip
        self._taken += 1
        arrived = leg.place is not None and np.linalg.norm(error) < _REACHED_M
        if arrived or self._taken == leg.steps:
            self._legs.popleft()
            self._taken = 0
        return action
