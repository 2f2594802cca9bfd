"""The readable files of an exported policy, made from the header of a version file alone."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from joynexus import export_layout
from joynexus.contract import Camera, Contract
from joynexus.specs import PolicySpec

SPEC = PolicySpec(
    backbone="lite",
    chunk=4,
    normalization="none",
    contract=Contract(robot="r", cameras=(Camera(name="front", height=4, width=6),), state_dim=3, action_dim=2),
)


def version_file(path: Path, metadata: dict[str, str]) -> None:
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_folder_has_what_a_reader_needs_and_loads_no_torch(tmp_path: Path) -> None:
    meta = {"format": 1, "version": 7, "spec": msgspec.to_builtins(SPEC), "backbone_digest": "ab", "hidden_size": 8}
    version_file(tmp_path / export_layout.WEIGHTS, {"joynexus": json.dumps(meta)})
    program = (
        "import sys, pathlib\nfrom joynexus import export_layout\n"
        f"assert export_layout.complete(pathlib.Path({str(tmp_path)!r})).version == 7\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[3])
    assert msgspec.json.decode((tmp_path / "config.json").read_bytes(), type=PolicySpec) == SPEC
    assert msgspec.json.decode((tmp_path / "contract.json").read_bytes(), type=Contract) == SPEC.contract
    assert json.loads((tmp_path / "statistics.json").read_text()) is None
    text = (tmp_path / "README.txt").read_text()
    assert "front (4x6)" in text
    assert "[4, 2]" in text


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, struct.pack("<Q", 2) + b"{}"])
def test_anything_else_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / export_layout.WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match="is not a"):
        export_layout.complete(tmp_path)
