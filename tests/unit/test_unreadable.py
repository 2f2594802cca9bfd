"""Foreign bytes that once raised what nobody expected are refused in a sentence, by every reader that they reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import blake3
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.journal.records import BlobRecord
from common.journal.rows import Reader, seal
from joynexus.keyring import Keyring
from joynexus.keys import ClusterFile, KeyPair, KeyRegistry
from joynexus.simulation import process, trajectories
from joynexus.specs import MAX_DECISIONS
from joynexus.tenants import TenantLimitsFile
from joynexus.wire import JoyNexusError, join
from joynexus.wire.back import PredictItem, TrainItem
from joynexus.wire.front import DatasetSamples
from services.env.datasets import apart, prepare, reader
from services.env.datasets.check import check_dataset
from services.inference import core as inference
from services.master.sources import ShellSources
from services.trainer.blobs import Blobs
from services.trainer.checkpoint import CheckpointMeta, read_checkpoint
from services.trainer.samples import SampleReader
from tests.unit.env import sets
from tests.unit.env.test_trajectories import make
from tests.unit.workers import spec

PACKED = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
"""A map with a field that nobody knows, nested without end."""
JSON = b'{"x":' + b"[" * 100_000


def file(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


FILES: dict[str, Callable[[Path], object]] = {
    "keys": lambda path: KeyRegistry(path).lookup("x"),
    "key": KeyPair.load,
    "cluster": ClusterFile.load,
    "limits": lambda path: TenantLimitsFile(path).load(),
}


@pytest.mark.parametrize("read", FILES.values(), ids=FILES)
@pytest.mark.parametrize("inner", [b'{"keys":[{"x":', b'{"a":{"x":', b"x = ", b""])
def test_a_file_of_values_nested_without_end_is_refused(
    tmp_path: Path, read: Callable[[Path], object], inner: bytes
) -> None:
    with pytest.raises(ValueError, match="file"):
        read(file(tmp_path, inner + b"[" * 100_000))


def test_addresses_nested_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "addresses.json").write_bytes(JSON)
    with pytest.raises(ValueError, match="not a folder of keys"):
        Keyring(tmp_path).issue("laptop", tenant="a")


def test_a_row_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="not what this release writes"):
        Reader.of(BlobRecord).decode(seal(PACKED))


def test_a_manifest_nested_without_end_is_refused_by_the_master(tmp_path: Path) -> None:
    store = cast(Any, SimpleNamespace(path=lambda digest: file(tmp_path, PACKED)))
    with pytest.raises(ValueError, match="is no data set manifest"):
        ShellSources(cast(Any, None), store).manifest(blake3.blake3(PACKED).hexdigest())


@pytest.mark.parametrize(
    "fields", [{"samples": PACKED}, {"payload": "b"}, {"dataset": DatasetSamples(dataset="b", indices=(0,))}]
)
def test_samples_nested_without_end_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    content = join([PACKED]) if "payload" in fields else PACKED
    blobs = Blobs(lambda digest: file(tmp_path, content), lambda path: ("", 0), tmp_path / "scratch")
    item = TrainItem(tenant="a", policy="p", seq=1, kind="train_step", **fields)
    with pytest.raises(JoyNexusError, match="recursion"):
        SampleReader(blobs, lambda scope, seen: "").read(item, (), spec())


def test_a_request_to_act_nested_without_end_is_refused() -> None:
    served = cast(Any, SimpleNamespace(policy=SimpleNamespace(spec=spec())))
    item = PredictItem(request="r", tenant="a", policy="p", version=1, digest="", act=PACKED, first_buffer=0, buffers=0)
    with pytest.raises(JoyNexusError, match="the request cannot be read"):
        inference._read(item, (), served)


def test_a_simulators_process_whose_reply_is_nested_without_end_is_taken_for_dead() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        theirs.send_bytes(b"\x82\xa4type\xa8Outcomes" + PACKED[1:])
        asked = cast(process.WorkerProcess, type("Asked", (), {"pipe": ours})())
        assert process.receive([asked], 20.0) == {asked: process.DEAD}


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"w": ["float32", [3]]}, "other tensors than its header says"),
        ({"w": ["float32", [2**40, 2**40]]}, "other tensors than its header says"),
        ({"w": ["float32", [-1, -2]]}, "cannot be read"),
        ({"w": ["float32", [0, 2**63]]}, "cannot be read"),
        ({"w": ["int8", [2]]}, "other tensors than its header says"),
        (None, "cannot be read"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(
    tmp_path: Path, layout: dict[str, Any] | None, sentence: str
) -> None:
    meta = CheckpointMeta(tenant="a", policy="p", spec="s", backbone="b", applied_seq=1, step=0)
    header = json.dumps({"meta": msgspec.to_builtins(meta), "layout": layout})
    path = tmp_path / "checkpoint"
    text = header if layout is not None else header[:-1] + ',"x":' + "[" * 100_000
    save_file({"float32": torch.zeros(2)}, path, metadata={"joynexus": text})
    with pytest.raises(ValueError, match=sentence):
        read_checkpoint(path, blake3.blake3(path.read_bytes()).hexdigest())


def test_more_episodes_than_can_be_trained_on_are_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as unchecked:  # whoever writes it may leave out what we check
        unchecked.setattr(trajectories, "_check", lambda t: None)
        made = make((1,) * 3)
        blob = trajectories.pack(made)
        many = trajectories.pack(
            trajectories.Trajectories(**{**vars(made), "seeds": np.arange(MAX_DECISIONS + 1, dtype=np.int64)})
        )
    assert len(trajectories.unpack(blob).lengths) == 3
    with monkeypatch.context() as alarmed:
        alarmed.setattr(trajectories, "_check", lambda t: pytest.fail("it was looked at"))
        with pytest.raises(ValueError, match=f"{MAX_DECISIONS + 1} rows"):
            trajectories.unpack(many)


def test_a_table_whose_columns_have_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    folder = sets.write_v2(tmp_path / "set", lengths=(3,), video=False)
    table = folder / "data/chunk-000/episode_000000.parquet"
    table.write_bytes(table.read_bytes().replace(b"frame_index", b"frame\xe9index"))
    (fault,) = check_dataset(folder).faults
    assert "no parquet file" in fault.what


@pytest.mark.parametrize("error", [KeyError("x"), OSError("of a library"), UnicodeDecodeError("utf-8", b"", 0, 1, "")])
def test_whatever_a_library_raises_over_a_set_is_a_fault_of_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(prepare, "prepare_dataset", fails)
    told = reader._outcome(
        tmp_path, reader.Job(str(tmp_path), "", None, 1 << 30), cast(Any, SimpleNamespace(alive=None))
    )
    assert isinstance(told, reader.Faulty)
    assert type(error).__name__ in told.faults[0].what


def test_a_reader_of_sets_whose_word_is_nested_without_end_is_taken_for_lost(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        theirs.send_bytes(PACKED)
        job = apart.Job(str(tmp_path), "", None, 1 << 30)
        with pytest.raises(apart.ReaderLostError, match="said what cannot be read"):
            apart._follow(ours, job, cast(Any, None), lambda: None, 20.0)
