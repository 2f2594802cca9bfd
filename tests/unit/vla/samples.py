"""Small policies, pictures and batches for the tests of joynexus.vla."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.specs import PolicySpec
from joynexus.vla.feature import Observation, VLAFeature

DIGEST = "b" * 32
HIDDEN, STATE, ACTION, CHUNK = 32, 5, 3, 4


def picture(seed: int, side: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def observation(seed: int, views: int = 1, instruction: str = "push the button", side: int = 64) -> Observation:
    return Observation(tuple(picture(100 * seed + view, side) for view in range(views)), instruction)


def vector_statistics(dim: int, **changes: tuple[float, ...]) -> VectorStatistics:
    fields: dict[str, tuple[float, ...]] = {
        "mean": tuple(0.1 * i for i in range(dim)),
        "std": tuple(1.0 + i for i in range(dim)),
        "min": tuple(-2.0 - i for i in range(dim)),
        "max": tuple(3.0 + i for i in range(dim)),
        "q01": tuple(-1.5 - i for i in range(dim)),
        "q99": tuple(2.5 + i for i in range(dim)),
    }
    return VectorStatistics(**(fields | changes))


def statistics(state: int = STATE, action: int = ACTION) -> Statistics:
    return Statistics(count=100, state=vector_statistics(state), action=vector_statistics(action))


def contract(**changes: Any) -> Contract:
    fields: dict[str, Any] = {
        "robot": "test",
        "cameras": (Camera(name="front", height=64, width=64),),
        "state_dim": STATE,
        "action_dim": ACTION,
    }
    return Contract(**(fields | changes))


def policy_spec(**changes: Any) -> PolicySpec:
    fields: dict[str, Any] = {
        "backbone": "tiny-qwen3vl",
        "contract": contract(),
        "statistics": statistics(),
        "chunk": CHUNK,
        "head_config": {"width": 16, "hidden": 32, "heads": 2, "queries": 2},
        "seed": 3,
    }
    return PolicySpec(**(fields | changes))


@dataclass
class Batch:
    features: list[VLAFeature]
    state: np.ndarray[Any, np.dtype[np.float32]]
    action: np.ndarray[Any, np.dtype[np.float32]]
    mask: np.ndarray[Any, np.dtype[np.bool_]]

    def arguments(self) -> tuple[Any, Any, Any, Any]:
        return self.features, self.state, self.action, self.mask


def feature(random: torch.Generator, length: int, hidden: int = HIDDEN) -> VLAFeature:
    tokens = torch.randn(length, hidden, generator=random)
    return VLAFeature({-1: tokens}, torch.zeros(length, dtype=torch.uint8), DIGEST)


def batch(seed: int, size: int = 8) -> Batch:
    random = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((size, STATE)).astype(np.float32)
    mask = np.ones((size, CHUNK), dtype=bool)
    mask[0, 2:] = False
    action = rng.standard_normal((size, CHUNK, ACTION)).astype(np.float32)
    return Batch([feature(random, 5 + i % 3) for i in range(size)], state, action, mask)
