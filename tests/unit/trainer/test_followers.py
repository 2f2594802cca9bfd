"""Promises of the end of a trainer that shares its rows; process/test_two_ranks.py has those of real followers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import cast

import pytest

from common.exits import EXIT_CONFIG
from common.settings import TrainerSettings
from joynexus.vla.backbones.spread import DeviceLost
from services.trainer import followers as module
from services.trainer.followers import Followers, end_like


class Dying:
    """A process that is gone for whoever speaks with it, and whose end nobody knows yet."""

    def __init__(self, code: int) -> None:
        self._code, self.ended = code, threading.Event()

    def wait(self) -> int:
        self.ended.wait()
        return self._code

    def kill(self) -> None:
        self.ended.set()


def lose(code: int, error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Leave the followers with an error; return as what this process would have ended."""
    judged = list[int]()
    dying = Dying(code)
    process = cast("subprocess.Popen[bytes]", dying)
    followers = Followers(TrainerSettings(), end=judged.append)
    followers.processes.append(process)
    watch = threading.Thread(target=followers._watch, args=(0, process))
    watch.start()
    if isinstance(error, DeviceLost):
        threading.Timer(0.1, dying.ended.set).start()
    monkeypatch.setattr(module, "LOST_S", 60.0)
    followers.__exit__(type(error) if error else None, error, None)
    watch.join()
    return judged


def test_a_line_that_breaks_before_the_followers_end_is_known_hides_it_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lose(-signal.SIGKILL, DeviceLost("its line is broken"), monkeypatch) == [-signal.SIGKILL]


@pytest.mark.parametrize("error", [None, ValueError("something else")])
def test_an_end_of_its_own_is_not_taken_for_a_followers(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lose(-signal.SIGKILL, error, monkeypatch) == []


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (-signal.SIGKILL, [-signal.SIGKILL]),
        (-signal.SIGSEGV, [-signal.SIGABRT]),
        (EXIT_CONFIG, [EXIT_CONFIG]),
        (0, [1]),
    ],
)
def test_whoever_judges_the_end_sees_what_struck_the_follower(
    code: int, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()

    def strike(_pid: int, number: int) -> None:
        ended.append(-number)
        raise SystemExit

    monkeypatch.setattr(os, "kill", strike)
    monkeypatch.setattr(os, "_exit", ended.append)
    with suppress(SystemExit):
        end_like(code)
    assert ended == ends
