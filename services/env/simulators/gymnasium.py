"""Environments that are registered with gymnasium: `gymnasium/Pendulum-v1`, `gymnasium/my_module:MyTask-v0`.

In: an id as `gymnasium.make` takes it. Out: the environment as a simulator, whose contract comes from its spaces
(`joynexus.simulation.gymnasium_env`). Never: an import of a module that a tenant names and the operator did not.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from joynexus.simulation.gymnasium_env import RENDER, GymnasiumSimulator
from joynexus.simulation.interface import SimulatorError, SimulatorOptions
from joynexus.simulation.process import Recycling
from services.env.simulators.family import Family
from services.env.simulators.rendering import choose_renderer

MODULES = "JOYNEXUS_GYMNASIUM_MODULES"
"""Environment variable of the env service: modules, with commas between them, whose import registers environments."""
_ID = re.compile(r"(?:(?P<module>\w+(?:\.\w+)*):)?(?P<id>(?:[\w-]+/)?[\w.-]+)")

INSTRUCTIONS = {
    "Acrobot": "swing the free end above the line",
    "BipedalWalker": "walk forward over the terrain",
    "CartPole": "keep the pole upright on the cart",
    "HalfCheetah": "run forward on two legs",
    "Hopper": "hop forward without falling",
    "Humanoid": "walk forward without falling",
    "HumanoidStandup": "stand up",
    "InvertedDoublePendulum": "keep both poles upright on the cart",
    "InvertedPendulum": "keep the pole upright on the cart",
    "LunarLanderContinuous": "land between the flags",
    "MountainCarContinuous": "drive up the hill on the right",
    "Pendulum": "swing the pendulum up and hold it upright",
    "Pusher": "push the cylinder to the goal",
    "Reacher": "move the fingertip to the target",
    "Swimmer": "swim forward",
    "Walker2d": "walk forward without falling",
}
"""Texts of gymnasium's own environments, of whatever version; others say theirs, or `control` and their id."""


class GymnasiumFamily(Family):
    """Whatever is registered where the env service runs."""

    name = "gymnasium"
    example = "Pendulum-v1"
    rows = 8
    preload = ("gymnasium",)
    recycling = Recycling(episodes=1000, memory_mib=512, handles=64)
    packages = ("gymnasium", "mujoco")

    def tasks(self) -> tuple[str, ...]:
        """Return none: only gymnasium knows."""
        return ()

    def check(self, task: str) -> None:
        """Refuse what is no id, and modules that the operator did not name."""
        match = _ID.fullmatch(task)
        if match is None:
            raise ValueError(f"'{task[:80]}' is no id of a gymnasium environment: ids are like {self.example}")
        module = match["module"]
        if module and module not in os.environ.get(MODULES, "").split(","):
            raise ValueError(
                f"this env service does not import module '{module}': its operator can name it in {MODULES}, or serve "
                f"the environment from your own machine with `joynexus env serve`"
            )

    def missing(self) -> str:
        """Say whether gymnasium is installed."""
        return "" if find_spec("gymnasium") else "gymnasium is not installed: pip install gymnasium"

    def prepare(self) -> None:
        """Choose how MuJoCo draws, by which many environments run."""
        choose_renderer()

    def renderer(self) -> str:
        """Return MuJoCo's OpenGL backend; environments that draw otherwise need none."""
        return choose_renderer()

    def make(self, task: str, options: SimulatorOptions) -> GymnasiumSimulator:
        """Make an environment; see `Family`."""
        env = _make(task, options)
        name = task.rpartition(":")[2]
        try:
            text = INSTRUCTIONS.get(re.sub(r"-v\d+$", "", name), "")
            simulator = GymnasiumSimulator(env, options, text)
            if simulator.contract.episode_limit < 1:
                raise ValueError(f"{name} has no limit of steps: give the job an episode_limit")
            _try_drawing(simulator, name)
        except BaseException:
            env.close()
            raise
        return simulator


def _make(task: str, options: SimulatorOptions) -> Any:
    import gymnasium

    arguments: dict[str, Any] = {"disable_env_checker": True}
    if options.episode_limit:
        arguments["max_episode_steps"] = options.episode_limit
    view = next((camera for camera in options.cameras or () if camera.name == RENDER), None)
    try:
        if view is None:
            return gymnasium.make(task, **arguments)
        arguments["render_mode"] = "rgb_array"
        with suppress(TypeError):  # some, those of MuJoCo among them, draw in any size
            return gymnasium.make(task, width=view.width, height=view.height, **arguments)
        return gymnasium.make(task, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise SimulatorError(str(error)) from error
    except gymnasium.error.UnregisteredEnv as error:
        close = get_close_matches(task, gymnasium.registry, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(f'gymnasium/{name}' for name in close)}?" if close else "see its registry"
        raise ValueError(f"gymnasium has no environment '{task[:80]}' here: {advice}") from error
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium cannot make '{task[:80]}': {error}") from error
    except ImportError as error:
        raise SimulatorError(f"'{task[:80]}' cannot be imported: {error}") from error


def _try_drawing(simulator: GymnasiumSimulator, name: str) -> None:
    """Draw once, if pictures are wanted: what cannot be drawn is a sentence now and no lost episode later."""
    if not simulator.contract.cameras:
        return
    try:
        simulator.reset(0)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:  # what draws is any package, with errors of its own
        raise SimulatorError(f"{name} cannot be drawn here ({type(error).__name__}: {error})") from error
