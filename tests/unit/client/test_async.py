"""The asyncio twin, over the same sockets: the same verbs, the same order, nothing lost and nothing doubled."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import joynexus
from joynexus.client import _blobs, _policy
from joynexus.client._async import AsyncClient, AsyncDatasets, AsyncJob, AsyncPolicy
from joynexus.client._client import Client
from joynexus.client._datasets import Datasets
from joynexus.client._jobs import Job
from joynexus.client._policy import Policy
from joynexus.wire import Array, ErrorCode, JoyNexusError, Packet, failure
from joynexus.wire.front import (
    Accepted,
    Act,
    Actions,
    BlobBegin,
    ForwardBackward,
    JobInfo,
    LoadWeights,
    OpResult,
    OptimStep,
    SubmitJob,
)
from tests.unit.client.service import running
from tests.unit.client.test_connection import SPEC, with_policy

ONLY_BLOCKING = {"act_async"}
"""With asyncio every call is one that does not block."""


def batch(rows: int) -> joynexus.Batch:
    pictures = np.zeros((rows, 4, 4, 3), np.uint8)
    return joynexus.Batch(np.ones((rows, 3), np.float32), np.zeros((rows, 2, 2)), "go", {"front": pictures})


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - ONLY_BLOCKING


@pytest.mark.parametrize(
    ("one", "twin"), [(Client, AsyncClient), (Policy, AsyncPolicy), (Job, AsyncJob), (Datasets, AsyncDatasets)]
)
def test_every_verb_has_its_twin_with_the_same_arguments(one: type, twin: type) -> None:
    assert public(one) == public(twin)
    for name in public(one):
        ours, theirs = getattr(one, name), getattr(twin, name)
        if callable(ours):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
            assert ours.__doc__, name
            assert ours.__name__ == theirs.__name__ == name


def test_ops_keep_the_order_of_the_calls_even_where_one_uploads_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            policy = client.policy("p")
            futures = [policy.forward_backward(batch(100)), policy.optim_step(), policy.forward_backward(batch(1))]
            futures += [policy.save_state("s"), policy.forward_backward(batch(200)), policy.optim_step()]
            await futures[-1]  # nobody awaits the others before
            assert [(await future).seq for future in futures] == [1, 2, 3, 4, 5, 6]

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        asyncio.run(main())
    ops = [p.message for p in service.heard if hasattr(p.message, "seq")]
    kinds = ["ForwardBackward", "OptimStep", "ForwardBackward", "SaveState", "ForwardBackward", "OptimStep"]
    assert [type(op).__name__ for op in sorted(ops, key=lambda op: op.seq)] == kinds
    assert [bool(op.payload) for op in ops if isinstance(op, ForwardBackward)] == [True, False, True]


def test_cancelled_await_neither_loses_nor_doubles_the_op(tmp_path: Path) -> None:
    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            policy = client.policy("p")
            uploading, waiting = policy.forward_backward(batch(100)), policy.optim_step()
            uploading.cancel()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting, 0.0)
            assert (await policy.optim_step()).seq == 3

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        asyncio.run(main())
    assert {p.message.seq: type(p.message) for p in service.heard if hasattr(p.message, "seq")} == {
        1: ForwardBackward,
        2: OptimStep,
        3: OptimStep,
    }


def test_job_is_submitted_behind_the_ops_that_were_called_before(tmp_path: Path) -> None:
    """Otherwise the job would drive the policy before an op that still uploads its samples."""

    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            policy = client.policy("p")
            await policy.optim_step()
            uploading = policy.forward_backward(batch(100))
            await client.sft(policy="p", dataset="d", steps=3)
            await uploading

    with running(tmp_path) as service:
        ordinary, job_says = with_policy(service), job_answers()
        service.answer = lambda packet: job_says(packet) or ordinary(packet)
        asyncio.run(main())
    kinds = [packet.header.kind for packet in service.heard]
    before = kinds[: kinds.index("submit_job")]
    assert "forward_backward" in before
    assert "release_lease" not in before[: before.index("forward_backward")]


def test_op_that_cannot_be_prepared_fails_where_it_is_awaited_and_the_next_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            policy = client.policy("p")
            wrong, right = policy.load_weights(tmp_path / "absent.safetensors"), policy.optim_step()
            with pytest.raises(ValueError, match="give a safetensors file, or the folder of an exported policy"):
                await wrong
            with pytest.raises(ValueError, match="action has shape"):
                await policy.forward_backward(joynexus.Batch(np.ones((1, 3)), np.ones((1, 9, 2)), "go"))
            assert (await right).seq == 1

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        asyncio.run(main())


def test_array_changed_after_the_call_does_not_change_the_op(tmp_path: Path) -> None:
    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            samples = batch(1)
            future = client.policy("p").forward_backward(samples)
            samples.state[:] = 9
            samples.images["front"][:] = 9
            await future

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        asyncio.run(main())
    (packet,) = (p for p in service.heard if isinstance(p.message, ForwardBackward))
    assert np.frombuffer(packet.buffers[0], "<f4").tolist() == [1.0, 1.0, 1.0]
    assert not any(packet.buffers[3])


def test_event_loop_goes_on_while_samples_are_packed_and_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is slow is made slow here: packing and hashing wait until the loop has turned."""
    turned = asyncio.Event()

    def wait_for_the_loop(result):
        def slow(*arguments):
            deadline = time.monotonic() + 20
            while not turned.is_set() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert turned.is_set(), "the event loop stood still"
            return result(*arguments)

        return slow

    monkeypatch.setattr(_policy, "pack_batch", wait_for_the_loop(_policy.pack_batch))
    monkeypatch.setattr(_blobs.LocalBlob, "of", staticmethod(wait_for_the_loop(_blobs.LocalBlob.of)))

    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            asyncio.get_running_loop().call_later(0.05, turned.set)
            assert (await client.policy("p").forward_backward(batch(100))).seq == 1

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        asyncio.run(main())


