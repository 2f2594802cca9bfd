"""Work in simulators for env workers (lane `simulator`)."""

from __future__ import annotations

from typing import Literal

from joynexus.bounds import Encoded, Many, Short, Table, Text
from joynexus.contract import Camera, Contract, Statistics
from joynexus.wire.base import Wire
from joynexus.wire.errors import Failure
from joynexus.wire.front import EpisodeResult


class DescribeSimulator(Wire, frozen=True, kw_only=True):
    """What is a simulator task like (lane `simulator`)? Answer: `SimulatorDescribed`.

    Attributes:
        cameras: pictures wanted; None takes the simulator's own choice.
        episode_limit: 0 takes the simulator's own.
        warmup_episodes: episodes to run with random actions, for statistics; 0 for none.
        seed: of the random actions, and of the first episode.
        trace: as in `TrainItem`.
    """

    task: str
    attempt: int
    tenant: str
    env: str
    cameras: tuple[Camera, ...] | None = None
    episode_limit: int = 0
    warmup_episodes: int = 0
    seed: int = 0
    trace: str = ""


class SimulatorDescribed(Wire, frozen=True, kw_only=True):
    """What a simulator task is like, or why it cannot be used.

    Attributes:
        statistics: of the states that random actions led to; of the actions their middle and half their range.
    """

    task: Short
    attempt: int
    contract: Contract | None = None
    instruction: Text = ""
    statistics: Statistics | None = None
    software: Table[Text] = {}
    error: Failure | None = None
    busy_s: float = 0.0


class Collect(Wire, frozen=True, kw_only=True):
    """Episodes are to be trained on: explore, and keep what was seen and done. Part of `Rollout`.

    Attributes:
        reward: as in `RlSpec`; with `success` an episode ends when it is solved.
        value: also ask what the last observation of an episode is worth that did not end by itself.
    """

    reward: Literal["dense", "success"]
    value: bool


class Rollout(Wire, frozen=True, kw_only=True):
    """Run episodes of a simulator with a fixed version (lane `simulator`). Answer: `RolloutDone`.

    The worker asks for actions with `WorkerAct`, for all its live rows at once.

    Attributes:
        seeds: one an episode; they may repeat where `draws` differ.
        draws: one an episode: seeds of what the policy draws in it; empty takes the episodes' seeds.
        collect: set for episodes that are to be trained on.
        trace: as in `TrainItem`.
    """

    task: str
    attempt: int
    tenant: str
    policy: str
    version: int
    contract: Contract
    chunk: int
    env: str
    seeds: tuple[int, ...]
    videos: tuple[int, ...] = ()
    """Seeds whose episodes are recorded."""
    episode_limit: int = 0
    execute: int = 0
    draws: tuple[int, ...] = ()
    collect: Collect | None = None
    trace: str = ""


class RolloutDone(Wire, frozen=True, kw_only=True):
    """Episodes in the order of the seeds asked for, or why they could not be run.

    Attributes:
        trajectories: blob digest of what was collected (`joynexus.simulation.trajectories`).
        trajectories_nbytes: its size.
    """

    task: Short
    attempt: int
    episodes: Many[EpisodeResult] = ()
    contract_digest: Short = ""
    software: Table[Text] = {}
    videos: Many[tuple[Short, int]] = ()
    trajectories: Short = ""
    trajectories_nbytes: int = 0
    error: Failure | None = None
    busy_s: float = 0.0


class WorkerAct(Wire, frozen=True, kw_only=True):
    """A rollout asks for actions on behalf of its task's tenant. Answer: `Actions`.

    Attributes:
        task, attempt: the piece of work it acts for; gives the tenant, policy and version.
        act: encoded `Act`; its arrays are the message's buffers.
    """

    task: Short
    attempt: int
    act: Encoded
