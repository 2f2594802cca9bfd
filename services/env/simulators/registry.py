"""Names of simulator tasks: `family/task`, such as `metaworld/reach-v3`.

In: a name and options. Out: the task's contract and instruction, known without the simulator; or the simulator itself.
Never: an import of a simulator before one is
made.
"""

from __future__ import annotations

from difflib import get_close_matches

from joynexus.contract import Contract
from joynexus.simulation.interface import Simulator, SimulatorOptions
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env.simulators import metaworld, metaworld_tasks

DEFAULT_OPTIONS = SimulatorOptions()
PRELOAD = ("metaworld",)  # what a fork server imports once for all worker processes, where it is installed


def prepare_process() -> None:
    """Choose how pictures are drawn, before a simulator is imported in this process or in one that it starts."""
    metaworld.choose_renderer()


def task_names() -> tuple[str, ...]:
    """Return every task that can be asked for."""
    return tuple(f"{metaworld_tasks.FAMILY}/{task}" for task in sorted(metaworld_tasks.INSTRUCTIONS))


def check_task(name: str) -> str:
    """Return `name` if it is a task; ValueError with the most similar ones otherwise."""
    if name not in task_names():
        close = get_close_matches(name, task_names(), n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(close)}?" if close else "tasks are named like metaworld/reach-v3"
        raise ValueError(f"there is no simulator task '{name[:80]}': {advice}")
    return name


def instruction_of(name: str) -> str:
    """Return a task's text; ValueError if there is no such task."""
    return metaworld_tasks.INSTRUCTIONS[check_task(name).partition("/")[2]]


def contract_of(name: str, options: SimulatorOptions = DEFAULT_OPTIONS) -> Contract:
    """Return a task's contract under some options; ValueError if there is no such task or it cannot do that."""
    check_task(name)
    return metaworld_tasks.contract(options)


def make_simulator(name: str, options: SimulatorOptions = DEFAULT_OPTIONS) -> Simulator:
    """Make an environment, in this process.

    Raises:
        ValueError: as `contract_of`.
        SimulatorError: if the machine lacks something the simulator needs.
    """
    contract = contract_of(name, options)
    return metaworld.MetaWorld(name.partition("/")[2], contract, end_at_success=options.end_at_success)


def open_pool(
    name: str,
    rows: int,
    *,
    processes: int = 1,
    options: SimulatorOptions | None = None,
    deadlines: Deadlines | None = None,
    recycle_after: int = 0,
) -> SimulatorPool:
    """Open a pool of a task's environments; see `SimulatorPool`.

    Raises:
        ValueError: as `contract_of`.
    """
    options = options or DEFAULT_OPTIONS
    contract_of(name, options)
    prepare_process()  # the fork server inherits what it sets
    return SimulatorPool(
        name,
        rows,
        make=make_simulator,
        preload=PRELOAD,
        processes=processes,
        options=options,
        deadlines=deadlines,
        recycle_after=recycle_after,
    )
