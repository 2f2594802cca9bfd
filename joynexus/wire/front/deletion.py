"""Letting go of what is not needed any more. What was deleted already is answered alike."""

from __future__ import annotations

from joynexus.bounds import Short
from joynexus.wire.base import Wire


class DeletePolicy(Wire, frozen=True, kw_only=True):
    """Delete a policy with all its versions and states.

    Answer: `Done`, also if there is none; `CONFLICT` while a loop or a job drives it, or a job is about it.
    """

    policy: Short


class DeleteVersion(Wire, frozen=True, kw_only=True):
    """Delete one version of a policy; its number is not given again.

    Answer: `Done`, also if there is no such version; `NOT_FOUND` if there is no such policy; `CONFLICT` for the one
    that serves whoever asks for the newest, and while a job is about it.
    """

    policy: Short
    version: int


class DeleteDataset(Wire, frozen=True, kw_only=True):
    """Delete a data set of the tenant's own, with its prepared episodes.

    Answer: `Done`, also if there is none; `CONFLICT` while a job is about it; `FORBIDDEN` for a mounted one.
    """

    dataset: Short
