"""Tickets: how many rollouts may be under way, so that none is too old when it is trained on.

In: rollouts that begin, are trained on, or are dropped. Out: whether another one may begin. Never: a finished rollout
thrown away because it came late: producers are held back before they begin.

The formula is AReaL's staleness admission (`infra/staleness_manager.py`): with `batch` rollouts trained on for each
version, at version v there may begin

    min(max_running - running, (max_staleness + v + 1) * batch - (accepted + running))

more, where `accepted` counts all that ever finished and were not dropped. Of those, v * batch were trained on; so the
second term is (max_staleness + 1) * batch less the tickets that are out, which needs no count that a restart could get
wrong. A rollout that begins while fewer are out is trained on, oldest first, at most `max_staleness` versions after the
one that acted in it.
"""

from __future__ import annotations


class Tickets:
    """The staleness budget of one policy's rollouts.

    Args:
        batch: rollouts that are trained on for each version (at least 1).
        max_staleness: versions that may lie between the one that acted and the one that is trained; 0 is on-policy.
        max_running: rollouts that simulators run at once.
    """

    def __init__(self, *, batch: int, max_staleness: int, max_running: int) -> None:
        if batch < 1 or max_staleness < 0 or max_running < 1:
            raise ValueError("batch and max_running must be at least 1, max_staleness at least 0")
        self.limit = (max_staleness + 1) * batch
        self._max_running = max_running
        self._running: dict[int, int] = {}  # ticket -> version that acts in it
        self._finished: dict[int, int] = {}
        self._next = 1

    @property
    def out(self) -> int:
        """Tickets that are out: rollouts that run, and those that wait to be trained on."""
        return len(self._running) + len(self._finished)

    @property
    def running(self) -> int:
        """Rollouts that run."""
        return len(self._running)

    @property
    def capacity(self) -> int:
        """Rollouts that may begin now."""
        return max(0, min(self._max_running - self.running, self.limit - self.out))

    def issue(self, version: int) -> int | None:
        """Let a rollout of this version begin: return its ticket; None if it must wait until one is freed."""
        if not self.capacity:
            return None
        ticket, self._next = self._next, self._next + 1
        self._running[ticket] = version
        return ticket

    def finish(self, ticket: int) -> None:
        """A rollout has ended and waits to be trained on; KeyError if the ticket does not run."""
        self._finished[ticket] = self._running.pop(ticket)

    def train(self, ticket: int, version: int) -> int:
        """A rollout was trained on: free its ticket and return its staleness in versions.

        Args:
            version: newest version when the step on it began.

        Raises:
            KeyError: if the rollout has not finished, or the ticket was freed before.
        """
        return version - self._finished.pop(ticket)

    def drop(self, ticket: int) -> None:
        """Nobody trains on a rollout: free its ticket; one that was freed before is fine."""
        self._running.pop(ticket, None)
        self._finished.pop(ticket, None)
