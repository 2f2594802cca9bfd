"""One question a second for all viewers of a scope; who the master does not vouch for sees nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from joynexus.wire import ErrorCode
from services.health.dashboard import hub as hub_module
from services.health.dashboard.hub import SESSIONS, AwayError, EndedError, GoneError, Hub, Watch
from services.health.dashboard.news import aloud, news
from services.health.dashboard.rates import MOST, Rates
from tests.unit.health.dashboard.pictures import AT, FakeSource, cluster, refused, rl, sft

PATIENCE_S = 20.0


class Clock:
    """The hub's time, moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), PATIENCE_S)


def run(test: Callable[[Hub, FakeSource, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        source, clock = FakeSource(), Clock()
        hub = Hub(source, clock)
        try:
            await test(hub, source, clock)
        finally:
            await hub.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD_S", 0.001)


def test_fresh_picture_is_shown_without_another_question() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        first = await hub.enter("arm")
        assert await hub.enter("arm") is first
        assert source.asked == ["arm"]
        clock.now += 2
        await hub.enter("arm")
        assert source.asked == ["arm", "arm"]

    run(test)


def test_all_sessions_of_a_tenant_share_a_picture_and_others_have_their_own() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        source.sessions["arm-2"] = "arm-lab"
        arm, again, kitchen, whole = [await hub.enter(name) for name in ("arm", "arm-2", "kitchen", "operator")]
        assert arm is again
        assert len({id(arm), id(kitchen), id(whole)}) == 3
        assert {job.tenant for job in kitchen.view.jobs} == {"kitchen"}
        assert (whole.tenant, whole.operator) == ("", True)

    run(test)


def test_unknown_session_sees_nothing_even_where_others_of_the_tenant_do() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        await hub.enter("arm")
        with pytest.raises(EndedError):
            await hub.enter("forged")
        assert hub.knows("forged") is None

    run(test)


def test_revoked_session_is_noticed_while_it_watches_and_others_go_on() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        source.sessions["arm-2"] = "arm-lab"
        scope = await hub.enter("arm")
        await hub.enter("arm-2")
        with hub.watching("arm", scope), hub.watching("arm-2", scope):
            del source.sessions["arm"]
            await until(lambda: hub.knows("arm") is None)
            asked = len(source.asked)
            await until(lambda: len(source.asked) > asked + 5)
            assert hub.knows("arm-2") is scope
            assert "arm" not in source.asked[asked + 1 :]

    run(test)


def test_sessions_take_turns_in_asking() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        names = [f"s{number}" for number in range(12)]
        source.sessions |= dict.fromkeys(names, "arm-lab")
        scopes = [await hub.enter(name) for name in names]
        for name in names:
            scopes[0].watching[name] = {Watch()}
        due: list[str] = []
        turns = 0
        while set(due) != set(names):
            turns += 1
            asking = scopes[0].due()
            due += asking
            for name in asking:
                scopes[0].sessions[name] = 2000.0 + turns
        assert turns <= 12  # so many turns fit into VOUCHED_S here that one asks at a time
        assert len(due) == len(names)  # nobody twice before everybody once

    run(test)


def test_watched_scope_is_asked_for_once_a_turn_however_many_watch() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        scope = await hub.enter("operator")
        contexts = [hub.watching("operator", scope) for _ in range(50)]
        for context in contexts:
            context.__enter__()
        shots, asked = scope.shots, len(source.asked)
        await until(lambda: scope.shots >= shots + 5)
        assert len(source.asked) - asked <= scope.shots - shots + 1
        assert hub.watchers == 50
        for context in contexts:
            context.__exit__(None, None, None)
        assert hub.watchers == 0
        assert scope.poll is not None
        await scope.poll  # nobody watches: it ends

    run(test)


def test_last_picture_stays_while_the_master_is_away_and_is_new_again_when_it_is_back() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        scope = await hub.enter("operator")
        with hub.watching("operator", scope):
            source.failing = refused(ErrorCode.DEADLINE, "no answer within 4 s")
            await until(lambda: bool(scope.away))
            assert scope.away == "no answer within 4 s"
            assert scope.view.jobs
            clock.now += 60
            assert await hub.enter("operator") is scope
            source.whole, source.failing = cluster(AT + 60), None
            await until(lambda: not scope.away)
            assert scope.view.at == AT + 60
            assert "away" not in scope.said[1]

    run(test)


def test_session_that_nobody_vouched_for_is_not_shown_the_last_picture() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        await hub.enter("operator")
        source.failing = refused(ErrorCode.DEADLINE)
        with pytest.raises(AwayError):
            await hub.enter("another")

    run(test)


def test_master_started_anew_is_believed_though_its_clock_is_behind() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        scope = await hub.enter("operator")
        with hub.watching("operator", scope):
            source.failing = refused(ErrorCode.DEADLINE)
            await until(lambda: bool(scope.away))
            source.whole, source.failing = cluster(AT - 3600), None
            await until(lambda: scope.view.at == AT - 3600)

    run(test)


def test_flood_of_forged_sessions_does_not_reach_the_master() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        await hub.enter("operator")
        clock.now += 2
        answers = await asyncio.gather(*(hub.enter(f"x{n}") for n in range(2000)), return_exceptions=True)
        assert all(isinstance(answer, EndedError | AwayError) for answer in answers)
        assert len(source.asked) <= hub_module.STRANGERS_A_MINUTE + 1
        await hub.enter("operator")

    run(test)


def test_sessions_that_are_remembered_are_bounded() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        for number in range(SESSIONS + 20):
            clock.now += 1
            source.sessions[f"s{number}"] = f"t{number % 5}"
            await hub.enter(f"s{number}")
        assert sum(hub.knows(f"s{number}") is not None for number in range(SESSIONS + 20)) == SESSIONS
        assert hub.scopes == 5

    run(test)


def test_session_that_comes_again_has_its_new_stream_kept_up_to_date_and_the_old_one_over() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        source.sessions["arm-2"] = "arm-lab"
        await hub.enter("arm-2")  # so that the scope stays
        scope = await hub.enter("arm")
        old = hub.watching("arm", scope)
        first = old.__enter__()
        hub.leave("arm")
        assert await hub.enter("arm") is scope
        with hub.watching("arm", scope) as second:
            assert (scope.watches("arm", first), scope.watches("arm", second)) == (False, True)
            old.__exit__(None, None, None)
            assert hub.watchers == 1
            shots = scope.shots
            await until(lambda: scope.shots > shots + 2)
        assert not scope.watching

    run(test)


def test_stream_of_a_session_that_left_before_it_began_is_over() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        scope = await hub.enter("arm")
        hub.leave("arm")
        with hub.watching("arm", scope) as watch:
            assert not scope.watches("arm", watch)
            assert hub.watchers == 0

    run(test)


# Jobs


def test_curve_is_asked_for_from_where_it_is_known() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        picture = await hub.job("arm", "arm-lab", "job-1000")
        assert len(picture.losses) == 700
        scope = await hub.enter("arm")
        with hub.watching("arm", scope, picture):
            source.jobs["arm-lab", "job-1000"] = sft(900)
            await until(lambda: len(picture.losses) == 900)
            assert picture.losses == list(sft(900).losses)
            assert set(source.since) <= {0, 700, 900}

    run(test)


def test_curve_that_comes_in_parts_is_put_together() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        whole = source.job

        async def in_parts(session: str, tenant: str, job: str, since: int) -> object:
            info = await whole(session, tenant, job, since)
            return msgspec.structs.replace(info, losses=info.losses[:100], updates=info.updates[:7])

        source.job = in_parts  # type: ignore[method-assign,assignment]
        assert (await hub.job("arm", "arm-lab", "job-1000")).losses == list(sft(700).losses)
        assert (await hub.job("operator", "kitchen", "job-999")).updates == list(rl(31).updates)

    run(test)


def test_job_of_another_tenant_is_as_if_it_were_not_there() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        for tenant, job in (("kitchen", "job-999"), ("arm-lab", "no-such")):
            with pytest.raises(GoneError):
                await hub.job("arm", tenant, job)

    run(test)


def test_job_that_is_gone_keeps_its_page_and_the_rest_goes_on() -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        picture = await hub.job("arm", "arm-lab", "job-1000")
        scope = await hub.enter("arm")
        with hub.watching("arm", scope, picture):
            del source.jobs["arm-lab", "job-1000"]
            shots = scope.shots
            await until(lambda: scope.shots > shots + 3)
            assert picture.known
        assert not scope.jobs  # nobody watches it any more

    run(test)


def test_bug_in_a_turn_is_shown_and_the_next_turn_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(hub: Hub, source: FakeSource, clock: Clock) -> None:
        scope = await hub.enter("operator")
        good = source.view

        async def bad(session: str) -> object:
            raise ZeroDivisionError

        with hub.watching("operator", scope):
            source.view = bad  # type: ignore[method-assign,assignment]
            await until(lambda: "ZeroDivisionError" in scope.away)
            source.view = good  # type: ignore[method-assign]
            await until(lambda: not scope.away)

    run(test)


# What is said aloud, and how often what may be done


def test_end_of_a_job_a_lost_worker_and_a_decision_are_said_and_figures_are_not() -> None:
    before = cluster()
    assert news(before, cluster(AT + 30)) == []
    jobs = (msgspec.structs.replace(before.jobs[0], state="succeeded"), *before.jobs[1:])
    roles = (msgspec.structs.replace(before.roles[0], phase="lost"), *before.roles[1:])
    decisions = (*before.decisions, msgspec.structs.replace(before.decisions[0], at=AT + 1))
    after = msgspec.structs.replace(before, jobs=jobs, roles=roles, decisions=decisions)
    assert news(before, after) == [
        "Job job-1000 succeeded.",
        "trainer-1 is lost.",
        "env is scaled from 1 to 2.",
    ]
    assert news(after, before)[0] == "trainer-1 is back."


def test_much_that_happens_at_once_is_told_in_short() -> None:
    assert aloud(["A.", "B.", "C.", "D.", "E."]) == "A. B. C. And 2 more changes."


def test_who_tries_too_often_waits_and_others_do_not() -> None:
    rates = Rates(each=3, all=5)
    assert [rates.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [rates.take("b", 0.0) for _ in range(3)] == [True, True, False]  # all together: five
    assert rates.take("a", 20.0)
    assert not rates.take("a", 20.0)


def test_names_that_are_counted_are_bounded() -> None:
    rates = Rates(each=1, all=10**9)
    for number in range(MOST + 100):
        rates.take(str(number), 0.0)
    assert len(rates._buckets) == MOST
