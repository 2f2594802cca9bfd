"""A disk that does not give back what the master wrote: the op or the set concerned waits, everybody else goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.blobs import BlobStore
from common.journal.journal import Journal, journal_url
from joynexus.datasets import DatasetManifest
from joynexus.wire import ErrorCode
from joynexus.wire.front import Accepted, DatasetInfo, OpResult, OptimStep
from services.master.config import CoreConfig
from services.master.sources import ShellSources
from tests.unit.master.actors import FakeEnv, FakeTrainer, new_incarnation
from tests.unit.master.ops import BUFFERS, forward
from tests.unit.master.test_datasets import FILE, ONE, get
from tests.unit.master.world import World, run


def fail(*names: object) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def world() -> World:
    return World(CoreConfig(payload_memory_bytes=0))


def test_an_op_whose_samples_cannot_be_read_waits_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in ("p", "q"):
        world.create(policy)
    lease, other = world.lease("p"), world.lease("q")
    with monkeypatch.context() as disk:
        disk.setattr(world.journal, "payload", fail)
        world.tell(forward(lease, 1), buffers=BUFFERS)
        world.tell(OptimStep(policy="p", lease=lease, seq=2))
        world.tell(OptimStep(policy="q", lease=other, seq=1))
        trainer = FakeTrainer(world, new_incarnation())
        run(trainer)
        world.wait(2.0)
        run(trainer)
        assert dict(trainer.applied) == {("a", "q", 1): 1}
    world.wait(3.0)
    run(trainer)
    assert dict(trainer.applied) == {("a", "q", 1): 1, ("a", "p", 1): 1, ("a", "p", 2): 1}


def test_an_op_whose_samples_stay_unreadable_is_refused_with_a_sentence_and_the_next_one_is_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    lease = world.lease()
    monkeypatch.setattr(world.journal, "payload", fail)
    world.tell(forward(lease, 1), buffers=BUFFERS)
    world.tell(OptimStep(policy="p", lease=lease, seq=2))
    trainer = FakeTrainer(world, new_incarnation())
    for _ in range(12):
        trainer.beat()
        world.wait(1.0)
        run(trainer)
    lost = world.ask(forward(lease, 1), OpResult, buffers=BUFFERS)
    assert lost.error is not None
    assert lost.error.code is ErrorCode.INTERNAL
    assert "cannot be read back" in lost.error.message
    assert dict(trainer.applied) == {("a", "p", 2): 1}
    world.ask(OptimStep(policy="p", lease=lease, seq=3), Accepted)


@pytest.mark.parametrize(("seconds", "state"), [(2.0, "ready"), (12.0, "faulty")])
def test_a_new_manifest_that_cannot_be_read_is_looked_for_again_and_at_last_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, state: str
) -> None:
    fails = [True]

    def manifest(digest: str) -> DatasetManifest:
        if fails:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return world.manifests[digest]

    monkeypatch.setattr(world, "manifest", manifest)
    world.crash()  # the new core asks the disk that fails
    world.upload(FILE)
    world.ask(ONE, DatasetInfo)
    env = FakeEnv(world, new_incarnation())
    run(env)
    assert get(world).state == "checking"
    world.wait(seconds)
    fails.clear()
    world.wait(5.0)
    assert get(world).state == state


def test_a_damaged_manifest_is_no_manifest(tmp_path: Path) -> None:
    store, journal = BlobStore(tmp_path / "blobs"), Journal(journal_url(tmp_path / "journal.db"))
    sources = ShellSources(journal, store)
    digest = store.put_bytes(b"not a manifest, but whole")
    with pytest.raises(ValueError, match="is no data set manifest"):
        sources.manifest(digest)
    store.path(digest).write_bytes(b"not a manifest, but Whole")
    with pytest.raises(ValueError, match="is damaged"):
        sources.manifest(digest)
    journal.close()
