"""Write demonstrations of an expert as a LeRobot v3.0 data set.

In: a task of a family that has experts, a number of episodes. Out: a data set of that many successful episodes, with
the environment's contract. Never: an episode that failed (the next seed is tried instead).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from joynexus.simulation.interface import SimulatorOptions
from services.env.datasets.writer import LeRobotWriter
from services.env.producers.libero_demos import LiberoExpert
from services.env.producers.maniskill_demos import ManiSkillExpert
from services.env.producers.metaworld_demos import MetaWorldExpert
from services.env.producers.recording import Expert
from services.env.simulators.registry import family_of

EXPERTS: dict[str, Callable[[str, SimulatorOptions, int], Expert]] = {
    "libero": LiberoExpert,
    "maniskill": ManiSkillExpert,
    "metaworld": MetaWorldExpert,
}
"""By family: task, options, processes to an expert; a task without one is a ValueError."""

FIRST_SEED = 1000  # evaluations use seeds from 0: no demonstration is of an episode that is evaluated
_SEEDS_PER_EPISODE = 4  # an expert that fails three times out of four is none
_AT_ONCE = 32  # episodes recorded before they are written: what is in memory at most


def write_demonstrations(
    folder: Path,
    task: str,
    episodes: int,
    *,
    options: SimulatorOptions | None = None,
    processes: int = 2,
    first_seed: int = FIRST_SEED,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, ...]:
    """Record an expert.

    Args:
        folder: where the data set goes; it must not exist, or be empty.
        task: such as `metaworld/reach-v3` or `maniskill/PickCube-v1`.
        episodes: successful episodes wanted.
        options: cameras and episode limit; the simulator's own if None.
        processes: worker processes, one environment each.
        first_seed: seeds are `first_seed`, `first_seed + 1`, …; those of failed episodes are left out. LIBERO's seeds
            count its 50 initial states round and round: record it from 10 on if 0 to 9 are evaluated.
        progress: called with (episodes recorded, episodes wanted).

    Returns:
        Seeds of the recorded episodes, in the order of the data set. The same call writes the same data set.

    Raises:
        ValueError: if there is no such task, it has no expert, or that fails too often.
        SimulatorError: if the simulator cannot be made.
    """
    open_expert = EXPERTS.get(family_of(task).name)
    if open_expert is None:
        raise ValueError(f"there is no expert for '{task}': those of {' and '.join(EXPERTS)} can be recorded")
    recorded: list[int] = []
    with open_expert(task, options or SimulatorOptions(), processes) as expert:
        contract = expert.contract
        with LeRobotWriter(folder, contract.rate_hz, contract) as writer:
            seed, last = first_seed, first_seed + _SEEDS_PER_EPISODE * episodes
            while len(recorded) < episodes:
                # Results come in the order of seeds, so that the set is the same whatever the processes.
                count = min(_AT_ONCE, episodes - len(recorded))
                if seed + count > last:
                    raise ValueError(
                        f"the expert of {task} solved {len(recorded)} of {seed - first_seed} episodes within "
                        f"{contract.episode_limit} steps: set a larger episode limit"
                    )
                for recording in expert.record(range(seed, seed + count)):
                    if recording.success:
                        views = zip(contract.cameras, recording.images, strict=True)
                        images = {camera.name: np.stack(pictures) for camera, pictures in views}
                        writer.add_episode(recording.states, recording.actions, images, expert.instruction)
                        recorded.append(recording.seed)
                        progress(len(recorded), episodes)
                seed += count
    return tuple(recorded)
