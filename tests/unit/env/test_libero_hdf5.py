"""Promises of LIBERO's HDF5, read and written: the simulator's numbers and pictures, and sentences for faults."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from common.blobs import BlobStore
from common.prepared import PreparedDataset
from joynexus.contract import Camera
from services.env.data_work import find_mounted
from services.env.datasets.check import check_dataset
from services.env.datasets.libero_writer import LiberoEpisode, LiberoTask, LiberoWriter
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.writer import LeRobotWriter
from services.env.simulators import libero_tasks

SIDE, LENGTHS = 16, (6, 4, 5)
CAMERAS = tuple(Camera(name=n, height=SIDE, width=SIDE, rotation_deg=180) for n in libero_tasks.CAMERA_NAMES)
CONTRACT = libero_tasks.embodiment(CAMERAS, episode_limit=280)
TASK = LiberoTask("libero_object", "pick_up_the_milk", "Libero_Floor_Manipulation", "pick up the milk", "(define)")


def episode(number: int, length: int) -> LiberoEpisode:
    random = np.random.default_rng(number)
    actions = random.uniform(-1, 1, (length, 7)).astype(np.float32)
    simulation = random.normal(size=(length, 20))
    return LiberoEpisode(
        states=random.normal(size=(length, 8)).astype(np.float32),
        actions=actions,
        images=tuple(random.integers(0, 256, (length, SIDE, SIDE, 3), dtype=np.uint8) for _ in CAMERAS),
        simulation=simulation,
        joints=simulation[:, 1:8].copy(),
        quaternions=random.normal(size=(length, 4)),
        model="<mujoco/>",
    )


EPISODES = [episode(number, length) for number, length in enumerate(LENGTHS)]


def write(folder: Path) -> Path:
    with LiberoWriter(folder, CONTRACT, TASK) as writer:
        for one in EPISODES:
            writer.add_episode(one)
    return folder


def edit(folder: Path, change: Callable[[h5py.File], object]) -> Path:
    with h5py.File(next(folder.glob("*.hdf5")), "r+") as file:
        change(file)
    return folder


def first_fault(folder: Path) -> str:
    fault = check_dataset(folder).errors[0]
    return f"{fault.where}: {fault.what}"


def test_both_formats_give_the_same_prepared_data_set(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "lerobot", 20.0, CONTRACT, video=False) as writer:
        for one in EPISODES:
            images = {camera.name: pictures for camera, pictures in zip(CAMERAS, one.images, strict=True)}
            writer.add_episode(one.states, one.actions, images, TASK.instruction)
    store = BlobStore(tmp_path / "blobs")
    theirs = prepare_dataset(tmp_path / "lerobot", store)
    ours = prepare_dataset(write(tmp_path / "hdf5"), store)
    assert (ours.source_format, theirs.source_format) == ("libero-hdf5", "lerobot-v3.0")
    assert ours.contract == theirs.contract == CONTRACT
    assert ours.statistics == theirs.statistics
    assert ours.fps == theirs.fps == 20.0
    assert ours.faults == ()
    one, other = PreparedDataset(ours, store.path), PreparedDataset(theirs, store.path)
    assert [e.length for e in ours.episodes] == [e.length for e in theirs.episodes] == list(LENGTHS)
    for index in range(sum(LENGTHS)):
        mine, yours = one.batch([index], chunk=2), other.batch([index], chunk=2)
        assert np.array_equal(mine.state, yours.state)
        assert np.array_equal(mine.action, yours.action)
        assert mine.instructions == yours.instructions
        for a, b in zip(one.images(index), other.images(index), strict=True):
            assert np.array_equal(a, b)
    small = [
        PreparedDataset(prepare_dataset(tmp_path / n, store, image_side=8), store.path) for n in ("hdf5", "lerobot")
    ]
    assert np.array_equal(small[0].images(7)[1], small[1].images(7)[1])


def test_pictures_lie_in_the_file_as_liberos_renderer_gives_them(tmp_path: Path) -> None:
    """Whoever trains on the file with LIBERO's own code gets its own, upside-down pictures."""
    with h5py.File(next(write(tmp_path).glob("*.hdf5"))) as file:
        stored = file["data/demo_1/obs/eye_in_hand_rgb"][()]
        assert np.array_equal(stored, EPISODES[1].images[1][:, ::-1, ::-1])
        assert file["data"].attrs["macros_image_convention"] == "opengl"


