"""Write demonstrations of a scripted expert as a LeRobot v3.0 data set.

In: a MetaWorld task, a number of episodes. Out: a data set of that many successful episodes, with the environment's
contract. Never: an episode that failed (the next seed is tried instead).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from joynexus.simulation.episodes import Actions, EpisodeResult, Question, run_episodes
from joynexus.simulation.interface import SimulatorOptions, StepResult
from services.env.datasets.writer import LeRobotWriter
from services.env.simulators.metaworld import MetaWorldFamily, expert
from services.env.simulators.registry import family_of, open_pool

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
        task: such as `metaworld/reach-v3`.
        episodes: successful episodes wanted.
        options: cameras and episode limit; the simulator's own if None.
        processes: worker processes, one environment each.
        first_seed: seeds are `first_seed`, `first_seed + 1`, …; those of failed episodes are left out.
        progress: called with (episodes recorded, episodes wanted).

    Returns:
        Seeds of the recorded episodes, in the order of the data set. The same call writes the same data set.

    Raises:
        ValueError: if there is no such task, or its expert fails too often.
        SimulatorError: if the simulator cannot be made.
    """
    if not isinstance(family_of(task), MetaWorldFamily):
        raise ValueError(f"there is no scripted expert of '{task}': MetaWorld's tasks have one each")
    policy = expert(task.partition("/")[2])
    recordings: dict[int, list[tuple[Question, Actions]]] = {}
    recorded: list[int] = []

    def act(questions: list[Question]) -> Actions:
        return np.stack([policy(question.observation.state)[None] for question in questions])

    def on_step(question: Question, actions: Actions, _: StepResult) -> None:
        if question.step == 0:
            recordings[question.seed] = []
        recordings[question.seed].append((question, actions))

    with open_pool(task, processes, processes=processes, options=options) as pool:
        contract = pool.contract
        with LeRobotWriter(folder, contract.rate_hz, contract) as writer:

            def add(result: EpisodeResult) -> None:
                steps = recordings.pop(result.seed, [])  # none if its simulator was lost before the first step
                if not result.success or len(recorded) == episodes:
                    return
                images = {
                    camera.name: np.stack([question.observation.images[i] for question, _ in steps])
                    for i, camera in enumerate(contract.cameras)
                }
                states = np.stack([question.observation.state for question, _ in steps])
                writer.add_episode(states, np.concatenate([a for _, a in steps]), images, pool.instruction)
                recorded.append(result.seed)
                progress(len(recorded), episodes)

            seed, last = first_seed, first_seed + _SEEDS_PER_EPISODE * episodes
            while len(recorded) < episodes:
                count = min(
                    _AT_ONCE, episodes - len(recorded)
                )  # results come back in the order of seeds: the set is reproducible
                if seed + count > last:
                    raise ValueError(
                        f"the expert of {task} solved {len(recorded)} of {seed - first_seed} episodes only"
                    )
                seeds = range(seed, seed + count)
                for result in run_episodes(pool, act, seeds, episode_limit=contract.episode_limit, on_step=on_step):
                    add(result)
                seed += count
    return tuple(recorded)
