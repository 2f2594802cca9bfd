"""Promises of LIBERO's demonstrations: the expert solves its task, both formats hold the same, and a policy learns."""

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

pytest.importorskip("libero", reason="LIBERO is not installed: make install-simulators")

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from joynexus.contract import Camera
from joynexus.simulation.interface import SimulatorOptions
from services.env.datasets.libero_writer import LiberoEpisode, LiberoWriter
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.writer import LeRobotWriter
from services.env.producers.demos import write_demonstrations
from services.env.producers.libero_demos import FIRST_SEED, Attempt, LiberoExpert, write_hdf5_demonstrations
from services.env.simulators import libero_tasks
from services.env.simulators.libero import LiberoFamily
from services.env.simulators.registry import make_simulator

TASK = "libero/libero_object/0"
CAMERAS = tuple(Camera(name=n, height=32, width=32, rotation_deg=180) for n in libero_tasks.CAMERA_NAMES)
OPTIONS = SimulatorOptions(cameras=CAMERAS)
pytestmark = [pytest.mark.slow, pytest.mark.simulators, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expert() -> Iterator[LiberoExpert]:
    with LiberoExpert(TASK, OPTIONS, 2) as expert:
        yield expert


@pytest.fixture(scope="module")
def attempts(expert: LiberoExpert) -> list[Attempt]:
    return expert.attempt(range(5))


def test_the_scripted_expert_solves_libero_object_0_from_four_of_five_initial_states(attempts: list[Attempt]) -> None:
    assert [attempt.seed for attempt in attempts] == [0, 1, 2, 3, 4]
    assert sum(attempt.success for attempt in attempts) >= 4
    assert all(len(attempt.actions) < 280 for attempt in attempts if attempt.success)


@pytest.fixture(scope="module")
def beginnings(expert: LiberoExpert, attempts: list[Attempt]) -> list[LiberoEpisode]:
    """The first steps of two demonstrations: pictures of whole ones take minutes."""
    return [expert.play(attempt._replace(actions=attempt.actions[:12])) for attempt in attempts[:2]]


def test_playing_again_leads_through_the_same_states_to_success(expert: LiberoExpert, attempts: list[Attempt]) -> None:
    attempt = next(attempt for attempt in attempts if attempt.success)
    simulator = make_simulator(TASK, SimulatorOptions(cameras=()))
    simulator.reset(attempt.seed)
    result = simulator.step_chunk(attempt.actions)
    assert (result.success, result.terminated, result.steps) == (True, True, len(attempt.actions))
    assert result.rewards.tolist() == [0.0] * (result.steps - 1) + [1.0]
    simulator.close()


def test_both_formats_hold_the_same_demonstrations(
    expert: LiberoExpert, beginnings: list[LiberoEpisode], tmp_path: Path
) -> None:
    with LeRobotWriter(tmp_path / "lerobot", 20.0, expert.contract, video=False) as writer:
        for one in beginnings:
            images = {camera.name: pictures for camera, pictures in zip(CAMERAS, one.images, strict=True)}
            writer.add_episode(one.states, one.actions, images, expert.instruction)
    with LiberoWriter(tmp_path / "hdf5", expert.contract, expert.describe()) as hdf5:
        for one in beginnings:
            hdf5.add_episode(one)
    store = BlobStore(tmp_path / "blobs")
    manifests = [prepare_dataset(tmp_path / name, store) for name in ("lerobot", "hdf5")]
    assert manifests[0].contract == manifests[1].contract == expert.contract
    assert manifests[0].statistics == manifests[1].statistics
    assert [fault for fault in manifests[1].faults if fault.where != "actions"] == []
    one, other = (PreparedDataset(manifest, store.path) for manifest in manifests)
    for index in range(24):
        assert np.array_equal(one.batch([index], chunk=4).state, other.batch([index], chunk=4).state)
        assert np.array_equal(one.batch([index], chunk=4).action, other.batch([index], chunk=4).action)
        for a, b in zip(one.images(index), other.images(index), strict=True):
            assert np.array_equal(a, b)


def test_pictures_show_what_the_simulator_draws_for_the_same_state_and_no_turned_one(
    beginnings: list[LiberoEpisode],
) -> None:
    """robosuite draws a moment 2 ms late, so that a few pixels differ at edges."""
    simulator = LiberoFamily().make("libero_object/0", OPTIONS)
    simulator.reset(3, render=False)
    for step in (0, 11):
        drawn = simulator.draw_moment(beginnings[1].simulation[step])
        for mine, stored in zip(drawn, (view[step] for view in beginnings[1].images), strict=True):

            def error(picture: np.ndarray, stored: np.ndarray = stored) -> float:
                return float(np.abs(picture.astype(int) - stored).mean())

            assert error(mine) < 1.0
            for wrong in (mine[::-1], mine[:, ::-1], mine[::-1, ::-1]):
                assert error(wrong) > 10 * error(mine) + 3
    simulator.close()


def test_the_tools_write_the_same_successful_demonstrations_in_both_layouts(tmp_path: Path) -> None:
    """Without cameras, so that it is quick; the gripper closes with +1, as the fingers' positions show."""
    seen: list[tuple[int, int]] = []
    options = SimulatorOptions(cameras=())
    seeds = write_hdf5_demonstrations(
        tmp_path / "hdf5",
        TASK,
        1,
        options=options,
        processes=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 1)]
    assert seeds == write_demonstrations(
        tmp_path / "lerobot", TASK, 1, options=options, processes=1, first_seed=FIRST_SEED
    )
    assert seeds[0] >= FIRST_SEED
    (path,) = (tmp_path / "hdf5").iterdir()
    assert path.name == "pick_up_the_alphabet_soup_and_place_it_in_the_basket_demo.hdf5"
    with h5py.File(path) as file:
        demo = file["data/demo_0"]
        actions, fingers = demo["actions"][()], demo["obs/gripper_states"][()]
        closing, opening = np.flatnonzero(actions[:, 6] > 0)[[8, -1]], np.flatnonzero(actions[:, 6] < 0)[:20]
        assert (fingers[opening, 0] - fingers[opening, 1]).min() > 0.07
        assert (fingers[closing, 0] - fingers[closing, 1]).max() < 0.07
        assert demo["states"].shape[1] == 110
        assert file["data"].attrs["env_name"] == "LIBERO_Floor_Manipulation"
    store = BlobStore(tmp_path / "blobs")
    one, other = (prepare_dataset(tmp_path / name, store) for name in ("hdf5", "lerobot"))
    assert one.contract == other.contract == libero_tasks.contract("libero_object/0", options)
    assert one.statistics == other.statistics


def test_suites_without_an_expert_are_named() -> None:
    with pytest.raises(ValueError, match="no expert for libero_10: those of libero_object and libero_spatial"):
        LiberoExpert("libero/libero_10/0", OPTIONS, 1)
