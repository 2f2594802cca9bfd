"""What a family of simulators is to the env role: one small module with one `Family` in it.

In: a task's name without the family's (`reach-v3`, `libero_object/0`), options. Out: the simulator, or in one sentence
what is wrong with the name or missing on this machine. Never: an import of a simulator before `make`; the env service
asks every family what it misses when it starts.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from difflib import get_close_matches
from typing import ClassVar

from joynexus.simulation.interface import Simulator, SimulatorOptions
from joynexus.simulation.process import Recycling


class Family(ABC):
    """One family; a module of this package makes a subclass, and `registry.FAMILIES` lists an instance of it.

    Attributes:
        name: first part of its tasks' names.
        example: a task's name without the family's, for messages.
        rows: environments that a worker process hosts: one of a heavy simulator, several of a light one.
        preload: modules that are imported once for all worker processes, which are forked from there; never one that
            opens a graphics context when it is imported, since a context does not survive a fork.
        recycling: when a worker process is replaced between episodes.
        packages: distributions on whose versions its numbers depend.
    """

    name: ClassVar[str]
    example: ClassVar[str]
    rows: ClassVar[int] = 1
    preload: ClassVar[tuple[str, ...]] = ()
    recycling: ClassVar[Recycling] = Recycling()
    packages: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks' names that are known without the simulator, without the family's."""

    def check(self, task: str) -> None:
        """Refuse a name that no task has: ValueError with the most similar ones; here, one that is not in `tasks`."""
        if task not in self.tasks():
            raise ValueError(f"there is no simulator task '{self.name}/{task[:80]}': {self.similar(task)}")

    @abstractmethod
    def missing(self) -> str:
        """Say in one sentence which package must be installed here, or nothing if tasks can run; without importing."""

    def pictures_missing(self) -> str:
        """Say what must be installed here to draw pictures, or nothing; where tasks also run without pictures."""
        return ""

    def prepare(self) -> None:  # noqa: B027 - most families need nothing
        """Set environment variables that its packages read when imported; in each process before it may import them."""

    def renderer(self) -> str:
        """Say what draws pictures here, for records; empty if nothing does."""
        return ""

    @abstractmethod
    def make(self, task: str, options: SimulatorOptions) -> Simulator:
        """Make an environment of a task that `check` let pass, in this process.

        Raises:
            ValueError: if the task cannot run with these options.
            SimulatorError: if the machine lacks something.
        """

    def similar(self, task: str) -> str:
        """Return advice for a misspelt name."""
        close = [f"{self.name}/{name}" for name in get_close_matches(task, self.tasks(), n=3, cutoff=0.5)]
        return (
            f"did you mean {' or '.join(close)}?" if close else f"its tasks are named like {self.name}/{self.example}"
        )

    def software(self) -> dict[str, str]:
        """Return the versions that numbers of its simulators depend on, and what draws."""
        versions = {"renderer": self.renderer()}
        for package in (*self.packages, "numpy"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return versions