def test_the_layout_is_that_of_liberos_own_script(tmp_path: Path) -> None:
    with h5py.File(next(write(tmp_path).glob("*.hdf5"))) as file:
        data = file["data"]
        assert {"problem_info", "bddl_file_name", "bddl_file_content", "env_args", "num_demos", "total"} <= set(
            data.attrs
        )
        assert json.loads(data.attrs["problem_info"])["language_instruction"] == TASK.instruction
        assert (data.attrs["num_demos"], data.attrs["total"]) == (3, sum(LENGTHS))
        demo = data["demo_0"]
        assert set(demo) == {"actions", "states", "robot_states", "rewards", "dones", "obs"}
        assert set(demo["obs"]) == {
            "agentview_rgb", "eye_in_hand_rgb", "ee_pos", "ee_ori", "ee_states", "gripper_states", "joint_states",
        }  # fmt: skip
        assert demo["rewards"][()].tolist() == demo["dones"][()].tolist() == [0, 0, 0, 0, 0, 1]
        assert demo["actions"].dtype == np.float64
        assert demo["robot_states"].shape == (6, 9)
        assert np.array_equal(demo.attrs["init_state"], EPISODES[0].simulation[0])


def test_observations_that_were_seen_after_their_action_are_paired_with_the_next(tmp_path: Path) -> None:
    """LIBERO's own script writes them so: row t shows the state that action t led to."""

    def delay(file: h5py.File) -> None:
        for name, demo in file["data"].items():
            number = int(name.removeprefix("demo_"))
            after = np.concatenate([EPISODES[number].simulation[1:, 1:8], np.ones((1, 7))])
            demo["obs/joint_states"][...] = after

    store = BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(edit(write(tmp_path / "set"), delay), store)
    assert "seen after the action" in manifest.faults[0].what
    assert "(in 3 episodes)" in manifest.faults[0].what
    data = PreparedDataset(manifest, store.path)
    assert [e.length for e in manifest.episodes] == [5, 3, 4]
    batch = data.batch([0], chunk=1)
    assert np.array_equal(batch.state[0], EPISODES[0].states[0])
    assert np.array_equal(batch.action[0, 0], EPISODES[0].actions[1])
    assert np.array_equal(data.images(4)[0], EPISODES[0].images[0][4])


def test_demonstrations_come_in_the_order_of_their_numbers_and_files(tmp_path: Path) -> None:
    def rename(file: h5py.File) -> None:
        file.move("data/demo_2", "data/demo_10")

    folder = edit(write(tmp_path / "set"), rename)
    second = TASK._replace(name="a_first_file", instruction="do another thing")
    with LiberoWriter(folder, CONTRACT, second) as writer:
        writer.add_episode(EPISODES[2])
    manifest = prepare_dataset(folder, BlobStore(tmp_path / "blobs"))
    assert [e.length for e in manifest.episodes] == [5, 6, 4, 5]
    assert [e.instruction for e in manifest.episodes] == ["do another thing"] + ["pick up the milk"] * 3


def write_robomimic(folder: Path, **attributes: str) -> Path:
    folder.mkdir()
    with h5py.File(folder / "lift.hdf5", "w") as file:
        data = file.create_group("data")
        env = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20, "robots": "Panda"}}
        data.attrs["env_args"] = json.dumps(env)
        for key, value in attributes.items():
            data.attrs[key] = value
        one = EPISODES[0]
        demo = data.create_group("demo_0")
        demo["actions"] = one.actions
        demo["obs/robot0_eef_pos"] = one.states[:, :3]
        demo["obs/robot0_eef_quat"] = one.quaternions
        demo["obs/robot0_gripper_qpos"] = one.states[:, 6:]
        demo["obs/agentview_image"] = one.images[0]
        demo["obs/agentview_depth"] = one.images[0][..., :1].astype(np.float32)
    return folder


def test_robomimics_files_are_read_as_they_are(tmp_path: Path) -> None:
    folder = write_robomimic(tmp_path / "set", language_instruction="lift the cube")
    store = BlobStore(tmp_path / "blobs")
    manifest = prepare_dataset(folder, store)
    assert manifest.source_format == "robomimic-hdf5"
    assert (manifest.contract.state_dim, manifest.contract.rotation, manifest.contract.robot) == (
        9,
        "quat_xyzw",
        "panda",
    )
    assert manifest.contract.cameras == (Camera(name="agentview", height=SIDE, width=SIDE),)
    assert np.array_equal(PreparedDataset(manifest, store.path).images(3)[0], EPISODES[0].images[0][3])
    assert "add the attribute 'language_instruction'" in first_fault(write_robomimic(tmp_path / "mute"))


def _replace(path: str, values: np.ndarray) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[path]
        file[path] = values

    return change


def _nan(file: h5py.File) -> None:
    file["data/demo_1/obs/ee_pos"][2, 1] = np.nan


def _from_zero_to_one(file: h5py.File) -> None:
    for demo in file["data"].values():
        demo["actions"][:, 6] = demo["actions"][:, 6] > 0


