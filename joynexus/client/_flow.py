"""A verb is written once, as a flow, and used twice: `blocking`, and `awaiting` with asyncio.

In: a generator that yields what has to be waited for, and returns the verb's result. Out: a method that waits for it,
or one that awaits it. Never: a blocked event loop: what takes time in this process (hashing, files) goes to a thread.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

Step = Future[Any] | Callable[[], Any] | float
"""What a flow waits for: an answer of the service, work of this process, or seconds."""
Flow = Generator[Step, Any, T]


def answered(future: Future[T]) -> Flow[T]:
    """Wait for an answer of the service."""
    answer: T = yield future
    return answer


def worked(work: Callable[[], T]) -> Flow[T]:
    """Do in this process what may take long: hash, read, write, convert."""
    result: T = yield work
    return result


def paused(seconds: float) -> Flow[None]:
    """Let time pass."""
    yield seconds


def run(flow: Flow[T]) -> T:
    """Follow a flow to its end, waiting in this thread."""
    resume, value = flow.send, None
    while True:
        try:
            step = resume(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            resume, value = flow.send, _wait(step)
        except BaseException as error:  # the flow's to handle, and its files to close
            resume, value = flow.throw, error


async def follow(flow: Flow[T]) -> T:
    """Follow a flow to its end on the event loop; cancelling this ends the waiting, not what the service was asked."""
    resume, value = flow.send, None
    while True:
        try:
            step = resume(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            resume, value = flow.send, await _await(step)
        except BaseException as error:  # as above; a cancellation passes through the flow too
            resume, value = flow.throw, error


def blocking(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[S, P], T]:
    """Make the verb that waits."""

    @functools.wraps(flow)
    def verb(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(flow(self, *args, **kwargs))

    verb.__name__ = flow.__name__.lstrip("_")
    return verb


def awaiting(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the verb that is awaited."""

    @functools.wraps(flow)
    async def verb(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await follow(flow(self, *args, **kwargs))

    verb.__name__ = flow.__name__.lstrip("_")
    return verb


def _wait(step: Step) -> Any:
    if isinstance(step, Future):
        return step.result()
    return step() if callable(step) else time.sleep(step)


async def _await(step: Step) -> Any:
    if isinstance(step, Future):
        return await asyncio.wrap_future(step)
    return await (asyncio.to_thread(step) if callable(step) else asyncio.sleep(step))
