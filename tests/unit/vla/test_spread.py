"""Promises of a backbone on several devices that need no second process; process/test_two_ranks.py has the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from torch import Tensor

from joynexus.vla.backbones.spread import Calibrate, Calibrated, DeviceLost, Hello, Made, Said, SpreadBackbone, hello
from joynexus.vla.feature import Observation
from tests.unit.workers import NoiseBackbone


class Script:
    """A follower that says what a test tells it to."""

    def __init__(self, *lines: Said) -> None:
        self.lines, self.told, self.sent = list(lines), list[Said](), list[Tensor]()

    def tell(self, message: Said) -> None:
        self.told.append(message)

    def hear(self) -> Said:
        return self.lines.pop(0)

    def send(self, tensor: Tensor) -> None:
        self.sent.append(tensor)

    def receive(self, tensor: Tensor) -> None:
        tensor.zero_()


def spread(*lines: Said, followers: int = 1) -> tuple[SpreadBackbone, list[Script]]:
    own = NoiseBackbone()
    scripts = [Script(hello(own), *lines) for _ in range(followers)]
    return SpreadBackbone(own, scripts), scripts


def rows(count: int) -> Sequence[Observation]:
    return [Observation((), "go there") for _ in range(count)]


@pytest.mark.parametrize("field", Hello.__struct_fields__)
def test_a_device_with_other_weights_or_kernels_takes_no_part(field: str) -> None:
    own = NoiseBackbone()
    other = msgspec.structs.replace(hello(own), **{field: "other"})
    with pytest.raises(ValueError, match="device 2 of 2 cannot share the backbone's rows"):
        SpreadBackbone(own, [Script(other)])


@pytest.mark.parametrize(("count", "parts"), [(1, (1,)), (2, (1, 1)), (3, (1, 1, 1)), (5, (2, 1, 2)), (6, (2, 2, 2))])
def test_rows_are_shared_out_in_order_and_no_device_is_asked_for_none(count: int, parts: tuple[int, ...]) -> None:
    backbone, scripts = spread(followers=2)
    for script, part in zip(scripts, parts[1:], strict=False):
        script.lines.append(Made((3,) * part, 0.5))
    assert len(backbone.forward(rows(count))) == count
    assert [len(script.told[0].instructions) for script in scripts if script.told] == list(parts[1:])
    assert backbone.take_far_busy() == 0.5 * (len(parts) - 1)
    assert backbone.take_far_busy() == 0.0, "what was taken is not taken again"


@pytest.mark.parametrize(("shortage", "kind"), [(True, MemoryError), (False, RuntimeError)])
def test_a_followers_failure_is_raised_as_what_it_was_and_costs(shortage: bool, kind: type[Exception]) -> None:
    backbone, _ = spread(Made((), 0.25, error="it failed", shortage=shortage))
    with pytest.raises(kind, match="it failed"):
        backbone.forward(rows(2))
    assert backbone.take_far_busy() == 0.25


def test_a_leader_whose_own_part_fails_hears_the_others_out_first() -> None:
    backbone, (script,) = spread(Made((3,), 0.0), Made((3,), 0.0))
    backbone._own.faults.append(RuntimeError("here"))
    with pytest.raises(RuntimeError, match="here"):
        backbone.forward(rows(2))
    assert len(backbone.forward(rows(2))) == 2
    assert not script.lines


def test_a_leader_without_room_for_the_others_features_asks_nobody_and_stays_in_step() -> None:
    backbone, (script,) = spread(Made((3,), 0.0))
    backbone.hidden_size, narrow = 1 << 55, backbone.hidden_size
    with pytest.raises(RuntimeError, match=r"memory|size"):
        backbone.forward(rows(2))
    assert not script.told
    backbone.hidden_size = narrow
    assert len(backbone.forward(rows(2))) == 2


def test_whether_groups_keep_bits_is_the_leaders_word() -> None:
    backbone, (script,) = spread(Calibrated("all the same"), Made((3,), 0.0))
    backbone.group_exactly = False
    assert backbone.calibrate().endswith("device 2: all the same")
    backbone.forward(rows(2))
    assert isinstance(script.told[0], Calibrate)
    assert [message.group_exactly for message in script.told] == [False, False]
    assert backbone._own.groups[-1] == 1


def test_a_follower_that_says_something_else_is_lost() -> None:
    for line, sentence in (
        (Calibrated("not now"), "said Calibrated where Made was due"),
        (Made((3, 3), 0.0), "features of (3, 3) tokens of samples that have (3,)"),
        (Made((4,), 0.0), "features of (4,) tokens of samples that have (3,)"),
    ):
        backbone, _ = spread(line)
        with pytest.raises(DeviceLost, match=re.escape(sentence)):
            backbone.forward(rows(2))
