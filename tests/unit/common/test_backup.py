"""A backup is whole or none, and a cluster goes on from it with all that was acknowledged."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import blake3
import pytest

from common import backup
from common.backup import BusyError, Places, make, restore
from common.backup_command import main
from common.blobs import BlobStore
from common.journal.journal import Journal, journal_url
from common.journal.records import BlobRecord, CheckpointRecord, OpRecord, PolicyRecord, Record, VersionRecord
from common.journal.references import references
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import KeyPair
from tests.unit.common.test_journal import SPEC, op
from tests.unit.master.verbs import Scene

DATA = (b"a checkpoint", b"a version", b"an upload", b"")


def places_in(folder: Path) -> Places:
    return Places(state=folder / "state", blobs=folder / "blobs", keys=folder / "keys")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A cluster with something of each: ops above and below a checkpoint, blobs, keys."""
    made = places_in(tmp_path / "cluster")
    made.state.mkdir(parents=True)
    store = BlobStore(made.blobs)
    checkpoint, version, upload, _ = (store.put_bytes(data) for data in DATA)
    keyring = Keyring(tmp_path / "cluster" / "keys")
    keyring.prepare(Addresses())
    keyring.issue("lab", tenant="lab")
    with closing(open_journal(made)) as journal:
        journal.append([
            PolicyRecord(tenant="a", policy="p", spec=SPEC),
            CheckpointRecord(tenant="a", policy="p", digest=checkpoint, nbytes=1, seq=1, step=1),
            VersionRecord(tenant="a", policy="p", version=1, digest=version, nbytes=1, step=1),
            BlobRecord(tenant="a", digest=upload, nbytes=1),
            OpRecord(tenant="a", policy="p", seq=1, kind="load_weights", blob="0" * 64),  # covered: its blob has gone
            op(2, b"samples"),
        ])  # fmt: skip
    return made


def open_journal(places: Places) -> Journal:
    return Journal(journal_url(places.state / "journal.db"))