def test_weights_are_uploaded_and_named_by_their_digest(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "policy.safetensors").write_bytes(b"weights")
    (tmp_path / "own.safetensors").write_bytes(b"others")

    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            await client.policy("p").load_weights(tmp_path / "exported")

    with running(tmp_path) as service:
        asyncio.run(main())
        with joynexus.connect(service.cluster) as client:
            client.policy("p").load_weights(tmp_path / "own.safetensors").result(10)
        sent = [p.message.weights for p in service.heard if isinstance(p.message, LoadWeights)]
        assert [service.blobs.path(digest).read_bytes() for digest in sent] == [b"weights", b"others"]


def test_many_act_at_once_on_one_connection(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        plain = with_policy(service)

        def answer(packet: Packet):
            if isinstance(packet.message, Act):
                actions = np.full((1, 2, 2), packet.message.seeds[0], np.float32)
                return [
                    (Actions(version=1, actions=Array(dtype="<f4", shape=(1, 2, 2), frame=0)), (actions.tobytes(),))
                ]
            return plain(packet)

        service.answer = answer

        async def main() -> list[float]:
            async with joynexus.connect_async(service.cluster) as client:
                policy, picture = client.policy("p"), np.zeros((4, 4, 3), np.uint8)
                assert (await policy.spec) == SPEC
                chunks = await asyncio.gather(
                    *(policy.act([picture], "go", [0.0, 0.0, 0.0], seed=seed) for seed in range(1, 20))
                )
                return [float(chunk.actions[0, 0]) for chunk in chunks]

        assert asyncio.run(main()) == list(range(1, 20))


def job_answers(*states: tuple[str, tuple[float, ...]]):
    left = iter(states)
    spec = joynexus.SftSpec(policy="p", dataset="d", steps=3)

    def answer(packet: Packet):
        if isinstance(packet.message, SubmitJob):
            return [JobInfo(job="j1", spec=spec, state="waiting", done=0, total=3)]
        if packet.header.kind == "resume_job":
            return [JobInfo(job="j1", spec=spec, state="running", done=2, total=3)]
        if packet.header.kind == "get_job":
            state, losses = next(left)
            error = failure(ErrorCode.NON_FINITE, "3 steps in a row were not finite") if state == "parked" else None
            return [JobInfo(job="j1", spec=spec, state=state, done=2, total=3, losses=losses, version=2, error=error)]
        return []

    return answer


def test_job_is_followed_awaited_and_has_its_whole_curve(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        ordinary = service.answer
        job_says = job_answers(("running", (1.0, 0.5)), ("running", ()), ("publishing", (0.25,)), ("succeeded", ()))
        service.answer = lambda packet: job_says(packet) or ordinary(packet)

        async def main() -> None:
            async with joynexus.connect_async(service.cluster) as client:
                job = await client.sft(policy="p", dataset="d", steps=3)
                assert [info.state async for info in job.progress()] == ["running", "publishing", "succeeded"]
                assert job.losses == [1.0, 0.5, 0.25]
                assert await job.result == 2

        asyncio.run(main())


def test_parked_job_says_why_and_how_it_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        ordinary = service.answer
        job_says = job_answers(("running", ()), ("parked", ()), ("running", ()), ("succeeded", ()))
        service.answer = lambda packet: job_says(packet) or ordinary(packet)
        sentence = "job j1 is parked: 3 steps in a row were not finite; `joynexus jobs resume j1` has it go on"
        with joynexus.connect(service.cluster) as client:
            job = client.sft(policy="p", dataset="d", steps=3)
            with pytest.raises(JoyNexusError, match=sentence) as caught:
                job.wait(progress=False, timeout_s=20)
            assert caught.value.code is ErrorCode.NON_FINITE
            assert job.resume().state == "running"
            assert job.wait(progress=False, timeout_s=20).state == "succeeded"


def test_refusals_are_raised_where_they_are_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        client = await joynexus.connect_async(service.cluster)
        with pytest.raises(JoyNexusError, match="no such thing"):
            await client.job("j9")
        service.answer = lambda packet: []
        waiting = client.policy("p").optim_step()
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(JoyNexusError, match="closed before the answer"):
            await waiting
        with pytest.raises(ValueError, match="this client is closed"):
            await client.status()

    with running(tmp_path) as service:
        asyncio.run(main())


def test_closing_gives_the_lease_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with joynexus.connect_async(service.cluster) as client:
            await client.policy("p").optim_step()

    with running(tmp_path) as service:
        asyncio.run(main())
        assert service.heard[-1].header.kind == "release_lease"


def test_upload_that_is_refused_fails_that_op_alone(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        plain = with_policy(service)

        def answer(packet: Packet):
            if isinstance(packet.message, BlobBegin):
                return [failure(ErrorCode.TOO_LARGE, "the quota of 1 GiB is used up")]
            if isinstance(packet.message, OptimStep):
                return [Accepted(policy="p", seq=1), OpResult(policy="p", seq=packet.message.seq)]
            return plain(packet)

        service.answer = answer

        async def main() -> None:
            async with joynexus.connect_async(service.cluster) as client:
                policy = client.policy("p")
                refused, step = policy.forward_backward(batch(100)), policy.optim_step()
                with pytest.raises(JoyNexusError, match="quota"):
                    await refused
                assert (await step).seq == 1

        asyncio.run(main())


def test_program_that_ends_with_ops_on_their_way_ends_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> AsyncClient:
        client = await joynexus.connect_async(service.cluster)
        policy = client.policy("p")
        policy.forward_backward(batch(100))
        policy.optim_step()
        policy.optim_step()
        await asyncio.sleep(0)
        return client

    with running(tmp_path) as service:
        service.answer = with_policy(service)
        client = asyncio.run(main())
        gc.collect()
        client._connection.close()
    assert not [record.getMessage() for record in caplog.records]


def test_no_cluster_is_one_clear_sentence_here_too(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(JoyNexusError, match=r"no answer from .* within 0.3 s.*joynexus up"):
            await joynexus.connect_async(dead, timeout_s=0.3)
        with pytest.raises(ValueError, match="there is no cluster file"):
            async with joynexus.connect_async(tmp_path / "absent.toml"):
                pass

    with running(tmp_path) as service:
        dead = msgspec.structs.replace(service.cluster, control="tcp://127.0.0.1:9")
        asyncio.run(main())
