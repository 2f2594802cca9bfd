"""How often each tenant may ask: alone and together, again after a pause, whatever it is that it asks."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from common.refusals import Refusals
from joynexus.keys import KeyEntry, KeyPair, KeyRegistry
from joynexus.tenants import TenantLimits
from joynexus.wire import Buffer, ErrorCode, encode
from joynexus.wire.errors import TOO_OFTEN
from joynexus.wire.front import Ping
from services.master import rates
from services.master.events import Door, FrontMessage, Peer
from services.master.gate import Refused
from services.master.rates import BURST_S, MOST_S, REFUSALS_PER_S, Rates
from services.master.reception import Reception

PING = encode(Ping(), id="m1")
GARBAGE: list[Buffer] = [b"no", b"message"]


def admitted(rates: Rates, tenant: str, now: float, times: int) -> int:
    return sum(not rates.ask(tenant, now) for _ in range(times))


def test_a_tenant_may_ask_as_much_as_in_two_seconds_at_once_and_then_at_its_rate() -> None:
    rates = Rates(100)
    assert admitted(rates, "a", 1000.0, 1000) == 100 * BURST_S
    assert admitted(rates, "a", 1000.5, 1000) == 50
    assert admitted(rates, "a", 2000.0, 1000) == 100 * BURST_S  # what was not used for long does not add up


def test_one_that_asks_seldom_is_never_refused() -> None:
    rates = Rates(2)
    assert all(not rates.ask("a", 0.5 * step) for step in range(1000))


def test_one_tenants_rate_is_nobody_elses_and_an_operators_word_counts() -> None:
    rates = Rates(10)
    rates.change({"b": 100, "c": None})
    assert (admitted(rates, "a", 0.0, 1000), admitted(rates, "b", 0.0, 1000)) == (20, 200)
    assert admitted(rates, "c", 0.0, 1000) == 20
    rates.change({})
    assert admitted(rates, "b", 100.0, 1000) == 20


def test_those_refused_are_told_to_come_one_after_another_and_all_get_in() -> None:
    rates = Rates(100)
    admitted(rates, "a", 0.0, 200)
    due = sorted(rates.ask("a", 0.0) for _ in range(300))
    assert due[0] >= 10
    assert all(later - earlier >= 9 for earlier, later in itertools.pairwise(due))
    assert all(not rates.ask("a", (hint + 1) / 1000) for hint in due)


def test_a_hint_is_bounded() -> None:
    rates = Rates(1)
    assert max(rates.ask("a", 0.0) for _ in range(10_000)) == 1000 * MOST_S


def test_a_rate_below_one_in_two_seconds_still_lets_one_in() -> None:
    rates = Rates(0.1)
    assert [admitted(rates, "a", now, 5) for now in (0.0, 9.9, 10.1)] == [1, 0, 1]


def test_names_without_number_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_REMEMBERED", 100)
    kept = Rates(10)
    for number in range(1000):
        kept.may_tell(f"key {number}", 0.0)
    assert len(kept._refused) == 100


@pytest.mark.parametrize("field", ["max_requests_per_s", "max_blob_requests_per_s"])
def test_a_rate_of_nothing_is_no_limit_that_can_be_set(field: str) -> None:
    with pytest.raises(ValueError, match="revoke the keys"):
        TenantLimits(**{field: 0})


class Desk:
    """A reception, and what it makes of what comes."""

    def __init__(self, folder: Path, per_s: float) -> None:
        self.registry = KeyRegistry(folder / "registry.json")
        pairs = {name: KeyPair.generate().public for name in ("one", "two", "other", "trainer")}
        for name, public in pairs.items():
            if name == "trainer":
                entry = KeyEntry(name=name, public=public, domain="worker", roles=("trainer",))
            else:
                entry = KeyEntry(name=name, public=public, domain="tenant", tenant="b" if name == "other" else "acme")
            self.registry.add(entry)
        self.keys = pairs
        self.refusals = Refusals("refused")
        self.reception = Reception(self.registry, per_s, self.refusals)

    def take(self, key: str, frames: list[Buffer] = PING, now: float = 0.0, door: Door = "front") -> object:
        return self.reception.take(Peer(door, b"peer"), frames, self.keys[key], now)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, 10)


def test_all_keys_of_a_tenant_have_one_rate_together(desk: Desk) -> None:
    came = [isinstance(desk.take(key), FrontMessage) for _ in range(20) for key in ("one", "two")]
    assert sum(came) == 20
    assert isinstance(desk.take("other"), FrontMessage)


def test_what_comes_too_often_is_refused_under_its_id_before_its_body_is_read(desk: Desk) -> None:
    for _ in range(20):
        desk.take("one")
    refused = desk.take("one", [*PING[:2], b"\xc1 no body"])
    assert isinstance(refused, Refused)
    assert (refused.re, refused.reason, refused.failure.code) == ("m1", "rate", ErrorCode.OVERLOADED)
    assert refused.failure.details == {TOO_OFTEN: 10}
    assert refused.failure.retry_after_ms >= 100
    assert desk.refusals.counts["rate"] == 1


def test_garbage_counts_and_is_answered_no_more_often_than_refusals_are(desk: Desk) -> None:
    told = [desk.take("one", GARBAGE) for _ in range(10_000)]
    assert sum(answer is not None for answer in told) <= REFUSALS_PER_S * BURST_S + 20
    assert desk.refusals.counts.total() == 10_000
    assert isinstance(desk.take("one"), Refused | None)
    assert not isinstance(desk.take("one"), FrontMessage)  # garbage used up what the tenant may ask


@pytest.mark.parametrize("key", ["trainer", "revoked"])
def test_whoever_is_no_tenant_is_refused_in_silence_when_it_is_too_often(desk: Desk, key: str) -> None:
    desk.keys["revoked"] = desk.keys["two"]
    if key == "revoked":
        desk.registry.revoke("two")
    told = [desk.take(key, GARBAGE, door="back" if key == "trainer" else "front") for _ in range(1000)]
    assert sum(answer is not None for answer in told) == REFUSALS_PER_S * BURST_S
    assert isinstance(desk.take(key, GARBAGE, now=10.0), Refused)


def test_a_hint_that_is_obeyed_gets_everybody_in(desk: Desk) -> None:
    waiting = [(0.0, number) for number in range(200)]
    served, now = 0, 0.0
    while waiting:
        waiting.sort()
        now, number = waiting.pop(0)
        taken = desk.take("one", now=now)
        if isinstance(taken, Refused):
            waiting.append((now + taken.failure.retry_after_ms / 1000, number))
        else:
            served += isinstance(taken, FrontMessage)
    assert served == 200
    assert now <= 60.0


def test_limits_cross_the_file_and_back() -> None:
    limits = TenantLimits(max_requests_per_s=5, max_blob_requests_per_s=7)
    assert msgspec.json.decode(msgspec.json.encode(limits), type=TenantLimits) == limits
