"""The log of the test: what it did, what the Engine did of itself, what was found, with times.

In: lines; the Engine's events. Out: the same on the terminal and in a file. Never: a path or an address of the machine.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.compose.engine import PROJECT

EVENTS = ("start", "die", "health_status", "oom")


class Log:
    """Lines with the seconds since its beginning.

    Args:
        file: where they are kept.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w")
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._events: subprocess.Popen[str] | None = None

    def __call__(self, line: str) -> None:
        """Add a line."""
        with self._lock:
            text = f"{self.seconds:7.1f} s  {line}"
            print(text, flush=True)
            print(text, file=self._file, flush=True)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start

    def __enter__(self) -> Log:
        filters = [f"label=com.docker.compose.project={PROJECT}", "label=com.docker.compose.oneoff=False"]
        filters += [f"event={event}" for event in EVENTS]
        command = ["docker", "events", "--format", "{{json .}}"]
        command += [word for filter in filters for word in ("--filter", filter)]
        self._events = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._events is not None
        self._events.terminate()
        self._events.wait()

    def _listen(self) -> None:
        assert self._events is not None
        assert self._events.stdout is not None
        for line in self._events.stdout:
            event = json.loads(line)
            about = event["Actor"]["Attributes"]
            code = f", exit code {about['exitCode']}" if "exitCode" in about else ""
            self(f"    engine: {about['name'].removeprefix(PROJECT + '-')} {event['Action']}{code}")
