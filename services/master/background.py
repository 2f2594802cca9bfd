"""What takes long, in threads of its own: one piece of an owner's work at a time.

In: pieces of work, each with its owner. Out: the work, done. Never: one owner's work behind another's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from common.telemetry import get_logger

log = get_logger(__name__)

Work = Callable[[], object]


class Background:
    """Does work; an owner that has some has a thread.

    Args:
        failed: called if work raises.
    """

    def __init__(self, failed: Callable[[], object]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Work]] = {}  # what is done now comes first in each

    def do(self, owner: str, work: Work) -> None:
        """Have work done behind the owner's earlier work."""
        with self._lock:
            queue = self._queues.setdefault(owner, deque())
            queue.append(work)
            if len(queue) > 1:
                return
        thread = threading.Thread(target=self._guarded, args=(owner,), name=f"background {owner}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread: then it is done here, and others wait
            self._guarded(owner)

    def _guarded(self, owner: str) -> None:
        try:
            work: Work | None = self._queues[owner][0]
            while work is not None:
                work()
                work = self._next(owner)
        except Exception:
            log.critical("thread_failed", thread="background", exc_info=True)
            self._failed()

    def _next(self, owner: str) -> Work | None:
        """The first piece is done: return the one behind it."""
        with self._lock:
            queue = self._queues[owner]
            queue.popleft()
            if queue:
                return queue[0]
            del self._queues[owner]
            return None
