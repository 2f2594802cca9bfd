"""What the host of a tenant's own environment and the master say to each other (front domain, control socket).

A host is a process on the tenant's machine that runs the tenant's environment (`joynexus env serve`). It is a tenant
like any other: it dials, asks, and is answered; every request here is safe to repeat. Work is a state that both sides
compare, never an event that can get lost: a host says what it has, and hears what else it is to do and what nobody
wants any more. As with workers, a result counts only while its (task, attempt) is assigned to this incarnation.
"""

from __future__ import annotations

from joynexus.bounds import Encoded, Many, Short, Table, Text
from joynexus.contract import Contract
from joynexus.wire.back import DescribeSimulator, Rollout, RolloutDone, SimulatorDescribed
from joynexus.wire.base import Wire

OWN = "own"
"""First part of the names of such tasks, where other tasks have their simulator: `own/<name>`."""


class OfferEnvironment(Wire, frozen=True, kw_only=True):
    """Here is an environment, as task `own/<name>` of this tenant alone. Answer: `EnvironmentOffered`.

    Asked first, and again after `NOT_REGISTERED`. Several hosts may offer one name: they share its work.

    Attributes:
        name: of the environment.
        incarnation: random id of this process's life.
        credit: pieces of work that it does at once.
        contract: what observations and actions mean; its cameras are those that the environment has.
        instruction: task text.
        software: versions of what made the environment, for status.
    """

    name: Short
    incarnation: Short
    credit: int
    contract: Contract
    instruction: Text
    software: Table[Text] = {}


class EnvironmentOffered(Wire, frozen=True, kw_only=True):
    """Welcome: `env` is the task's name in specs. Pull at once, and again after every answer."""

    env: str


class PullWork(Wire, frozen=True, kw_only=True):
    """I live; what is there to do beside what I `have`, by task and attempt? Answer: `PulledWork`.

    The answer comes as soon as there is something to say, or with nothing after some seconds. A host that does not ask
    again for a while is lost, and its work is given to others.
    """

    incarnation: Short
    have: Many[tuple[Short, int]] = ()


class PulledWork(Wire, frozen=True, kw_only=True):
    """One piece of work at most, which `HostDone` answers, and which tasks nobody wants any more."""

    rollout: Rollout | None = None
    describe: DescribeSimulator | None = None
    cancelled: tuple[str, ...] = ()


class HostAct(Wire, frozen=True, kw_only=True):
    """A rollout asks for actions. Answer: `Actions`.

    Attributes:
        task, attempt: the piece of work it acts for; gives the policy and version.
        act: encoded `Act`; its arrays are the message's buffers.
    """

    incarnation: Short
    task: Short
    attempt: int
    act: Encoded


class HostDone(Wire, frozen=True, kw_only=True):
    """A piece of work is done: the answer that belongs to it is set. Answer: `Done`, or `STALE`: drop it.

    Trajectories that it names were uploaded before.
    """

    incarnation: Short
    rollout: RolloutDone | None = None
    described: SimulatorDescribed | None = None


class WithdrawEnvironment(Wire, frozen=True, kw_only=True):
    """I go; give what I have to others. Answer: `Done`."""

    incarnation: Short
