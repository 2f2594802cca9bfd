from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from joynexus.contract import Camera
from joynexus.vla import numerics
from joynexus.vla.backbones import Backbone
from joynexus.vla.exported import ExportedPolicy, export_policy, load_policy
from joynexus.vla.feature import Observation
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import write_version
from tests.unit.vla.samples import ACTION, CHUNK, STATE, contract, picture, policy_spec

CAMERAS = (Camera(name="front", height=64, width=64), Camera(name="wrist", height=64, width=96))


def served(backbone: Backbone) -> Policy:
    return Policy(policy_spec(contract=contract(cameras=CAMERAS)), backbone.digest, backbone.hidden_size)


def views() -> list[np.ndarray]:  # type: ignore[type-arg]  # pictures
    return [picture(1), np.ascontiguousarray(picture(2, side=96)[:64])]


@pytest.fixture
def folder(tiny: Backbone, tmp_path: Path) -> Path:
    write_version(tmp_path / "v", served(tiny), 3, numerics_class=numerics.numerics_class())
    export_policy(tmp_path / "v", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def loaded(folder: Path, cache_dir: Path) -> ExportedPolicy:
    return load_policy(folder, cache_dir=cache_dir)


def test_an_exported_policy_acts_as_the_served_version_bit_for_bit(tiny: Backbone, loaded: ExportedPolicy) -> None:
    state = np.arange(STATE, dtype=np.float32)
    features = tiny.forward([Observation(tuple(views()), "push"), Observation((), "another tenant's")])[:1]
    expected = served(tiny).act(features, state[None])[0]
    actions = loaded.act(views(), "push", state)
    assert actions.shape == (CHUNK, ACTION)
    np.testing.assert_array_equal(actions, expected)
    assert loaded.numerics.bit_equal
    assert loaded.version == 3


def test_an_exported_policy_that_samples_draws_for_a_seed_what_the_service_draws(
    tiny: Backbone, tmp_path: Path, cache_dir: Path
) -> None:
    spec = policy_spec(
        contract=contract(cameras=CAMERAS), head="groot", head_config={"width": 32}, adapter="bottleneck"
    )
    policy = Policy(spec, tiny.digest, tiny.hidden_size)
    write_version(tmp_path / "v", policy, 3)
    export_policy(tmp_path / "v", tmp_path / "out")
    loaded = load_policy(tmp_path / "out", cache_dir=cache_dir)
    state = np.arange(STATE, dtype=np.float32)
    features = tiny.forward([Observation(tuple(views()), "push")])
    for seed in (0, 2**63 - 1):
        expected = policy.act(features, state[None], seeds=[seed])[0]
        np.testing.assert_array_equal(loaded.act(views(), "push", state, seed=seed), expected)
    assert np.abs(loaded.act(views(), "push", state) - expected).max() > 1e-2


def test_an_exported_policy_gets_every_hidden_state_that_its_head_reads(
    loaded: ExportedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed module may read more than the last one."""
    state = np.zeros(STATE, np.float32)
    expected = loaded.act(views(), "push", state)
    monkeypatch.setattr(loaded._policy.module, "layers", (1, -1))
    np.testing.assert_array_equal(loaded.act(views(), "push", state), expected)


def test_images_by_camera_name_are_put_in_the_contracts_order(loaded: ExportedPolicy) -> None:
    front, wrist = views()
    state = np.zeros(STATE)
    named = loaded.act({"wrist": wrist, "front": front}, "push", state)
    np.testing.assert_array_equal(named, loaded.act([front, wrist], "push", state))


def test_the_folder_says_everything_in_json(folder: Path) -> None:
    read = {file.name: file.read_text() for file in folder.iterdir() if file.suffix in (".json", ".txt")}
    assert json.loads(read["config.json"])["head"] == "oft"
    assert json.loads(read["contract.json"])["cameras"][1]["name"] == "wrist"
    assert json.loads(read["statistics.json"])["count"] == 100
    assert "front (64x64), wrist (64x96)" in read["README.txt"]


def test_other_numerics_are_said_with_the_reason(tiny: Backbone, tmp_path: Path, cache_dir: Path) -> None:
    for given, says in (("cpu:Other-1-1:avx512", "the service was cpu:Other"), ("", "does not say")):
        write_version(tmp_path / "v", served(tiny), 3, numerics_class=given)
        export_policy(tmp_path / "v", tmp_path / "out")
        told = load_policy(tmp_path / "out", cache_dir=cache_dir).numerics
        assert not told.bit_equal
        assert says in told.reason


def test_another_backbone_is_refused(folder: Path, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="the policy was trained on"):
        load_policy(folder, backbone="tiny-qwen3vl@96", cache_dir=cache_dir)


def test_input_that_does_not_fit_the_contract_is_refused(loaded: ExportedPolicy) -> None:
    front, wrist = views()
    with pytest.raises(ValueError, match="front 64x64, wrist 64x96"):
        loaded.act([wrist, front], "push", np.zeros(STATE))
    with pytest.raises(ValueError, match="contract's are"):
        loaded.act({"front": front}, "push", np.zeros(STATE))
    with pytest.raises(ValueError, match="state has shape"):
        loaded.act([front, wrist], "push", np.zeros(STATE + 1))


def test_configure_chooses_kernels_before_torch_loads_and_loading_the_package_does_not_load_torch() -> None:
    script = (
        "import sys; from joynexus.vla import numerics, exported; assert 'torch' not in sys.modules; "
        "numerics.configure(1); import os, torch; "
        "print(os.environ['MKL_CBWR'], torch.get_num_threads(), numerics.numerics_class())"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=120, check=True
    )
    cbwr, threads, name = run.stdout.split()
    assert cbwr in ("AVX2,STRICT", "AVX512,STRICT")
    assert threads == "1"
    assert f"cbwr={cbwr}:threads=1:float32:torch-" in name


def test_a_class_names_type_threads_and_the_libraries_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numerics.numerics_class(dtype="bfloat16") != numerics.numerics_class()
    assert ":threads=1:float32:torch-" in numerics.numerics_class()
    before = numerics.numerics_class()
    monkeypatch.setattr(numerics, "version", lambda package: "99.0")
    assert numerics.numerics_class() != before, "features of an older transformers are no hit after an upgrade"
    with pytest.raises(ValueError, match="at least 1"):
        numerics.configure(0)