def records(places: Places) -> list[Record]:
    with closing(open_journal(places)) as journal:
        assert journal.payload("a", "p", 2) == b"samples"
        return list(journal.load())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_cluster_goes_on_from_a_backup_with_all_that_it_had(places: Places, tmp_path: Path) -> None:
    contents = make(tmp_path / "copy", places, live=False)
    assert (contents.records, contents.blobs, contents.missing) == (6, 4, ())
    there = places_in(tmp_path / "elsewhere")
    assert restore(tmp_path / "copy", there) == contents
    assert records(there) == records(places)
    assert all(BlobStore(there.blobs).has(digest) for digest in map(digest_of, DATA))
    assert there.keys is not None
    assert places.keys is not None
    assert files(there.keys) == {name: data for name, data in files(places.keys).items() if ".lock" not in name}
    for path in (tmp_path / "copy" / "keys").rglob("*.toml"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700


def test_journal_is_copied_while_a_master_writes_to_it(places: Places, tmp_path: Path) -> None:
    with closing(open_journal(places)) as journal:
        with pytest.raises(BusyError, match="another process has the journal"):
            make(tmp_path / "copy", places, live=False)
        journal.append([op(3)])
        assert make(tmp_path / "copy", places, live=True).records == 7
        journal.append([op(4)])
    restore(tmp_path / "copy", there := places_in(tmp_path / "elsewhere"))
    assert [record.seq for record in records(there) if isinstance(record, OpRecord)] == [1, 2, 3]


def test_journal_of_a_master_that_was_killed_is_copied_with_what_lies_in_its_log(
    places: Places, tmp_path: Path
) -> None:
    with closing(open_journal(places)) as journal:
        journal.append([op(3)])
        killed = tmp_path / "killed"
        shutil.copytree(places.state, killed / "state")
    shutil.copytree(places.blobs, killed / "blobs")
    assert (killed / "state" / "journal.db-wal").stat().st_size
    assert (
        make(tmp_path / "copy", Places(state=killed / "state", blobs=killed / "blobs", keys=None), live=False).records
        == 7
    )


def test_keys_are_left_out_if_that_is_asked(places: Places, tmp_path: Path) -> None:
    contents = make(tmp_path / "copy", Places(state=places.state, blobs=places.blobs, keys=None), live=False)
    assert not contents.keys
    assert places.keys is not None
    secret = KeyPair.load(places.keys / "lab" / "key.toml").secret.encode()
    assert not any(secret in data for data in files(tmp_path / "copy").values())
    with pytest.raises(ValueError, match=r"has no keys: make new ones, with --no-keys"):
        restore(tmp_path / "copy", places_in(tmp_path / "elsewhere"))


def test_blobs_that_were_lost_before_are_named(places: Places, tmp_path: Path) -> None:
    lost, hurt = digest_of(DATA[0]), digest_of(DATA[1])
    (places.blobs / lost[:2] / lost).unlink()
    (places.blobs / hurt[:2] / hurt).write_bytes(b"not a version")
    contents = make(tmp_path / "copy", places, live=False)
    assert contents.missing == tuple(sorted((lost, hurt)))
    assert restore(tmp_path / "copy", places_in(tmp_path / "elsewhere")).missing == contents.missing


@pytest.mark.parametrize("when", ["_copy_journal", "_copy_blob", "_copy_keys", "write_private"])
def test_backup_that_fails_leaves_nothing(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(backup, when, full)
        with pytest.raises(OSError, match="No space"):
            make(tmp_path / "copy", places, live=False)
    assert not list(tmp_path.glob("copy*"))
    make(tmp_path / "copy", places, live=False)


def test_two_backups_into_one_folder_do_not_mix(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_keys = backup._copy_keys
    refused: list[str] = []

    def meanwhile(source: Path, target: Path) -> None:
        with pytest.raises(ValueError, match="another process makes a backup") as error:
            make(tmp_path / "copy", places, live=True)
        refused.append(str(error.value))
        copy_keys(source, target)

    monkeypatch.setattr(backup, "_copy_keys", meanwhile)
    make(tmp_path / "copy", places, live=True)
    assert len(refused) == 1
    restored = places_in(tmp_path / "elsewhere")
    monkeypatch.undo()
    restore(tmp_path / "copy", restored)
    assert records(restored) == records(places)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["backup.json", "blobs", "journal.db", "keys"]


def test_backup_that_was_killed_is_none_and_the_next_one_takes_its_place(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(backup.shutil, "rmtree", lambda *_, **__: None)  # as if it had ended on the spot
        patched.setattr(backup, "_copy_keys", lambda *_: _killed())
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "copy", places, live=False)
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy.partial"]
    with pytest.raises(ValueError, match=r"is no backup, or one that was not finished"):
        restore(tmp_path / "copy.partial", places_in(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()
    make(tmp_path / "copy", places, live=False)
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy"]


def _killed() -> None:
    raise KeyboardInterrupt


def a_blob(copy: Path) -> Path:
    return copy / "blobs" / digest_of(DATA[0])[:2] / digest_of(DATA[0])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda copy: a_blob(copy).write_bytes(b"a chequepoint"), "1 blobs .* are not as they were written"),
        (lambda copy: a_blob(copy).unlink(), "it has 3 blobs, and 4 were written"),
        (lambda copy: (copy / "backup.json").unlink(), "is no backup, or one that was not finished"),
        (lambda copy: (copy / "backup.json").write_bytes(b"{"), "is no backup, or one that was not finished"),
        (lambda copy: (copy / "keys" / "registry.json").unlink(), "its keys are not there"),
        (lambda copy: os.truncate(copy / "keys" / "registry.json", 50), "keys/registry.json in it is not as it was"),
        (lambda copy: (copy / "keys" / "lab" / "key.toml").unlink(), "keys/lab/key.toml in it is not as it was"),
        (lambda copy: os.truncate(copy / "journal.db", 8192), "the journal in the backup .* is damaged"),
    ],
)
def test_damaged_backup_is_refused_before_anything_is_written(
    places: Places, tmp_path: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    make(tmp_path / "copy", places, live=False)
    harm(tmp_path / "copy")
    with pytest.raises(ValueError, match=sentence):
        restore(tmp_path / "copy", places_in(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


def test_backup_within_what_it_copies_is_refused(places: Places, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cluster")
    before = files(tmp_path / "cluster")
    for where in ("cluster/keys/copy", "cluster/blobs/copy", "link/state/copy", "cluster/keys"):
        with pytest.raises(ValueError, match=r"name a folder elsewhere|is not empty"):
            make(tmp_path / where, places, live=True)
    assert files(tmp_path / "cluster") == before
    make(tmp_path / "cluster" / "copy", places, live=True)


def test_cluster_that_is_there_is_not_overwritten(places: Places, tmp_path: Path) -> None:
    make(tmp_path / "copy", places, live=False)
    before = files(tmp_path / "cluster")
    with pytest.raises(ValueError, match=r"there is a journal in .* already: restore into an empty folder"):
        restore(tmp_path / "copy", places)
    shutil.rmtree(places.state)
    with pytest.raises(ValueError, match=r"there are keys in .* already: with --no-keys they stay"):
        restore(tmp_path / "copy", places)
    assert set(files(tmp_path / "cluster")) < set(before)
    restore(tmp_path / "copy", Places(state=places.state, blobs=places.blobs, keys=None))
    with pytest.raises(ValueError, match="is not empty: name a folder that is to be made"):
        make(tmp_path / "copy", places, live=False)


@pytest.mark.parametrize("when", ["_copy_keys", "sync_folder"])
def test_restore_that_was_killed_is_taken_up_and_no_master_begins_anew_in_between(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    make(tmp_path / "copy", places, live=False)
    there = places_in(tmp_path / "elsewhere")
    with monkeypatch.context() as patched:
        patched.setattr(backup, when, lambda *_: _killed())
        with pytest.raises(KeyboardInterrupt):
            restore(tmp_path / "copy", there)
    with pytest.raises(ValueError, match="is damaged"):
        open_journal(there)
    restore(tmp_path / "copy", there)
    assert records(there) == records(places)


def test_what_is_asked_for_is_what_the_core_holds(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    held = {digest for digest, count in scene.world.core._holdings._everybody.items() if count}
    assert held
    assert references(scene.world.journal.load()) == held


def digest_of(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def test_exit_code_says_whether_it_was_made_and_whether_all_is_there(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--state", str(places.state), "--blobs", str(places.blobs)]
    assert main(["make", str(tmp_path / "copy"), *arguments]) == 0
    assert main(["make", str(tmp_path / "copy"), *arguments]) == 2
    assert "is not empty" in capsys.readouterr().err
    with closing(open_journal(places)):
        assert main(["make", str(tmp_path / "other"), *arguments]) == 75
    lost = digest_of(DATA[0])
    (places.blobs / lost[:2] / lost).unlink()
    assert main(["make", str(tmp_path / "other"), *arguments]) == 3
    assert lost in capsys.readouterr().out
