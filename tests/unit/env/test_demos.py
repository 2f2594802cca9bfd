"""Promises of the demonstrations: sound, reproducible, and true to the environment they came from."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("metaworld")

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from joynexus.simulation.interface import SimulatorOptions
from services.env.datasets.prepare import prepare_dataset
from services.env.producers.demos import write_demonstrations
from services.env.simulators.metaworld_tasks import INSTRUCTIONS
from services.env.simulators.metaworld_tasks import contract as metaworld_contract
from services.env.simulators.registry import make_simulator

TASK = "metaworld/reach-v3"
pytestmark = pytest.mark.slow


def test_demonstrations_replay_to_success_and_carry_the_environments_contract(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    seeds = write_demonstrations(tmp_path / "set", TASK, 3, progress=lambda done, total: seen.append((done, total)))
    assert seeds == (1000, 1001, 1002)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    store = BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(tmp_path / "set", store)
    assert manifest.contract == metaworld_contract(SimulatorOptions())
    assert [fault for fault in manifest.faults if fault.where != "action"] == []  # reach never moves its gripper
    assert {episode.instruction for episode in manifest.episodes} == {INSTRUCTIONS[TASK.partition("/")[2]]}
    assert manifest.statistics.action.max[0] <= 1.0

    data, simulator = PreparedDataset(manifest, store.path), make_simulator(TASK)
    start = 0
    for seed, episode in zip(seeds, manifest.episodes, strict=True):
        observation = simulator.reset(seed)
        batch = data.batch(range(start, start + episode.length), chunk=1)
        assert np.array_equal(batch.state[0], observation.state)
        difference = np.abs(data.images(start)[0].astype(int) - observation.images[0])
        assert difference.mean() < 5, "the video shows what the policy sees"
        result = simulator.step_chunk(batch.action[:, 0], render=False)
        assert (result.success, result.steps) == (True, episode.length)
        start += episode.length


def test_the_same_call_writes_the_same_steps_whatever_the_processes(tmp_path: Path) -> None:
    tables = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        write_demonstrations(folder, TASK, 2, processes=processes, options=SimulatorOptions(cameras=()))
        tables.append(pq.read_table(folder / "data/chunk-000/file-000.parquet"))
    assert tables[0].equals(tables[1])


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean"):
        write_demonstrations(tmp_path / "set", "metaworld/reach-v9", 1)
