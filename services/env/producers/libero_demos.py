"""LIBERO's scripted expert at work: `Expert`, and its demonstrations as LIBERO's own HDF5.

In: a task, seeds. Out: recordings. Never: anything in a recording that the expert saw and a policy would not (it is
told where the objects are), or a picture of an episode that failed.

Episodes are first acted out without pictures, several at once; those that succeed are played again with a picture of
every step, as LIBERO's own `create_dataset.py` does: the same actions from the same start lead to the same states.
LIBERO has 50 fixed initial states a task, so that seeds that differ by a multiple of 50 are one episode: whoever
evaluates on seeds 0 to 9 records from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.simulation.episodes import Actions, Question, run_episodes
from joynexus.simulation.interface import Picture, SimObservation, SimulatorOptions, StepResult
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env.datasets.libero_writer import LiberoEpisode, LiberoTask, LiberoWriter
from services.env.producers.libero_script import PickAndPlace, Scene, grasp_offset
from services.env.producers.recording import Recording
from services.env.simulators import libero_tasks
from services.env.simulators.libero import Libero, LiberoFamily
from services.env.simulators.registry import family_of

FIRST_SEED = 10  # evaluations of ten episodes have seeds 0 to 9
_SEEDS_PER_EPISODE = 4  # an expert that fails three times out of four is none


class Attempt(NamedTuple):
    """What the expert did in the episode of a seed: [T, 7] actions, and whether they solved the task."""

    seed: int
    success: bool
    actions: npt.NDArray[np.float32]


class LiberoExpert:
    """The expert of one task.

    Args:
        task: such as `libero/libero_object/0`.
        options: cameras and episode limit.
        processes: worker processes that act without pictures.

    Raises:
        ValueError: if there is no such task, or no expert of its suite.
    """

    def __init__(self, task: str, options: SimulatorOptions, processes: int) -> None:
        family, self._task = family_of(task), task.partition("/")[2]
        self._offset = grasp_offset(libero_tasks.task_of(self._task)[0])
        self._options = options
        self.contract: Contract = libero_tasks.contract(self._task, options)
        self.instruction = libero_tasks.instruction(self._task)
        self._drawing: Libero | None = None
        blind = msgspec.structs.replace(options, cameras=())
        family.prepare()
        self._pool = SimulatorPool(
            task,
            processes,
            make=make_telling,
            preload=family.preload,
            processes=processes,
            options=blind,
            deadlines=Deadlines(make_s=600.0),  # nobody waits for a recording as for an episode
            recycling=family.recycling,
        )

    def attempt(self, seeds: Sequence[int]) -> list[Attempt]:
        """Act in the episodes of these seeds, without pictures."""
        experts: dict[int, PickAndPlace] = {}
        taken: dict[int, list[Actions]] = {}

        def act(questions: list[Question]) -> Actions:
            return np.stack([decide(question)[None] for question in questions])

        def decide(question: Question) -> npt.NDArray[np.float32]:
            scene = Scene.told_in(question.observation.state)
            if question.step == 0:
                experts[question.seed], taken[question.seed] = PickAndPlace(scene, self._offset), []
            return experts[question.seed].act(scene.hand)

        def on_step(question: Question, actions: Actions, _: StepResult) -> None:
            taken[question.seed].append(actions)

        results = run_episodes(
            self._pool, act, seeds, episode_limit=self.contract.episode_limit, render=False, on_step=on_step
        )
        return [
            Attempt(r.seed, r.success, np.concatenate(taken.get(r.seed) or [np.zeros((0, 7), np.float32)]))
            for r in results
        ]

    def play(self, attempt: Attempt) -> LiberoEpisode:
        """Play an attempt again with a picture of every step, in this process."""
        if self._drawing is None:
            self._drawing = LiberoFamily().make(self._task, self._options)
        simulator, draw = self._drawing, bool(self.contract.cameras)
        observation = simulator.reset(attempt.seed, render=draw)
        states, pictures, moments = [], [], []
        for action in attempt.actions:
            states.append(observation.state)
            pictures.append(observation.images)
            moments.append(simulator.moment())
            observation = simulator.step_chunk(action[None], render=draw).observation
        simulation, joints, quaternions = zip(*moments, strict=True)
        return LiberoEpisode(
            states=np.stack(states),
            actions=attempt.actions,
            images=tuple(np.stack(view) for view in zip(*pictures, strict=True)),
            simulation=np.stack(simulation),
            joints=np.stack(joints),
            quaternions=np.stack(quaternions),
            model=simulator.model_xml(),
        )

    def record(self, seeds: Sequence[int]) -> list[Recording]:
        """Act in the episodes of these seeds; those that fail have no steps."""
        return [self._recording(attempt) for attempt in self.attempt(seeds)]

    def _recording(self, attempt: Attempt) -> Recording:
        if not attempt.success:
            none = np.zeros((0, 0), np.float32)
            return Recording(attempt.seed, False, none, none, ())
        episode = self.play(attempt)
        images: tuple[Sequence[Picture], ...] = tuple(list(view) for view in episode.images)
        return Recording(attempt.seed, True, episode.states, episode.actions, images)

    def describe(self) -> LiberoTask:
        """Return what a file of this task's demonstrations says of it."""
        suite, name = libero_tasks.task_of(self._task)
        text, problem = LiberoFamily().description(self._task)
        return LiberoTask(suite, name, problem, self.instruction, text)

    def close(self) -> None:
        """End all simulators."""
        self._pool.close()
        if self._drawing is not None:
            self._drawing.close()
            self._drawing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Telling(Libero):
    """A simulator whose state goes on behind the policy's with where two objects are: what moves, and where it goes."""

    def _observe(self, render: bool) -> SimObservation:
        seen = super()._observe(render)
        places = [self.position(name) for name in self.objects[:2]]
        return SimObservation(np.concatenate([seen.state, *places]).astype(np.float32), seen.images)


def make_telling(name: str, options: SimulatorOptions) -> Libero:
    """Make the simulator that the expert acts in; see `registry.make_simulator`."""
    family, task = family_of(name), name.partition("/")[2]
    family.prepare()
    return _Telling(task, libero_tasks.contract(task, options), end_at_success=options.end_at_success)


def write_hdf5_demonstrations(
    folder: Path,
    task: str,
    episodes: int,
    *,
    options: SimulatorOptions | None = None,
    processes: int = 2,
    first_seed: int = FIRST_SEED,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, ...]:
    """Record the expert as one HDF5 file in LIBERO's layout; see `demos.write_demonstrations` for LeRobot's.

    Returns:
        Seeds of the recorded episodes, in order.

    Raises:
        ValueError: if there is no such task or expert, it fails too often, or the file exists.
        SimulatorError: if the simulator cannot be made.
    """
    recorded: list[int] = []
    seeds = range(first_seed, first_seed + _SEEDS_PER_EPISODE * episodes)
    with (
        LiberoExpert(task, options or SimulatorOptions(), processes) as expert,
        LiberoWriter(folder, expert.contract, expert.describe()) as writer,
    ):
        for attempt in _successes(expert, seeds, processes):
            writer.add_episode(expert.play(attempt))
            recorded.append(attempt.seed)
            progress(len(recorded), episodes)
            if len(recorded) == episodes:
                return tuple(recorded)
        raise ValueError(f"the expert of {task} solved {len(recorded)} of {len(seeds)} episodes only")


def _successes(expert: LiberoExpert, seeds: range, at_once: int) -> Iterator[Attempt]:
    for first in range(0, len(seeds), at_once):
        yield from (attempt for attempt in expert.attempt(seeds[first : first + at_once]) if attempt.success)
