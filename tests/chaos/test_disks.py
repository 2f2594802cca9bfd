"""What lies on the disk changes by itself: damage is named and never used, and what is restored works again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.blobs import BlobStore
from joynexus import Client
from joynexus.datasets import DatasetManifest
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.jobs import DATASET, push, sft
from tests.chaos.verdict import Verdict
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]  # a cluster may take minutes to start

STEPS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with chaotic(folder) as cluster:
        push(cluster.client, folder / DATASET)
        yield cluster


def flip_a_bit(path: Path) -> bytes:
    """Damage a file in its middle; return what it held."""
    before = path.read_bytes()
    middle = len(before) // 2
    path.chmod(0o644)
    path.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
    return before


def an_episode(client: Client, store: BlobStore) -> str:
    """Return the blob of the set's first episode."""
    (info,) = (info for info in client.datasets.list() if info.dataset == DATASET)
    manifest = msgspec.msgpack.decode(store.path(info.manifest).read_bytes(), type=DatasetManifest)
    return manifest.episodes[0].blob


@pytest.mark.case(19, "a bit flips in a data set's blob while policies are to be trained on it")
def test_job_on_a_damaged_blob_fails_with_its_name_and_works_once_it_is_restored(
    cluster: Cluster, verdict: Verdict
) -> None:
    store = BlobStore(cluster.local.folder / "blobs")
    digest = an_episode(cluster.client, store)
    trainer = cluster.pid("trainer")
    whole = flip_a_bit(store.path(digest))
    with verdict("I3"):
        job = sft(cluster.client, "damaged", STEPS)
        until(lambda: job.info().state == "failed", seconds=240)
    with verdict("I6"):
        assert f"cannot be done: blob {digest} is damaged" in job.info().message
        assert "slot_failed" in cluster.log("master")
    with verdict("I4"):
        until(cluster.idle)
        assert cluster.local.running("trainer") == trainer
    store.path(digest).write_bytes(whole)
    with verdict("I1"):  # what was refused was not trained on, and is not in the way
        info = sft(cluster.client, "damaged", STEPS).wait(progress=False, timeout_s=240)
        assert (info.state, info.done) == ("succeeded", STEPS)
        assert cluster.client.policy("damaged").info().step == STEPS
