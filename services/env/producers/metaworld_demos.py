"""MetaWorld's scripted experts at work: `Expert`.

In: a task, seeds. Out: recordings. Never: anything in them that the expert saw and a policy would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from joynexus.contract import Contract
from joynexus.simulation.episodes import Actions, Question, run_episodes
from joynexus.simulation.interface import SimulatorOptions, StepResult
from services.env.producers.recording import Recording
from services.env.simulators.metaworld import expert
from services.env.simulators.registry import open_pool


class MetaWorldExpert:
    """The expert of one task.

    Args:
        task: such as `metaworld/reach-v3`.
        options: cameras and episode limit.
        processes: worker processes, one environment each.
    """

    def __init__(self, task: str, options: SimulatorOptions, processes: int) -> None:
        self._policy = expert(task.partition("/")[2])
        self._pool = open_pool(task, processes, processes=processes, options=options)

    @property
    def contract(self) -> Contract:
        """The simulator's."""
        return self._pool.contract

    @property
    def instruction(self) -> str:
        """Task text."""
        return self._pool.instruction

    def record(self, seeds: Sequence[int]) -> list[Recording]:
        """Act in the episodes of these seeds."""
        steps: dict[int, list[tuple[Question, Actions]]] = {}

        def act(questions: list[Question]) -> Actions:
            return np.stack([self._policy(question.observation.state)[None] for question in questions])

        def on_step(question: Question, actions: Actions, _: StepResult) -> None:
            if question.step == 0:
                steps[question.seed] = []
            steps[question.seed].append((question, actions))

        limit = self.contract.episode_limit
        recordings = []
        for result in run_episodes(self._pool, act, seeds, episode_limit=limit, on_step=on_step):
            taken = steps.pop(result.seed, [])  # none if its simulator was lost before the first step
            recordings.append(
                Recording(
                    seed=result.seed,
                    success=result.success,
                    states=np.array([question.observation.state for question, _ in taken], np.float32),
                    actions=np.array([actions[0] for _, actions in taken], np.float32),
                    images=tuple(zip(*(question.observation.images for question, _ in taken), strict=True)),
                )
            )
        return recordings

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
