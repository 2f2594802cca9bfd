"""A simulated inference worker with a real backbone inside: its groups are computed, and their real seconds pass on the
simulated clock.

In: `PredictGroup`s of the simulated cluster, with pictures. Out: the engine's own answers. Never: a feature that was
kept (every request brings other pictures).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks import _times
from benchmarks._devices import InferenceDevice
from benchmarks._simulated import BACKBONE, Cluster
from benchmarks._simulation import Process, Simulation
from benchmarks._tenants import act_request
from joynexus.contract import Camera, Contract
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import load_backbone
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import write_version
from joynexus.wire import Array, Buffer
from joynexus.wire.back import PredictGroup
from joynexus.wire.front import Act
from services.inference.core import PredictEngine
from services.master.commands import Send
from services.master.config import CoreConfig

_SIDE, _STATE = 32, 8  # small pictures keep 10,000 waiting requests small; the backbone brings them to its own side
_CONTRACT = Contract(
    robot="arm", cameras=(Camera(name="front", height=_SIDE, width=_SIDE),), state_dim=_STATE, action_dim=7
)


class RealInference(InferenceDevice):
    """An inference worker that computes, on one CPU thread, with the `lite` backbone."""

    def __init__(self, cluster: Cluster) -> None:
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory(prefix="jnx-bench")
        folder = Path(self._folder.name)
        backbone = load_backbone("lite", cache_dir=folder)
        spec = PolicySpec(backbone="lite", chunk=8, contract=_CONTRACT, normalization="none")
        version = folder / "version.safetensors"
        self._digest, _ = write_version(version, Policy(spec, backbone.digest, backbone.hidden_size), 1)
        self._engine = PredictEngine(backbone, lambda digest: version)
        super().__init__(cluster, BACKBONE)

    def work(self, send: Send) -> Process:
        """Compute a group; everybody's first version is the same file."""
        message = send.message
        assert isinstance(message, PredictGroup)
        items = tuple(msgspec.structs.replace(item, digest=self._digest) for item in message.items)
        started = time.perf_counter()
        done, buffers = self._engine.predict(msgspec.structs.replace(message, items=items), send.buffers)
        yield self.station.work(time.perf_counter() - started)
        assert all(item.error is None for item in done.items), done
        self.cluster.say(self.peer, done, buffers=tuple(buffers))


def real_cluster(max_rows: int, config: CoreConfig) -> Cluster:
    """A cluster whose one inference worker computes; groups have at most so many rows."""
    config = msgspec.structs.replace(config, max_rows=max_rows, batch_rows=min(config.batch_rows, max_rows))
    cluster = Cluster(Simulation(), _times.load(), trainers=1, inference=0, envs=1, config=config)
    cluster.inference.append(RealInference(cluster))
    return cluster


_pictures = itertools.count()


def real_request(rows: int) -> tuple[Act, bytes, tuple[Buffer, ...]]:
    """Make a request with pictures that nobody asked about before."""
    drawn = np.random.default_rng(next(_pictures))
    picture = Array(dtype="|u1", shape=(rows, _SIDE, _SIDE, 3), frame=1)
    act = msgspec.structs.replace(act_request(rows)[0], images=(picture,))
    pixels = drawn.integers(0, 256, picture.shape, np.uint8).tobytes()
    return act, msgspec.msgpack.encode(act), (bytes(4 * rows * _STATE), pixels)
