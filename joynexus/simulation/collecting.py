"""Keep what a policy saw and did in its episodes, for whoever trains on it.

In: questions to the policy and its answers, what its chunks led to, how episodes ended. Out: `Trajectories`. Never: a
step of an episode that was lost on the way, or of more versions than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from joynexus.simulation.asking import Answer, Explored
from joynexus.simulation.episodes import Actions, Episode, EpisodeResult, Question
from joynexus.simulation.interface import SimObservation, StepResult
from joynexus.simulation.trajectories import Floats, Trajectories
from joynexus.wire import ErrorCode, JoyNexusError, failure


class _Decision(NamedTuple):
    """A question, what was drawn for it, and what that led to."""

    observation: SimObservation
    sample: Floats
    log_prob: Floats
    value: Floats
    rewards: Floats
    executed: int


class _Episode:
    def __init__(self) -> None:
        self.decisions: list[_Decision] = []
        self.success = self.terminated = False
        self.last_value: Floats | None = None


class Collector:
    """Stands between `run_episodes` and a policy that explores: its methods are `act` and `on_step` there.

    Args:
        ask: asks the policy.
        version: the one that must act in every row.
        reward: `dense` keeps the simulator's; `success` pays 1 once, for the step that solved the task.
    """

    def __init__(
        self, ask: Callable[[list[Question]], Answer], version: int, reward: Literal["dense", "success"]
    ) -> None:
        self._ask, self._version, self._reward = ask, version, reward
        self._episodes: dict[Episode, _Episode] = {}
        self._drawn: dict[Episode, tuple[Explored, int]] = {}

    def act(self, questions: list[Question]) -> Actions:
        """Ask the policy; actions [R, chunk, A].

        Raises:
            JoyNexusError: as `Asker`; UNAVAILABLE if another version acted, so that the episodes are done again.
        """
        answer = self._ask(questions)
        if answer.version != self._version:
            sentence = f"version {answer.version} of the policy acted where version {self._version} was to"
            raise JoyNexusError(failure(ErrorCode.UNAVAILABLE, sentence))
        if answer.explored is None:
            raise ValueError("the policy did not tell how it drew its actions")
        for row, question in enumerate(questions):
            if question.last:
                self._episodes[question.episode].last_value = answer.explored.value[row]
            else:
                self._drawn[question.episode] = answer.explored, row
        return answer.actions

    def on_step(self, question: Question, actions: Actions, result: StepResult) -> None:
        """Keep what a chunk led to."""
        if question.step == 0:  # also after a loss, which leaves no trace
            self._episodes[question.episode] = _Episode()
        episode = self._episodes[question.episode]
        explored, row = self._drawn.pop(question.episode)
        rewards = np.zeros(explored.log_prob.shape[1], np.float32)
        if self._reward == "dense":
            rewards[: result.steps] = result.rewards
        elif result.success and not episode.success:
            rewards[result.steps - 1] = 1.0
        episode.decisions.append(
            _Decision(
                question.observation,
                explored.sample[row],
                explored.log_prob[row],
                explored.value[row],
                rewards,
                result.steps,
            )
        )
        episode.success = episode.success or result.success
        episode.terminated = result.terminated

    def trajectories(self, results: Sequence[EpisodeResult], contract: str, instruction: str) -> Trajectories | None:
        """Return the episodes that were run to their end, in the order of `results`; None if there are none.

        Args:
            results: what `run_episodes` returned.
            contract: digest of the policy's contract.
            instruction: task text.
        """
        ended = [result for result in results if not result.lost]
        if not ended:
            return None
        episodes = [self._episodes[Episode(result.seed, result.draw)] for result in ended]
        decisions = [decision for episode in episodes for decision in episode.decisions]
        nothing = np.zeros_like(decisions[0].value)
        return Trajectories(
            version=self._version,
            contract=contract,
            instruction=instruction,
            lengths=np.array([len(episode.decisions) for episode in episodes], np.int64),
            seeds=np.array([result.seed for result in ended], np.int64),
            draws=np.array([result.draw for result in ended], np.int64),
            success=np.array([episode.success for episode in episodes], np.bool_),
            terminated=np.array([episode.terminated for episode in episodes], np.bool_),
            last_value=np.stack([nothing if e.last_value is None else e.last_value for e in episodes]),
            state=np.stack([decision.observation.state for decision in decisions]),
            images=tuple(
                np.stack(view) for view in zip(*(decision.observation.images for decision in decisions), strict=True)
            ),
            sample=np.stack([decision.sample for decision in decisions]),
            log_prob=np.stack([decision.log_prob for decision in decisions]),
            value=np.stack([decision.value for decision in decisions]),
            rewards=np.stack([decision.rewards for decision in decisions]),
            executed=np.array([decision.executed for decision in decisions], np.int64),
        )
