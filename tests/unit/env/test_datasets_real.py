"""Real sets with the faults that real sets have; skipped where they are not at hand."""

import os
from pathlib import Path

import numpy as np
import pytest

from common.blobs import BlobStore
from common.prepared import PreparedDataset, training_indices
from services.env.datasets.check import check_dataset
from services.env.datasets.prepare import prepare_dataset

_SHARED = os.environ.get("JOYNEXUS_SHARED_DATA") or Path(__file__).parents[4] / "shared" / "data"
SET = Path(_SHARED) / "lerobot-v2.0-pick-and-place"
TELEOPERATION = Path(_SHARED) / "robosuite-teleop"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SET.is_dir(), reason=f"{SET} is not there")]


def test_the_real_sets_faults_are_named_and_it_is_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    manifest = prepare_dataset(SET, store, image_side=64)
    text = "\n".join(f"{fault.severity} {fault.what}" for fault in manifest.faults)
    for fault in (
        "data_path points to files that do not exist",
        "video_path points to files that do not exist",
        "camera 'observation.images.egoview' is declared but has no file",
        "split 'train' is '0:100' but there are episodes 0:5",
        "total_videos says 2 but there are 5",
        "there is no column frame_index",
        "timestamps do not start at 0",
        "'action' is stored as float64",
        "25 of 44 action numbers never change",
        "several tasks are listed",
    ):
        assert f"warning {fault}" in text
    assert "error" not in text
    assert [e.length for e in manifest.episodes] == [416, 470, 470, 412, 328]
    assert manifest.episodes[0].instruction == "pick the pear from the counter and place it in the plate"
    assert (manifest.contract.robot, manifest.contract.state_dim, manifest.contract.action_dim) == (
        "GR1ArmsOnly",
        44,
        44,
    )
    assert [(c.name, c.height, c.width) for c in manifest.contract.cameras] == [("ego_view", 64, 64)]

    data = PreparedDataset(manifest, store.path)
    assert len(training_indices(manifest, 1)) == 2096 - 328
    batch = data.batch([0, 415, 416], chunk=8)
    assert batch.action_mask.sum(1).tolist() == [8, 1, 8]
    assert np.isfinite(batch.action).all()
    first, later = data.images(0)[0].astype(int), data.images(300)[0].astype(int)
    assert first.std() > 10, "a real picture"
    assert np.abs(first - later).mean() > 1, "something moved"


@pytest.mark.skipif(not TELEOPERATION.is_dir(), reason=f"{TELEOPERATION} is not there")
def test_teleoperation_without_observations_is_refused_with_what_to_do() -> None:
    errors = [fault for fault in check_dataset(TELEOPERATION).faults if fault.severity == "error"]
    assert {fault.where.split(",")[0] for fault in errors} == {"lift_panda.hdf5", "stack_panda.hdf5", "wipe_panda.hdf5"}
    assert sum("replay it in its simulator, writing observations" in fault.what for fault in errors) == 3
