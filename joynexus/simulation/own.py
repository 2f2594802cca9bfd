"""A tenant's own environment: found by name, made in a worker process, and held to what its contract says.

In: `module:function`, where the function returns a `Simulator` or a `gymnasium.Env`. Out: a simulator that does what
was asked (cameras, limit, whether solving the task ends an episode), or a sentence on what is wrong with it. Never: a
number that is not finite, or an observation of another shape, let through to a policy.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.gymnasium_env import GymnasiumSimulator
from joynexus.simulation.interface import (
    Picture,
    SimObservation,
    Simulator,
    SimulatorError,
    SimulatorOptions,
    StepResult,
    check_chunk,
)

_FORM = "name it as module:function, e.g. my_module:make_env"


def make_own(task: str, options: SimulatorOptions) -> Simulator:
    """Make a tenant's environment, in this process.

    Args:
        task: `module:function`, and behind a space maybe a task text in place of its own. The function may take the
            options.
        options: cameras are chosen among its own by name; the limit takes the place of its own.

    Raises:
        SimulatorError: if it cannot be imported or made.
        ValueError: if it has not what the options ask for.
    """
    target, _, instruction = task.partition(" ")
    function = load(target)
    try:
        made = function(options) if inspect.signature(function).parameters else function()
    except Exception as error:  # whatever a tenant's code raises is told to the tenant
        traceback.print_exc()
        raise SimulatorError(f"{target} failed with {type(error).__name__}: {error}") from error
    if hasattr(made, "observation_space") and hasattr(made, "step"):
        made = GymnasiumSimulator(made, options, instruction)
    elif not all(hasattr(made, name) for name in ("contract", "instruction", "reset", "step_chunk")):
        raise SimulatorError(f"{target} returned a {type(made).__name__}: return a Simulator or a gymnasium.Env")
    return _Held(made, options, instruction)


def load(target: str) -> Callable[..., Any]:
    """Import a function; SimulatorError if that is not possible."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise SimulatorError(f"'{target}' names no function: {_FORM}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # as above: anything may happen in it
        if not (isinstance(error, ModuleNotFoundError) and error.name == module_name):
            traceback.print_exc()
        raise SimulatorError(
            f"module '{module_name}' cannot be imported ({type(error).__name__}: {error}); "
            f"it is looked for in {', '.join(filter(None, sys.path[:2]))} and where this Python's packages are"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SimulatorError(f"module '{module_name}' has no function '{name}': {_FORM}")
    return function  # type: ignore[no-any-return]  # callable, of whatever signature


def _plain(contract: object) -> Contract:
    """Return a contract made of Python's own numbers and tuples, as it travels; ValueError if it cannot be one."""

    def number(value: object) -> object:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"it holds a {type(value).__name__}")

    try:
        return msgspec.convert(msgspec.to_builtins(contract, enc_hook=number), Contract)
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"the environment's contract is not valid: {error}") from error


class _Held:
    """An environment whose every word is checked."""

    def __init__(self, made: Simulator, options: SimulatorOptions, instruction: str) -> None:
        own = _plain(made.contract)
        wanted = own.cameras if options.cameras is None else options.cameras
        for camera in wanted:
            if camera not in own.cameras:
                has = ", ".join(f"{one.name} {one.height}x{one.width}" for one in own.cameras) or "none"
                raise ValueError(
                    f"the environment has no camera '{camera.name}' {camera.height}x{camera.width} "
                    f"rot {camera.rotation_deg}: it has {has}"
                )
        limit = options.episode_limit or own.episode_limit
        if limit < 1:
            raise ValueError(
                "the environment has no episode limit: set it in its contract, or wrap a gymnasium environment in "
                "TimeLimit"
            )
        self._made = made
        self._views = [own.cameras.index(camera) for camera in wanted]
        self._count = len(own.cameras)
        self._end_at_success = options.end_at_success
        self._steps, self._done = 0, True
        self.contract = msgspec.structs.replace(own, cameras=wanted, episode_limit=limit)
        self.instruction = instruction or str(made.instruction)

    def reset(self, seed: int, *, render: bool = True) -> SimObservation:
        self._steps, self._done = 0, False
        render = render and bool(self._views)
        return self._checked(self._made.reset(seed, render=render), render)

    def step_chunk(
        self, actions: npt.NDArray[np.float32], *, render: bool = True, final: bool = False, record: bool = False
    ) -> StepResult:
        check_chunk(actions, self.contract.action_dim, self._done)
        if self.contract.action_low or self.contract.action_high:
            actions = np.clip(actions, self.contract.action_low or None, self.contract.action_high or None)
        actions = actions[: self.contract.episode_limit - self._steps].astype(np.float32)
        render, final = render and bool(self._views), final and bool(self._views)
        rewards: list[float] = []
        frames: list[Picture] = []
        success = False
        for number, action in enumerate(actions, start=1):  # by itself: it may be the one that solves the task
            draw = render and number == len(actions)
            result = self._made.step_chunk(action[None], render=draw, final=final, record=record)
            rewards.append(self._paid(result))
            frames += result.frames
            self._steps += 1
            success = success or bool(result.success)
            terminated = bool(result.terminated) or (success and self._end_at_success)
            self._done = bool(result.done) or terminated or self._steps >= self.contract.episode_limit
            if self._done:
                break
        shown = final and not terminated if self._done else render
        seen = self._checked(result.observation, shown)
        return StepResult(seen, np.array(rewards, np.float32), success, self._done, terminated, tuple(frames))

    def close(self) -> None:
        self._made.close()

    def _paid(self, result: StepResult) -> float:
        rewards = np.asarray(result.rewards, np.float32)
        if rewards.shape != (1,):
            raise ValueError(f"rewards have shape {rewards.shape}: give one for each executed action")
        if not np.isfinite(rewards).all():
            raise ValueError("a reward is NaN or infinite")
        return float(rewards[0])

    def _checked(self, seen: SimObservation, render: bool) -> SimObservation:
        contract = self.contract
        state = np.asarray(seen.state, np.float32)
        if state.shape != (contract.state_dim,):
            raise ValueError(f"a state has shape {state.shape}: the contract says ({contract.state_dim},)")
        if not render:
            return SimObservation(state, ())
        if len(seen.images) != self._count:
            raise ValueError(f"there are {len(seen.images)} pictures: the contract has {self._count} cameras")
        images = tuple(np.asarray(seen.images[view]) for view in self._views)
        for camera, image in zip(contract.cameras, images, strict=True):
            if image.shape != (camera.height, camera.width, 3) or image.dtype != np.uint8:
                raise ValueError(
                    f"camera '{camera.name}' gives {image.dtype} {image.shape}: "
                    f"the contract says uint8 ({camera.height}, {camera.width}, 3)"
                )
        return SimObservation(state, images)