def _other_size(file: h5py.File) -> None:
    _replace("data/demo_2/obs/agentview_rgb", np.zeros((5, 8, 8, 3), np.uint8))(file)


def _attribute(name: str, value: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file["data"].attrs[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda file: file.pop("data"), "lacks group 'data': it is no set of demonstrations"),
        (lambda file: [file.pop(f"data/demo_{k}") for k in range(3)], "has no demonstration"),
        (
            lambda file: file.pop("data/demo_0/obs"),
            "demo_0: lacks a state in 'obs' (ee_pos, ee_ori and gripper_states)",
        ),
        (lambda file: file.pop("data/demo_0/actions"), "demo_0: lacks 'actions'"),
        (_replace("data/demo_0/actions", np.zeros((6, 0))), "'actions' has shape (6, 0)"),
        (_replace("data/demo_0/obs/ee_pos", np.zeros((5, 3))), "'obs/ee_pos' has shape (5, 3)"),
        (_replace("data/demo_0/obs/agentview_rgb", np.zeros((5, 8, 8, 3), np.uint8)), "has 5 pictures but there are 6"),
        (_nan, "'obs' number 1 is nan at step 2"),
        (_other_size, "demo_2: has another robot, rate, state or cameras than the first"),
        (_from_zero_to_one, "run from 0 to 1: LIBERO opens it with -1"),
        (_attribute("macros_image_convention", "opencv"), "the convention 'opencv'"),
        (_attribute("problem_info", "{"), "is no JSON"),
        (_attribute("problem_info", json.dumps({"problem_name": "x"})), "has no task text"),
    ],
)
def test_faults_are_named_by_place_with_what_to_do(
    tmp_path: Path, change: Callable[[h5py.File], object], sentence: str
) -> None:
    assert sentence in first_fault(edit(write(tmp_path), change))


def _external_storage(file: h5py.File) -> None:
    del file["data/demo_0/obs/ee_pos"]
    file.create_dataset("data/demo_0/obs/ee_pos", shape=(6, 3), dtype="f8", external=[("/etc/passwd", 0, 144)])


def _virtual(file: h5py.File) -> None:
    del file["data/demo_0/obs/ee_pos"]
    layout = h5py.VirtualLayout(shape=(6, 3), dtype="f8")
    layout[...] = h5py.VirtualSource("/tmp/other.hdf5", "x", shape=(6, 3))
    file.create_virtual_dataset("data/demo_0/obs/ee_pos", layout)


def _link(path: str, link: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[path]
        file[path] = link

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_link("data", h5py.ExternalLink("/tmp/other.hdf5", "/data")), "is a link to another place"),
        (_link("data/demo_0", h5py.SoftLink("/data/demo_1")), "is a link to another place"),
        (_link("data/demo_0/obs/ee_pos", h5py.ExternalLink("other.hdf5", "/x")), "is a link to another place"),
        (_external_storage, "keeps its numbers in another file"),
        (_virtual, "keeps its numbers in another file"),
    ],
)
def test_nothing_is_read_from_outside_the_file(
    tmp_path: Path, change: Callable[[h5py.File], object], sentence: str
) -> None:
    assert sentence in first_fault(edit(write(tmp_path), change))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = next(write(tmp_path).glob("*.hdf5"))
    path.write_bytes(path.read_bytes()[:2000])
    assert "is truncated or no HDF5 file" in first_fault(tmp_path)
    path.write_bytes(b"no HDF5")
    assert "is truncated or no HDF5 file" in first_fault(tmp_path)


def test_mounted_folders_with_hdf5_files_are_found(tmp_path: Path) -> None:
    write(tmp_path / "Milk.v1")
    (tmp_path / "notes").mkdir()
    assert find_mounted(tmp_path) == {"milk-v1": tmp_path / "Milk.v1"}


def test_the_writer_refuses_what_does_not_fit_and_leaves_no_half_file(tmp_path: Path) -> None:
    one = EPISODES[0]
    with LiberoWriter(tmp_path, CONTRACT, TASK) as writer:
        with pytest.raises(ValueError, match="one a step"):
            writer.add_episode(one._replace(joints=one.joints[:2]))
        with pytest.raises(ValueError, match="cameras do not fit"):
            writer.add_episode(one._replace(images=one.images[:1]))
        writer.add_episode(one)
    assert check_dataset(tmp_path).faults == ()
    with pytest.raises(ValueError, match="exists already"):
        LiberoWriter(tmp_path, CONTRACT, TASK)
    with pytest.raises(ValueError, match="one a step"), LiberoWriter(tmp_path / "new", CONTRACT, TASK) as writer:
        writer.add_episode(one._replace(joints=one.joints[:2]))
    assert list((tmp_path / "new").iterdir()) == []
