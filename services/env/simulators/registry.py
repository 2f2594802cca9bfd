"""Names of simulator tasks: `family/task`, such as `metaworld/reach-v3` or `libero/libero_object/0`.

A family is a small module of this package with a subclass of `Family` in it (see there); to add one, list an instance
here. Contract and instruction of a task come from its simulator, once a pool has made it (`SimulatorPool.contract`).

In: a name and options. Out: a simulator, or a pool of them; in sentences what is wrong or missing. Never: an import of
a simulator before one is made.
"""

from __future__ import annotations

from difflib import get_close_matches

from joynexus.simulation.interface import Simulator, SimulatorError, SimulatorOptions
from joynexus.simulation.pool import Deadlines, SimulatorPool
from services.env.simulators.family import Family
from services.env.simulators.gymnasium import GymnasiumFamily
from services.env.simulators.libero import LiberoFamily
from services.env.simulators.maniskill import ManiSkillFamily
from services.env.simulators.metaworld import MetaWorldFamily

_ALL: tuple[Family, ...] = (MetaWorldFamily(), ManiSkillFamily(), LiberoFamily(), GymnasiumFamily())
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
DEFAULT_OPTIONS = SimulatorOptions()


def survey() -> dict[str, str]:
    """Return for each family why its tasks cannot run on this machine, empty for those that can."""
    return {name: family.missing() for name, family in FAMILIES.items()}


def prepare_process() -> None:
    """Have every family set its environment variables, before this process or one it starts imports its packages."""
    for family in FAMILIES.values():
        family.prepare()


def task_names() -> tuple[str, ...]:
    """Return every task that is known without its simulator."""
    return tuple(f"{name}/{task}" for name, family in FAMILIES.items() for task in family.tasks())


def family_of(name: str) -> Family:
    """Return the family of a task; ValueError with the most similar names if there is no such task."""
    first, _, task = name.partition("/")
    family = FAMILIES.get(first)
    if family is None:
        close = [f"{other}/{task}" for other in get_close_matches(first, FAMILIES, n=1)]
        close = close or get_close_matches(name, task_names(), n=3, cutoff=0.5)
        known = ", ".join(f"{family.name}/{family.example}" for family in FAMILIES.values())
        advice = f"did you mean {' or '.join(close)}?" if close else f"tasks are named like {known}"
        raise ValueError(f"there is no simulator task '{name[:80]}': {advice}")
    family.check(task)
    return family


def make_simulator(name: str, options: SimulatorOptions = DEFAULT_OPTIONS) -> Simulator:
    """Make an environment, in this process.

    Raises:
        ValueError: if there is no such task, or it cannot run with these options.
        SimulatorError: if the machine lacks something the simulator needs.
    """
    family = family_of(name)
    if problem := family.missing():
        raise SimulatorError(problem)
    family.prepare()
    return family.make(name.partition("/")[2], options)


def open_pool(
    name: str,
    rows: int,
    *,
    processes: int = 1,
    options: SimulatorOptions | None = None,
    deadlines: Deadlines | None = None,
) -> SimulatorPool:
    """Open a pool of a task's environments; see `SimulatorPool`.

    Raises:
        ValueError: if there is no such task.
    """
    family = family_of(name)
    family.prepare()  # worker processes inherit what it sets
    return SimulatorPool(
        name,
        rows,
        make=make_simulator,
        preload=family.preload,
        processes=processes,
        options=options,
        deadlines=deadlines,
        recycling=family.recycling,
    )
