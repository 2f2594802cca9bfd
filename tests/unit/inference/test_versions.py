"""Versions in an inference worker: side by side, each named, fetched when asked for, refused if unusable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.blob_access import BlobAccess
from common.progress import Progress
from joynexus.wire import ErrorCode
from joynexus.wire.back import WeightsApplied, WeightsOffer, WeightsRefused
from tests.unit.inference.desk import Desk, Request
from tests.unit.workers import Arrays, spec


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def offer(version: int, digest: str) -> WeightsOffer:
    return WeightsOffer(tenant="ann", policy="arm", version=version, digest=digest, nbytes=0)


def test_versions_act_side_by_side_and_every_answer_names_its_own(desk: Desk) -> None:
    digests = [desk.version(number)[0] for number in (1, 2)]
    for number, digest in enumerate(digests, start=1):
        applied = desk.engine.load(offer(number, digest))
        assert isinstance(applied, WeightsApplied)
        assert (applied.tenant, applied.policy, applied.version) == ("ann", "arm", number)
    arrays = Arrays(1, rows=1)
    answers = desk.predict(*(Request(digests[number - 1], arrays, version=number) for number in (2, 1, 2)))
    assert [answer.version for answer in answers] == [2, 1, 2]
    first, second, third = (desk.actions(answer) for answer in answers)
    assert np.array_equal(first, third)
    assert not np.array_equal(first, second)
    assert len(desk.opened) == 2  # the offers fetched them; acting did not


def test_a_version_that_was_not_offered_is_fetched_when_asked_for(desk: Desk) -> None:
    digest, _ = desk.version(3)
    (answer,) = desk.predict(Request(digest, Arrays(1, rows=1), version=3))
    assert (answer.version, answer.error) == (3, None)


def test_a_version_in_use_is_kept_by_its_user_while_another_takes_its_place(desk: Desk) -> None:
    old, policy = desk.version(1)
    held = desk.engine._shelf.get("ann", "arm", 1, old)
    new, _ = desk.version(1, spec(seed=77))
    assert isinstance(desk.engine.load(offer(1, new)), WeightsApplied)
    features, state = desk.backbone.forward(Arrays(1).observations()), Arrays(1).state
    assert np.array_equal(held.policy.act(features, state), policy.act(features, state))


def refused(answer: WeightsApplied | WeightsRefused) -> str:
    assert isinstance(answer, WeightsRefused)
    return f"{answer.error.code} {answer.error.message}"


def test_an_unusable_version_is_refused_and_the_old_one_keeps_serving(desk: Desk) -> None:
    digest, policy = desk.version(1)
    desk.engine.load(offer(1, digest))
    foreign, _ = desk.version(2, backbone="cd" * 16)
    torn, _ = desk.version(3)
    path = desk.blobs.path(torn)
    path.write_bytes(path.read_bytes()[:-4])
    numbered, _ = desk.version(4)
    assert "BAD_DATA version 2 is unusable: it was trained on backbone cdcd" in refused(
        desk.engine.load(offer(2, foreign))
    )
    damaged = refused(desk.engine.load(offer(3, torn)))
    assert "has digest" in damaged
    assert str(path.parent) not in damaged, "where the service keeps its files is no tenant's business"
    assert "says that it is version 4" in refused(desk.engine.load(offer(5, numbered)))
    assert "UNAVAILABLE version 6 cannot be fetched now" in refused(desk.engine.load(offer(6, "0" * 64)))
    request = Request(digest, Arrays(1, rows=1))
    old, bad = desk.predict(request, Request(torn, Arrays(1, rows=1), version=3))
    assert np.array_equal(desk.actions(old), desk.alone(policy, request))
    assert bad.error is not None
    assert bad.error.code == ErrorCode.BAD_DATA


def test_a_version_damaged_on_the_shared_disk_is_bad_data_until_it_is_restored_and_others_act_meanwhile(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sound, policy), (torn, _) = desk.version(1), desk.version(2)
    path = desk.blobs.path(torn)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\1\2\3")
    nobody = BlobAccess(
        lambda *_, **__: pytest.fail("it is on the shared disk"),
        Progress(),
        shared=tmp_path / "blobs",
        cache=tmp_path / "cache",
        cache_budget_bytes=1 << 20,
    )
    monkeypatch.setattr(desk.blobs, "path", nobody.fetch)
    assert refused(desk.engine.load(offer(2, torn))) == (
        f"BAD_DATA version 2 is unusable: blob {torn} is damaged on the shared disk: restore it, or remove it and push "
        "it again"
    )
    requests = Request(sound, Arrays(1, rows=1)), Request(torn, Arrays(1, rows=1), version=2)
    right, wrong = desk.predict(*requests)
    assert np.array_equal(desk.actions(right), desk.alone(policy, requests[0]))
    assert wrong.error is not None
    assert (wrong.error.code, wrong.error.retry_after_ms) == (ErrorCode.BAD_DATA, 0)
    path.write_bytes(whole)
    (again,) = desk.predict(requests[1])
    assert again.error is None


def test_a_non_finite_version_is_refused(desk: Desk) -> None:
    digest, _ = desk.version(1)
    content = bytearray(desk.blobs.path(digest).read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    spoiled = desk.blobs.put_bytes(bytes(content))
    assert "NaN or infinity" in refused(desk.engine.load(offer(1, spoiled)))


def test_the_versions_used_longest_ago_make_room(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_versions=2)
    digests = {number: desk.version(number)[0] for number in (1, 2, 3)}
    for number in (1, 2, 1, 3):
        desk.engine.load(offer(number, digests[number]))
    desk.opened.clear()
    for number in (1, 3):
        desk.engine.load(offer(number, digests[number]))
    assert desk.opened == []
    desk.engine.load(offer(2, digests[2]))
    assert desk.opened == [digests[2]]


def test_versions_keep_within_their_bytes_but_one_is_always_held(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_bytes=1)
    for number in (1, 2):
        desk.engine.load(offer(number, desk.version(number)[0]))
    assert len(desk.engine._shelf) == 1
