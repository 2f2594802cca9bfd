"""What is asked with another tenant's names takes the same steps as where that tenant has never been.

So time tells nothing either. Steps are counted, not measured: which functions of ours the master runs for a request,
and how often; a file that is synced takes far longer than the rest.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import common
import joynexus
import services.master
from joynexus.wire import ErrorCode, Message, front
from joynexus.wire.messages import FRONT_REQUESTS
from services.master.bulk import BulkService
from services.master.core import MasterCore
from services.master.outbox import refuse
from services.master.policies import Policies
from services.master.policy import Policy
from tests.unit.master.test_verbs_foreign import ATTACKS
from tests.unit.master.verbs import Scene

OURS = tuple(str(Path(package.__file__).parent) for package in (services.master, common, joynexus))
DOORS = {MasterCore._ask.__code__, BulkService._serve.__code__}
"""Where a request comes in: what else the master does in the same turn, for others, is left out."""
TELLING = {front.Status}
"""It passes over all queues: how busy the shared roles are stands in its answer, too."""
Steps = Counter[str]


@contextmanager
def counting(steps: Steps) -> Iterator[None]:
    """Count the master's functions that are called for requests within the block."""
    inside: list[FrameType] = []
    passing: list[FrameType] = []  # generators at work: one counts once, however many things it passes

    def note(frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        if event == "call" and (inside or code in DOORS):
            if not inside:
                inside.append(frame)
            if code.co_flags & inspect.CO_GENERATOR:
                if any(frame is each for each in passing):
                    return
                passing.append(frame)
            if code.co_filename.startswith(OURS):
                steps[code.co_qualname] += 1
        elif event == "return" and inside and frame is inside[0]:
            inside.clear()

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def asked(scene: Scene, verb: type[Message], ids: dict[str, Any]) -> list[tuple[str, Steps]]:
    """Say all of a verb's row; return what was said, with the steps that it took."""
    for number in range(256):  # a blob store that was in use for a while has all its folders
        (scene.world.store._root / f"{number:02x}").mkdir(exist_ok=True)
    told = []
    for said in ATTACKS[verb](ids, scene.mine):
        message, buffers = said if isinstance(said, tuple) else (said, ())
        steps: Steps = Counter()
        with counting(steps):
            scene.world.say_as("b", message, buffers=buffers)
        told.append((repr(message), steps))
    return told


@pytest.mark.parametrize(
    "verb", [verb for verb in FRONT_REQUESTS if verb not in TELLING], ids=lambda verb: verb.__name__
)
def test_what_is_asked_takes_the_steps_that_it_takes_where_the_other_tenant_never_was(
    verb: type[Message], tmp_path: Path
) -> None:
    both, alone = Scene(tmp_path / "1"), Scene(tmp_path / "2", a_is_here=False)
    theirs, absent = asked(both, verb, both.ids), asked(alone, verb, both.ids)
    differing = [
        (message, more - less, less - more)
        for (message, more), (_, less) in zip(theirs, absent, strict=True)
        if more != less
    ]
    assert differing == []


def test_a_way_that_is_shorter_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that looks first whether anybody has such a policy would be found out."""
    get = Policies.get

    def careless(self: Policies, tenant: str, name: str) -> Policy:
        if not any(policy.name == name for policy in self.everywhere()):
            raise refuse(ErrorCode.NOT_FOUND, "nobody has that")
        return get(self, tenant, name)

    monkeypatch.setattr(Policies, "get", careless)
    both, alone = Scene(tmp_path / "1"), Scene(tmp_path / "2", a_is_here=False)
    assert asked(both, front.GetPolicy, both.ids) != asked(alone, front.GetPolicy, both.ids)


def test_every_verb_takes_steps(tmp_path: Path) -> None:
    for verb in FRONT_REQUESTS:
        scene = Scene(tmp_path / verb.__name__)
        assert max(steps.total() for _, steps in asked(scene, verb, scene.ids)) > 2
