"""What of a host's words counts: offers, results and failures from machines that nobody here controls.

In: what a host said, and what it was asked. Out: the same within bounds, or a failure of the task in one sentence.
Never: trust in a size, a count, a number or a digest; or an exception for anything that a host can say.
"""

from __future__ import annotations

import re

import msgspec

from joynexus.contract import Contract, Statistics
from joynexus.specs import NAME_PATTERN
from joynexus.wire import ErrorCode, Failure, JoyNexusError, failure, limits
from joynexus.wire.back import Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.hosted import OfferEnvironment
from services.master.checks import MAX_STEPS, check_contract, check_statistics
from services.master.outbox import refuse
from services.master.plan import has_ended

MAX_CREDIT = 64
MAX_SOFTWARE = 32
"""Entries in what a host says of its software."""
MAX_REWARD = 1e30
"""Of an episode; sums of such stay finite."""
MAX_WORDS = 400
"""Characters of a sentence that a host says."""
_DIGEST = re.compile("[0-9a-f]{0,64}")
_TELLABLE = frozenset(
    {
        ErrorCode.INVALID,
        ErrorCode.BAD_DATA,
        ErrorCode.CONTRACT_MISMATCH,
        ErrorCode.TOO_LARGE,
        ErrorCode.UNAVAILABLE,
        ErrorCode.DEADLINE,
    }
)
"""What may have gone wrong on a tenant's machine; anything else that a host says counts as `BAD_DATA`."""


def check_offer(offer: OfferEnvironment) -> None:
    """Refuse an offer that cannot be; JoyNexusError `INVALID`."""
    if not NAME_PATTERN.fullmatch(offer.name):
        sentence = f"'{offer.name[:80]}' cannot name an environment: use 1 to 64 of a-z, 0-9, '-' and '_'"
        raise refuse(ErrorCode.INVALID, sentence)
    if not 1 <= len(offer.incarnation) <= 64:
        raise refuse(ErrorCode.INVALID, "incarnation must be an id of 1 to 64 characters")
    if not 1 <= offer.credit <= MAX_CREDIT:
        raise refuse(ErrorCode.INVALID, f"credit must lie between 1 and {MAX_CREDIT}, not {offer.credit}")
    if offer.software != _software(offer.software):
        sentence = f"software has at most {MAX_SOFTWARE} entries of 64 characters each, on one line"
        raise refuse(ErrorCode.INVALID, sentence)
    _check_environment(offer.contract, offer.instruction, None)


def checked_rollout(env: str, asked: Rollout, said: RolloutDone, stored: int) -> RolloutDone:
    """Return what counts of a page of episodes.

    Args:
        env: name of the task, for sentences.
        asked: what was to be done.
        said: what the host answered.
        stored: bytes of the blob with its trajectories that the tenant has; 0 if it has none.
    """
    task, attempt = said.task, said.attempt
    if said.error is not None:
        return RolloutDone(task=task, attempt=attempt, error=_checked_failure(env, said.error))
    episodes = tuple(msgspec.structs.replace(one, failure=_words(one.failure), env="") for one in said.episodes)
    problem = _problem(asked, msgspec.structs.replace(said, episodes=episodes), stored)
    if problem:
        sentence = f"{env} gave a result that cannot be: {problem}"
        return RolloutDone(task=task, attempt=attempt, error=failure(ErrorCode.BAD_DATA, sentence))
    return RolloutDone(  # without its seconds: nobody is charged for those of the tenant's own machine
        task=task,
        attempt=attempt,
        episodes=episodes,
        contract_digest=said.contract_digest,
        software=_software(said.software),
        trajectories=said.trajectories,
        trajectories_nbytes=stored,
    )


def checked_description(env: str, said: SimulatorDescribed) -> SimulatorDescribed:
    """Return what counts of a description; `env` names the task in sentences."""
    task, attempt, error = said.task, said.attempt, said.error
    if error is not None:
        return SimulatorDescribed(task=task, attempt=attempt, error=_checked_failure(env, error))
    try:
        _check_environment(said.contract, said.instruction, said.statistics)
    except JoyNexusError as problem:
        sentence = f"{env} gave a description that cannot be: {problem.failure.message}"
        return SimulatorDescribed(task=task, attempt=attempt, error=failure(ErrorCode.BAD_DATA, sentence))
    return msgspec.structs.replace(said, software=_software(said.software), busy_s=0.0)


def _problem(asked: Rollout, said: RolloutDone, stored: int) -> str:
    """Say what is wrong with a page of episodes, as a clause; empty if nothing is."""
    if tuple(episode.seed for episode in said.episodes) != asked.seeds:
        return f"the seeds of its {len(said.episodes)} episodes are not the {len(asked.seeds)} that were asked for"
    limit = asked.episode_limit or asked.contract.episode_limit or MAX_STEPS
    if any(not 0 <= episode.steps <= limit for episode in said.episodes):
        return f"an episode has less than 0 or more than {limit} steps"
    if any(not abs(episode.reward) <= MAX_REWARD for episode in said.episodes):  # also refuses NaN
        return f"the reward of an episode is no number within ±{MAX_REWARD:g}"
    if said.videos or any(episode.video for episode in said.episodes):
        return "it has videos, which are not taken from hosts"
    if said.trajectories and asked.collect is None:
        return "it has trajectories that nobody asked for"
    if asked.collect is not None and not said.trajectories and any(map(has_ended, said.episodes)):
        return "its trajectories are missing"
    if said.trajectories and not stored:
        return "its trajectories were not uploaded"
    if not _DIGEST.fullmatch(said.contract_digest):
        return "the digest of its contract is none"
    return ""


def _checked_failure(env: str, said: Failure) -> Failure:
    code = said.code if said.code in _TELLABLE else ErrorCode.BAD_DATA
    return failure(code, f"{env}: {_words(said.message)}")


def _words(said: str) -> str:
    """One line that a log or a terminal may show as it is."""
    start = said[: 2 * MAX_WORDS]
    return " ".join("".join(char if char.isprintable() else " " for char in start).split())[:MAX_WORDS]


def _software(said: dict[str, str]) -> dict[str, str]:
    return {_words(name)[:64]: _words(version)[:64] for name, version in list(said.items())[:MAX_SOFTWARE]}


def _check_environment(contract: Contract | None, instruction: str, statistics: Statistics | None) -> None:
    if contract is None:
        raise refuse(ErrorCode.INVALID, "its contract is missing")
    check_contract(contract)
    count, most = len(instruction), limits.MAX_INSTRUCTION_CHARS
    if count > most:
        raise refuse(ErrorCode.INVALID, f"its instruction has {count} characters: give one of at most {most}")
    if statistics is not None:
        check_statistics(statistics, contract)
