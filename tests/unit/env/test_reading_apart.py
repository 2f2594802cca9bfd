"""A data set is read by a process of its own: whatever its files do there, the env service gets a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import pytest

from common.blobs import BlobStore, BlobStoreFullError
from joynexus.wire.back import PrepareDataset
from services.env.confinement import missing
from services.env.data_work import DataWork
from services.env.datasets.apart import Done, Job, ReaderLostError, _follow, prepare_apart
from services.env.datasets.prepare import prepare_dataset
from services.env.datasets.report import DatasetError
from tests.unit.env import sets

ROOT = Path(__file__).resolve().parents[3]
MEMORY = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return sets.write_v3(tmp_path / "set")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Have the reader's library for videos do what a hostile file would make it do."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "av.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path / "shadow"))


def test_it_gives_the_manifest_and_the_blobs_of_a_reader_in_this_process(
    tmp_path: Path, folder: Path, blobs: BlobStore
) -> None:
    seconds: list[float] = []
    signs: list[int] = []
    manifest = prepare_apart(
        folder,
        blobs,
        tmp_path / "scratch",
        memory_bytes=MEMORY,
        image_side=8,
        alive=lambda: signs.append(1),
        busy=seconds.append,
    )
    assert manifest == prepare_dataset(folder, BlobStore(tmp_path / "other"), image_side=8)
    assert all(blobs.has(episode.blob) for episode in manifest.episodes)
    assert len(signs) >= len(manifest.episodes)
    assert len(seconds) == 1
    assert seconds[0] > 0
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_file_that_crashes_its_reader_is_a_fault_of_the_set_and_the_next_set_is_read(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        shadow(tmp_path, patch, "import ctypes\nctypes.string_at(0)\n")
        seconds: list[float] = []
        work = DataWork(blobs, tmp_path / "scratch", {"set": folder}, child_busy=seconds.append)
        message = PrepareDataset(task="t", attempt=1, tenant="a", dataset="set", mounted="set")
        answer = work.prepare(message)
    assert answer.error is None
    assert answer.manifest == ""
    assert "crash (SIGSEGV)" in answer.faults[0].what
    assert seconds[0] > 0
    assert work.prepare(message).manifest


def test_a_file_that_takes_all_memory_is_a_fault_of_the_set(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow(tmp_path, monkeypatch, "eaten = []\nwhile True:\n    eaten.append(bytearray(64 << 20))\n")
    with pytest.raises(DatasetError, match="more than 1024 MiB of memory: split it"):
        prepare_apart(folder, blobs, tmp_path / "scratch", memory_bytes=MEMORY)


def test_a_file_that_holds_its_reader_for_ever_is_a_fault_of_the_set(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow(tmp_path, monkeypatch, "import signal\nwhile True:\n    signal.pause()\n")
    with pytest.raises(DatasetError, match="got on with nothing for 3 s"):
        prepare_apart(folder, blobs, tmp_path / "scratch", memory_bytes=MEMORY, silent_s=3.0)


@pytest.mark.parametrize("half", [b"\0\0", b"\0\0\0\x09half"], ids=["of its length", "of its content"])
def test_nobody_waits_for_the_rest_of_a_message_that_a_reader_stopped_in(
    tmp_path: Path, blobs: BlobStore, half: bytes
) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        os.write(theirs.fileno(), half)
        job = Job(str(tmp_path / "set"), str(tmp_path / "episode"), None, MEMORY)
        with pytest.raises(DatasetError, match="got on with nothing"):
            _follow(ours, job, blobs, lambda: None, silent_s=0.2)


def test_a_reader_that_was_killed_from_outside_says_nothing_about_the_set(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow(tmp_path, monkeypatch, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(ReaderLostError, match=f"ended with -{signal.SIGKILL:d}"):
        prepare_apart(folder, blobs, tmp_path / "scratch", memory_bytes=MEMORY)


def test_a_full_disk_ends_the_reader_and_is_told(tmp_path: Path, folder: Path) -> None:
    class Full:
        def put_file(self, path: Path, *, move: bool = True) -> tuple[str, int]:
            raise BlobStoreFullError(28, "the disk is full")

    with pytest.raises(BlobStoreFullError):
        prepare_apart(folder, Full(), tmp_path / "scratch", memory_bytes=MEMORY)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_reader_cannot_name_blobs_that_it_did_not_write(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = prepare_dataset(sets.write_v3(tmp_path / "foreign"), blobs)
    (folder / "done").write_bytes(msgspec.msgpack.encode(Done(foreign)))
    body = f"""
import sys, time
from multiprocessing.connection import Connection
Connection(int(sys.argv[1])).send_bytes(open({str(folder / "done")!r}, "rb").read())
time.sleep(60.0)
"""
    shadow(tmp_path, monkeypatch, body)
    with pytest.raises(ReaderLostError, match="names episodes that it did not write"):
        prepare_apart(folder, blobs, tmp_path / "scratch", memory_bytes=MEMORY)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_confined_process_reaches_its_own_files_and_nothing_else(tmp_path: Path) -> None:
    for name in ("set", "written", "keys"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    program = """
import json, os, pathlib, signal, socket, sys
from services.env.confinement import confine
folder = pathlib.Path(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
confine([folder / "set", folder / "not there"], folder / "written", memory_bytes=1 << 30)
attempts = {
    "read the set": lambda: (folder / "set/file").read_text(),
    "write an episode": lambda: (folder / "written/episode").write_text("x"),
    "read a key": lambda: (folder / "keys/file").read_text(),
    "list keys": lambda: os.listdir(folder / "keys"),
    "write to the set": lambda: (folder / "set/file").write_text("x"),
    "remove from the set": lambda: (folder / "set/file").unlink(),
    "link to a key": lambda: (folder / "written/link").symlink_to(folder / "keys/file"),
    "give a key another name": lambda: os.link(folder / "keys/file", folder / "written/hard"),
    "make a pipe": lambda: os.mkfifo(folder / "written/pipe"),
    "read the parent's memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
    "take all memory": lambda: bytearray(2 << 30),
}
done = []
for name, attempt in attempts.items():
    try:
        attempt()
        done.append(name)
    except (OSError, MemoryError):
        pass
print(json.dumps(done))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout) == ["read the set", "write an episode"]
    assert os.listdir(tmp_path / "keys") == ["file"]


def test_where_files_cannot_be_confined_memory_and_open_files_are_bounded_all_the_same(tmp_path: Path) -> None:
    program = """
import pathlib, resource, sys
from services.env import confinement
confinement._abi = lambda: 0
assert "Landlock" in confinement.missing()
confinement.confine([], pathlib.Path(sys.argv[1]), memory_bytes=1 << 30)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= confinement.FILES
try:
    bytearray(2 << 30)
except MemoryError:
    print("bounded")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "bounded\n"


def test_a_readers_environment_names_no_key(
    tmp_path: Path, folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOYNEXUS_CLUSTER_FILE", "/keys/client.toml")
    shadow(
        tmp_path,
        monkeypatch,
        "import os, signal\n"
        "if not any(name.startswith('JOYNEXUS_') for name in os.environ):\n"
        "    os.kill(os.getpid(), signal.SIGFPE)\n",
    )
    with pytest.raises(DatasetError, match="SIGFPE"):
        prepare_apart(folder, blobs, tmp_path / "scratch", memory_bytes=MEMORY)
