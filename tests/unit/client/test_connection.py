"""The client over real, encrypted sockets on loopback, against a service in the same process."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import joynexus
from joynexus.client import _blobs
from joynexus.client._flow import run
from joynexus.client._io import Connection, answer_of
from joynexus.contract import Camera, Contract
from joynexus.keys import ClusterFile, KeyEntry, KeyPair
from joynexus.specs import PolicySpec
from joynexus.wire import ArrayPacker, ErrorCode, JoyNexusError, Packet, failure, rebuild, split
from joynexus.wire.front import (
    Act,
    Actions,
    ForwardBackward,
    GetPolicy,
    JobInfo,
    OptimStep,
    Ping,
    PolicyInfo,
    Pong,
    SubmitJob,
    VersionInfo,
)
from tests.unit.client.service import Answerer, FakeService, running

SPEC = PolicySpec(
    backbone="lite",
    chunk=2,
    normalization="none",
    contract=Contract(
        robot="r", cameras=(Camera(name="front", height=4, width=4),), state_dim=3, action_dim=2, rate_hz=10.0
    ),
)
INFO = PolicyInfo(policy="p", spec=SPEC, next_seq=1, step=0, driver="", contract_digest=SPEC.contract.digest())


def with_policy(service: FakeService) -> Answerer:
    def answer(packet: Packet):
        if isinstance(packet.message, GetPolicy):
            return [INFO]
        return service.ordinary(packet)

    return answer


def test_ops_are_applied_in_the_order_of_the_calls(tmp_path: Path) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        policy = client.policy("p")
        results = [policy.optim_step().result(10) for _ in range(3)]
        pipelined = [policy.optim_step() for _ in range(20)]
        assert [result.seq for result in results] == [1, 2, 3]
        assert [future.result(10).seq for future in pipelined] == list(range(4, 24))
    seqs = [packet.message.seq for packet in service.heard if isinstance(packet.message, OptimStep)]
    assert seqs == list(range(1, 24))


def test_value_that_cannot_be_sent_is_refused_where_it_was_given_and_nothing_else_fails(tmp_path: Path) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        policy = client.policy("p")
        before = policy.optim_step()
        for wrong in (np.int64(3), 1 << 70, Path("x")):
            with pytest.raises(ValueError, match="cannot be sent"):
                client.sft(policy="p", dataset="d", steps=wrong)
        assert (before.result(10).seq, policy.optim_step().result(10).seq) == (1, 2)


def test_picture_too_large_for_a_frame_is_refused_at_once_and_nothing_else_of_the_connection_waits(
    tmp_path: Path,
) -> None:
    """Whoever receives such a frame hangs up, and whoever sent it would send it again, and all else with it."""
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        service.answer = with_policy(service)
        policy = client.policy("p")
        huge = np.zeros((1200, 1200, 3), np.uint8)
        with pytest.raises(JoyNexusError, match=r"at most 4194304 bytes, this one has 4320000: send fewer rows") as e:
            policy.act({"front": huge}, "go", np.zeros(3, np.float32), timeout_s=10)
        assert e.value.code == ErrorCode.TOO_LARGE
        assert policy.optim_step().result(10).seq == 1


def test_closing_gives_the_lease_back(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        with joynexus.connect(service.cluster) as client:
            client.policy("p").optim_step().result(10)
        assert service.heard[-1].header.kind == "release_lease"


def test_no_cluster_is_one_clear_sentence(tmp_path: Path) -> None:
    KeyPair.generate().save(tmp_path / "key.toml")
    cluster = ClusterFile(
        control="tcp://127.0.0.1:9",
        bulk="tcp://127.0.0.1:9",
        server_public=KeyPair.generate().public,
        key_file=str(tmp_path / "key.toml"),
    )
    with pytest.raises(JoyNexusError, match=r"no answer from tcp://127.0.0.1:9 within 0.3 s.*joynexus up"):
        joynexus.connect(cluster, timeout_s=0.3)


def test_unknown_key_is_refused_at_once_with_what_to_do(tmp_path: Path) -> None:
    with running(tmp_path, known=False) as service:
        start = time.monotonic()
        with pytest.raises(JoyNexusError, match="does not accept this key") as caught:
            joynexus.connect(service.cluster, timeout_s=30)
        assert time.monotonic() - start < 20  # of the 30 that it would wait for an absent one
        assert caught.value.code is ErrorCode.FORBIDDEN


def test_key_that_is_let_in_later_works_without_a_new_client(tmp_path: Path) -> None:
    with running(tmp_path, known=False) as service:
        own = KeyPair.load(tmp_path / "key.toml")
        connection = Connection(service.cluster)
        future = connection.ask(Ping(), answer_of(Pong))
        deadline = time.monotonic() + 10
        while not service.authenticator.refused:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service.registry.add(KeyEntry(name="me", public=own.public, domain="tenant", tenant="t"))
        assert future.result(20) == Pong()
        connection.close()


def test_act_sends_rows_and_gives_actions_back(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        plain = with_policy(service)

        def answer(packet: Packet):
            if isinstance(packet.message, Act):
                state = rebuild(packet.message.state, packet.buffers)
                packer = ArrayPacker()
                actions = packer.add(np.repeat(state[:, None, :2], 2, axis=1))
                return [(Actions(version=4, actions=actions), tuple(packer.buffers))]
            return plain(packet)

        service.answer = answer
        with joynexus.connect(service.cluster) as client:
            policy = client.policy("p")
            picture = np.zeros((4, 4, 3), np.uint8)
            one = policy.act({"front": picture}, "go", [1.0, 2.0, 3.0])
            assert one.version == 4
            assert one.actions.tolist() == [[1.0, 2.0], [1.0, 2.0]]
            two = policy.act([np.stack([picture] * 2)], ["go", "stay"], np.ones((2, 3)))
            assert two.actions.shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("images", "state", "sentence"),
    [
        ({"back": np.zeros((4, 4, 3), np.uint8)}, [0, 0, 0], "no picture of camera 'front'"),
        ([np.zeros((4, 4, 3), np.float32)], [0, 0, 0], "a picture must be uint8"),
        ([np.zeros((4, 4, 3), np.uint8)], [0, 0], r"state has shape \[2\], the policy takes \[3\]"),
        ([], [0, 0, 0], r"sees 1 cameras \(front\), got 0 pictures"),
    ],
)
def test_wrong_observations_are_refused_here_in_one_sentence(tmp_path: Path, images, state, sentence: str) -> None:
    with running(tmp_path) as service:
        service.answer = with_policy(service)
        with joynexus.connect(service.cluster) as client, pytest.raises(ValueError, match=sentence):
            client.policy("p").act(images, "go", state)


def test_small_batches_travel_inline_and_large_ones_as_blobs(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.answer = with_policy(service)
        with joynexus.connect(service.cluster) as client:
            for count in (2, 100):
                batch = joynexus.Batch(
                    state=np.arange(count * 3).reshape(count, 3),
                    action=np.zeros((count, 2, 2)),
                    images={"front": np.zeros((count, 4, 4, 3), np.uint8)},
                    instructions="go",
                )
                client.policy("p").forward_backward(batch).result(10)
        small, large = (p for p in service.heard if isinstance(p.message, ForwardBackward))
        assert isinstance(small.message, ForwardBackward)
        assert isinstance(large.message, ForwardBackward)
        assert small.message.samples is not None
        assert len(small.buffers) == 4
        assert large.buffers == ()
        body, state, *_ = split(service.blobs.path(large.message.payload).read_bytes())
        assert np.frombuffer(state, "<f4").reshape(100, 3)[1].tolist() == [3.0, 4.0, 5.0]
        assert b"instructions" in bytes(body)


def test_array_changed_after_the_call_does_not_change_the_op(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.answer = with_policy(service)
        with joynexus.connect(service.cluster) as client:
            policy, state = client.policy("p"), np.ones((1, 3), np.float32)
            assert policy.spec == SPEC
            batch = joynexus.Batch(state, np.zeros((1, 2, 2)), "go", [np.zeros((1, 4, 4, 3), np.uint8)])
            future = policy.forward_backward(batch)
            state[:] = 9
            future.result(10)
        (packet,) = (p for p in service.heard if isinstance(p.message, ForwardBackward))
        assert np.frombuffer(packet.buffers[0], "<f4").tolist() == [1.0, 1.0, 1.0]


def test_blob_is_uploaded_once_and_comes_back_equal(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 * 1024 * 1024 + 17)
    (tmp_path / "file").write_bytes(data)
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        blob = _blobs.LocalBlob.of(tmp_path / "file")
        connection = client._connection
        assert run(_blobs.missing(connection, [blob, blob])) == [(blob, 0)]
        moved: list[int] = []
        run(_blobs.upload(connection, blob, moved.append))
        run(_blobs.upload(connection, blob, moved.append))
        assert sum(moved) == len(data)
        assert run(_blobs.missing(connection, [blob])) == []
        assert run(_blobs.fetch(connection, blob.digest)) == data
        run(_blobs.download(connection, blob.digest, tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, 1024 * 1024])
def test_blobs_of_every_size_arrive(tmp_path: Path, size: int) -> None:
    data = bytes(size)
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        blob = _blobs.LocalBlob.of(data)
        run(_blobs.upload(client._connection, blob))
        assert run(_blobs.fetch(client._connection, blob.digest)) == data


def test_upload_goes_on_where_a_lost_chunk_left_a_hole(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(5 * 1024 * 1024)
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        service.lost_chunks = {2 * 1024 * 1024}
        blob = _blobs.LocalBlob.of(data)
        run(_blobs.upload(client._connection, blob))
        assert service.blobs.has(blob.digest)


def test_upload_that_the_service_never_keeps_is_given_up_with_a_sentence_and_works_once_it_does(tmp_path: Path) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        service.keeps_nothing = True
        blob = _blobs.LocalBlob.of(b"precious")
        with pytest.raises(JoyNexusError, match="the service did not keep it: its disk may be full") as refused:
            run(_blobs.upload(client._connection, blob))
        assert refused.value.code == "UNAVAILABLE"
        service.keeps_nothing = False
        run(_blobs.upload(client._connection, blob))
        assert service.blobs.has(blob.digest)


def test_partial_download_is_continued(tmp_path: Path) -> None:
    data = np.random.default_rng(2).bytes(2 * 1024 * 1024 + 5)
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        digest = service.blobs.put_bytes(data)
        (tmp_path / f".copy.{digest[:16]}.partial").write_bytes(data[: 1024 * 1024 + 3])
        moved: list[int] = []
        run(_blobs.download(client._connection, digest, tmp_path / "copy", moved.append))
        assert (tmp_path / "copy").read_bytes() == data
        assert sum(moved) == len(data) - 1024 * 1024 - 3


def test_damaged_partial_download_is_refused_and_removed(tmp_path: Path) -> None:
    data = bytes(2000)
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        digest = service.blobs.put_bytes(data)
        (tmp_path / f".copy.{digest[:16]}.partial").write_bytes(b"x" * 100)
        with pytest.raises(JoyNexusError, match="arrived damaged"):
            run(_blobs.download(client._connection, digest, tmp_path / "copy"))
        assert not (tmp_path / "copy").exists()
        run(_blobs.download(client._connection, digest, tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == data


def test_job_collects_its_curve_piece_by_piece(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        states = iter([("running", (1.0, 0.5)), ("running", (0.25,)), ("succeeded", ())])

        def answer(packet: Packet):
            spec = joynexus.SftSpec(policy="p", dataset="d", steps=3)
            if isinstance(packet.message, SubmitJob):
                return [JobInfo(job="j1", spec=spec, state="waiting", done=0, total=3)]
            if packet.header.kind == "get_job":
                state, losses = next(states)
                return [JobInfo(job="j1", spec=spec, state=state, done=3, total=3, losses=losses, version=2)]
            return service.ordinary(packet)

        service.answer = answer
        with joynexus.connect(service.cluster) as client:
            job = client.sft(policy="p", dataset="d", steps=3)
            job.wait(progress=False, timeout_s=20)
            assert job.losses == [1.0, 0.5, 0.25]
            assert job.result == 2
        sinces = [getattr(p.message, "since", None) for p in service.heard if p.header.kind == "get_job"]
        assert sinces == [0, 2, 3]


def test_result_of_a_job_that_failed_says_why(tmp_path: Path) -> None:
    why = failure(ErrorCode.BAD_DATA, "the data set has no episodes")

    def answer(packet: Packet):
        spec = joynexus.SftSpec(policy="p", dataset="d", steps=3)
        if packet.header.kind == "get_job":
            return [JobInfo(job="j1", spec=spec, state="failed", done=0, total=3, error=why)]
        return service.ordinary(packet)

    with running(tmp_path) as service:
        service.answer = answer
        with joynexus.connect(service.cluster) as client:
            job = client.job("j1")
            with pytest.raises(JoyNexusError, match="the data set has no episodes"):
                _ = job.result


def test_misspelt_field_is_named(tmp_path: Path) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        with pytest.raises(ValueError, match="stepz"):
            client.sft(policy="p", dataset="d", stepz=3)
        with pytest.raises(ValueError, match="haed"):
            client.create_policy("p", backbone="lite", haed="oft")


def test_answer_of_an_unexpected_kind_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        future = client._connection.ask(OptimStep(policy="p", lease="", seq=1), answer_of(VersionInfo))
        with pytest.raises(ValueError, match="'accepted' where VersionInfo was expected"):
            future.result(10)


def test_closed_client_says_so_and_fails_what_waits(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        client = joynexus.connect(service.cluster)
        service.answer = lambda packet: []
        future = client.policy("p").optim_step()
        client._connection.close()
        with pytest.raises(JoyNexusError, match="closed before the answer"):
            future.result(10)
        with pytest.raises(ValueError, match="this client is closed"):
            client.status()
        client.close()


def test_half_a_character_is_named_with_what_stands_before_it(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.answer = with_policy(service)
        with joynexus.connect(service.cluster) as client:
            picture = np.zeros((4, 4, 3), np.uint8)
            with pytest.raises(
                ValueError, match=r"this act cannot be sent: after 'pick ' comes '\\udc80', which is half"
            ):
                client.policy("p").act([picture], "pick \udc80", [0, 0, 0])


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"instruction": "go " * 2000}, "an instruction has 6000 characters, and at most 4000 are taken: shorten it"),
        ({"seed": 1.5}, "a seed must be a whole number"),
        ({"seed": [1, 2]}, "there are 1 rows but 2 seeds"),
    ],
)
def test_what_no_service_would_take_is_refused_here(tmp_path: Path, keywords, sentence: str) -> None:
    with running(tmp_path) as service:
        service.answer = with_policy(service)
        arguments = {"images": [np.zeros((4, 4, 3), np.uint8)], "instruction": "go", "state": [0, 0, 0], **keywords}
        with joynexus.connect(service.cluster) as client, pytest.raises(ValueError, match=sentence):
            client.policy("p").act(**arguments)


@pytest.mark.parametrize("indices", [[1.5], ["3"], [None]])
def test_index_that_is_no_whole_number_is_refused_not_cut(tmp_path: Path, indices) -> None:
    with running(tmp_path) as service, joynexus.connect(service.cluster) as client:
        with pytest.raises(ValueError, match="indices must be whole numbers, steps of data set 'd'"):
            client.policy("p").forward_backward(dataset="d", indices=indices)
        client.policy("p").forward_backward(dataset="d", indices=np.arange(3)).result(10)


def test_refusal_for_too_much_says_how_much_is_there(tmp_path: Path) -> None:
    full = failure(ErrorCode.OVERLOADED, "too many wait", details={"limit": 536870912, "waiting": 64, "running": 8})
    error = JoyNexusError(full)
    assert str(error) == "too many wait (limit 536870912, waiting 64, running 8)"
    assert error.failure.details["waiting"] == 64
