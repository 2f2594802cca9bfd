"""Where pictures come from: the master, asked over this role's connection.

In: a viewer's session. Out: what the master shows to it. Never: an answer kept for another session, or a decision of
its own about who may see what.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

from joynexus.wire import ErrorCode, JoyNexusError, Message, failure
from joynexus.wire.back import BeatAck, CloseSession, ClusterView, RedeemCode, ViewCluster, Viewer, ViewJob
from joynexus.wire.front import JobInfo

if TYPE_CHECKING:
    from common.runtime import WorkerRuntime

ANSWER_S = 4.0
"""How long an answer may take; the next question waits for it."""

Answer = TypeVar("Answer", bound=Message)


class Source(Protocol):
    """Answers for viewers.

    All raise JoyNexusError: `FORBIDDEN` if the session has ended, `NOT_FOUND` if there is no such job or code, anything
    else if there is no answer now.
    """

    async def view(self, session: str) -> ClusterView:
        """Return what a session may see of the cluster."""
        ...

    async def job(self, session: str, tenant: str, job: str, since: int) -> JobInfo:
        """Return a job, and its curve from index `since` on."""
        ...

    async def redeem(self, code: str) -> Viewer:
        """Return the session that a one-time code stands for."""
        ...

    async def close(self, session: str) -> None:
        """End a session."""
        ...


class MasterSource:
    """The master's answers.

    Args:
        runtime: the connection.
    """

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    async def view(self, session: str) -> ClusterView:
        """Ask for the picture that a session may see."""
        return await self._ask(ViewCluster(session=session), ClusterView)

    async def job(self, session: str, tenant: str, job: str, since: int) -> JobInfo:
        """Ask for a job."""
        return await self._ask(ViewJob(session=session, tenant=tenant, job=job, since=since), JobInfo)

    async def redeem(self, code: str) -> Viewer:
        """Redeem a code."""
        return await self._ask(RedeemCode(code=code), Viewer)

    async def close(self, session: str) -> None:
        """Have a session ended."""
        await self._ask(CloseSession(session=session), BeatAck)

    async def _ask(self, message: Message, kind: type[Answer]) -> Answer:
        try:
            answer = self._runtime.ask(message, timeout_s=ANSWER_S)
            packet = await asyncio.shield(asyncio.wrap_future(answer))  # the connection's answer is not ours to cancel
        except ValueError as error:  # a code or a name that cannot be sent
            raise JoyNexusError(failure(ErrorCode.NOT_FOUND, "there is no such thing")) from error
        except JoyNexusError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            # a code or a name that is longer than any
            raise JoyNexusError(failure(ErrorCode.NOT_FOUND, "there is no such thing")) from error
        if not isinstance(packet.message, kind):
            text = f"the master answered {type(packet.message).__name__}"
            raise JoyNexusError(failure(ErrorCode.INTERNAL, text))
        return packet.message
