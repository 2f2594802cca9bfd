"""An inference engine with versions in a blob store, and requests made by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from common.blobs import BlobStore
from joynexus.specs import PolicySpec
from joynexus.vla.backbones import Backbone
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import write_version
from joynexus.wire import rebuild
from joynexus.wire.arrays import ArrayPacker, Buffer
from joynexus.wire.back import Predicted, PredictGroup, PredictItem, RlBegin
from joynexus.wire.front import Act
from services.inference.core import PredictEngine
from tests.unit.workers import Arrays, NoiseBackbone, spec


class Desk:
    """An inference engine, versions in a blob store, requests by hand."""

    def __init__(self, folder: Path, backbone: Backbone | None = None, **options: object) -> None:
        self.blobs = BlobStore(folder / "blobs")
        self.folder = folder
        self.backbone = NoiseBackbone()
        self.opened: list[str] = []
        self.engine = PredictEngine(backbone or self.backbone, self.open_blob, **options)  # type: ignore[arg-type]

    def open_blob(self, digest: str) -> Path:
        self.opened.append(digest)
        return self.blobs.path(digest)

    def version(
        self, number: int = 1, made_of: PolicySpec | None = None, backbone: str = "", rl: RlBegin | None = None
    ) -> tuple[str, Policy]:
        """Store a version; return its digest and the policy in it."""
        policy = Policy(made_of or spec(seed=number), backbone or self.backbone.digest, self.backbone.hidden_size)
        if rl is not None:
            policy.begin_rl(rl)
        path = self.folder / "version.safetensors"
        write_version(path, policy, number)
        return self.blobs.put_file(path)[0], policy

    def predict(self, *requests: Request) -> list[Predicted]:
        buffers: list[Buffer] = []
        items = []
        for number, request in enumerate(requests):
            act, own = request.pack()
            items.append(
                PredictItem(
                    request=f"r{number}",
                    tenant=request.tenant,
                    policy="arm",
                    version=request.version,
                    digest=request.digest,
                    act=act,
                    first_buffer=len(buffers),
                    buffers=len(own),
                    feature_scope=request.scope,
                )
            )
            buffers += own
        done, answered = self.engine.predict(PredictGroup(task="t1", attempt=2, items=tuple(items)), buffers)
        assert (done.task, done.attempt) == ("t1", 2)
        assert [answer.request for answer in done.items] == [item.request for item in items]
        self.answered = answered
        return list(done.items)

    def actions(self, answer: Predicted) -> npt.NDArray[np.float32]:
        assert answer.error is None, answer
        assert answer.actions is not None
        return rebuild(answer.actions, self.answered)

    def alone(self, policy: Policy, request: Request) -> npt.NDArray[np.float32]:
        arrays = request.arrays
        return policy.act(NoiseBackbone().forward(arrays.observations()), arrays.state)


class Request:
    def __init__(
        self,
        digest: str,
        arrays: Arrays,
        *,
        version: int = 1,
        tenant: str = "ann",
        contract: str = "",
        scope: str = "",
        seeds: tuple[int, ...] = (),
        explore: bool = False,
    ) -> None:
        self.digest, self.arrays, self.version, self.tenant = digest, arrays, version, tenant
        self.contract, self.scope, self.seeds, self.explore = contract, scope, seeds, explore

    def pack(self) -> tuple[bytes, list[Buffer]]:
        packer, arrays = ArrayPacker(), self.arrays
        act = Act(
            policy="arm",
            state=packer.add(arrays.state),
            images=tuple(packer.add(image) for image in arrays.images),
            instructions=tuple(arrays.instructions),
            contract=self.contract,
            seeds=self.seeds,
            explore=self.explore,
        )
        return msgspec.msgpack.encode(act), packer.buffers
