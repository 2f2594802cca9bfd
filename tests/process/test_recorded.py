"""Recorded clients and workers of every protocol version that is still spoken, against a real master."""

from __future__ import annotations

import msgspec
import pytest

from joynexus.wire import Header, decode, limits
from joynexus.wire.front import Welcome
from tests.wire.conversation import RECORDED, Step, differences, load, replay
from tests.wire.record import peers

SPOKEN = range(limits.PROTOCOL_MIN, limits.PROTOCOL + 1)


def kinds_heard(steps: list[Step]) -> set[str]:
    return {msgspec.msgpack.decode(step.frames[1], type=Header).kind for step in steps if not step.sent}


@pytest.mark.parametrize("protocol", SPOKEN)
def test_whoever_was_released_with_a_protocol_is_understood_and_understands(protocol: int) -> None:
    """A whole client and one worker of each role, as they spoke then: what they hear has all that they look for."""
    steps = load(protocol)
    with peers() as speakers:
        assert list(replay(steps, speakers)) == []
    (welcome,) = [
        message for step in steps if not step.sent and isinstance(message := decode(step.frames).message, Welcome)
    ]
    assert welcome.protocol == protocol


def test_what_is_recorded_is_a_whole_conversation() -> None:
    heard = kinds_heard(load(limits.PROTOCOL))
    assert {
        "welcome", "registered", "beat_ack", "policy_info", "lease", "accepted", "train_group", "op_result",
        "blob_data", "blob_offset", "weights_offer", "predict_group", "actions", "prepare_dataset", "dataset_info",
        "sample_indices", "job_info", "rollout", "usage_report", "cluster_status", "environment_offered",
        "version_info", "failure",
    } <= heard  # fmt: skip


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ({"a": "x"}, {"a": "y", "new": [1]}, []),
        ({"a": "x"}, {}, [".a is gone"]),
        ({"a": "x"}, {"a": 3}, [".a was 'x' and is 3"]),
        ({"a": [{"b": "x"}]}, {"a": [{"c": "x"}]}, [".a.0.b is gone"]),
        ({"a": [1, 2]}, {"a": [1]}, [".a is no list of 2 any more"]),
        ({"a": 1}, {}, []),
    ],
)
def test_what_an_old_side_misses_is_told(then: object, now: object, why: list[str]) -> None:
    assert list(differences(then, now, {})) == why


def test_ids_of_then_are_those_of_now_in_what_is_said() -> None:
    ids: dict[str, str] = {}
    assert list(differences({"lease": "0" * 32}, {"lease": "f" * 32}, ids)) == []
    assert ids == {"0" * 32: "f" * 32}


def test_every_protocol_that_is_spoken_is_recorded() -> None:
    assert {int(folder.name) for folder in RECORDED.iterdir() if folder.is_dir()} >= set(SPOKEN)
