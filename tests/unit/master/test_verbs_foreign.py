"""A second valid tenant that tries every verb with what belongs to the first one learns nothing, and changes nothing.

Three clusters: in one, tenant `a` has one of everything and tenant `b` asks with `a`'s names; in one, `a` has never
been there, and `b` asks the same; in one, `a` has the same and nobody asks. What `b` is told must be the same in the
first two, word for word, and what `a` has the same in the first and the third.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from joynexus.contract import Camera
from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, JobSpec, PipelineSpec, RlSpec
from joynexus.wire import Buffer, Failure, Message, back, front, hosted
from joynexus.wire.messages import FRONT_REQUESTS
from tests.unit.master.acts import ACT, STATE
from tests.unit.master.jobs import sft
from tests.unit.master.ops import BUFFERS, SAMPLES
from tests.unit.master.verbs import PAYLOAD, SOURCE, UNFINISHED, Scene, plain
from tests.unit.master.world import CONTRACT, SPEC

Said = tuple[Message, tuple[Buffer, ...]]
Attack = Callable[[dict[str, Any], str], Sequence[Message | Said]]
"""What `b` says, from what it knows of `a` and from its own lease."""


def _ops(make: Callable[..., Message], **more: Any) -> Attack:
    """An op on `a`'s policy, with its lease and with the attacker's own, as a repetition and as the next one."""

    def attack(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
        return [
            make(policy=policy, lease=lease, seq=seq, **more)
            for policy, lease, seq in itertools.product(("p", "j", "mine"), (ids["lease"], mine), (1, 2, 3, 4))
            if (policy, lease, seq) != ("mine", mine, 2)  # its own next op is its own business: see `_own`
        ]

    return attack


def _own(make: Callable[..., Message], *what: dict[str, Any]) -> Attack:
    """An op on the attacker's own policy that refers to something of `a`'s; `{name}` stands for an id."""

    def attack(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
        fields = ({key: ids.get(value, value) for key, value in one.items()} for one in what)
        return [make(policy="mine", lease=mine, seq=2, **one) for one in fields]

    return attack


def _each(make: Callable[..., Message], field: str, *names: str, **more: Any) -> Attack:
    return lambda ids, mine: [make(**{field: ids.get(name, name)}, **more) for name in names]


def _both(*attacks: Attack) -> Attack:
    return lambda ids, mine: [said for attack in attacks for said in attack(ids, mine)]


def _forward(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    inline = front.ForwardBackward(policy="p", lease=ids["lease"], seq=4, samples=SAMPLES)
    demos = front.DatasetSamples(dataset="demos", indices=(0,))
    manifest = front.DatasetSamples(dataset="m" * 64, indices=(0,))
    own = [{"payload": ids["payload"]}, {"payload": "b" * 64}, {"dataset": demos}, {"dataset": manifest}]
    return [
        (inline, BUFFERS),
        *(front.ForwardBackward(policy="p", lease=ids["lease"], seq=4, **one) for one in own),
        *(front.ForwardBackward(policy="mine", lease=mine, seq=2, **one) for one in own),
    ]


def _jobs(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    evaluate = EvaluateSpec(policy="p", env="metaworld/reach-v3", episodes=2)
    specs: list[JobSpec] = [
        sft(steps=3),
        sft(policy="mine", dataset="m" * 64),
        evaluate,
        EvaluateSpec(policy="p", version=1, env="own/mine", episodes=2),
        EvaluateSpec(policy="mine", env="own/mine", episodes=2),
        EvaluateDatasetSpec(policy="p", dataset="demos", episodes=(0,)),
        EvaluateDatasetSpec(policy="mine", dataset="demos", episodes=(0,)),
        PipelineSpec(policy="p", stages=(evaluate,)),
        RlSpec(policy="p", env="own/mine", updates=1, episodes=2),
    ]
    keys = ("job", "parked", "waiting", "own", *(f"k{number}" for number in range(9)))
    return [front.SubmitJob(key=key, spec=spec) for spec in specs for key in keys[:4]] + [
        front.SubmitJob(key=key, spec=spec) for key, spec in zip(keys[4:], specs, strict=True)
    ]


def _acts(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    return [
        (msgspec.structs.replace(ACT, policy=policy, version=version, contract=contract), (STATE,))
        for policy in ("p", "j")
        for version in (0, 1, 2)
        for contract in ("", CONTRACT.digest())
    ]


def _host(ids: dict[str, Any], mine: str) -> tuple[str, str, int]:
    return ids["incarnation"], ids["task"], ids["attempt"]


def _host_done(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    incarnation, task, attempt = _host(ids, mine)
    rollout = back.RolloutDone(task=task, attempt=attempt, trajectories=ids["payload"])
    described = back.SimulatorDescribed(task=task, attempt=attempt)
    return [
        hosted.HostDone(incarnation=incarnation, rollout=rollout),
        hosted.HostDone(incarnation=incarnation, described=described),
    ]


def _offers(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    other = CONTRACT.__class__(robot="arm", cameras=(Camera(name="c", height=8, width=8),), state_dim=2, action_dim=2)
    return [
        hosted.OfferEnvironment(name="mine", incarnation=ids["incarnation"], credit=1, contract=c, instruction="go")
        for c in (other, CONTRACT)
    ]


def _blobs(ids: dict[str, Any]) -> list[str]:
    return [ids[name] for name in ("file", "payload", "unfinished", "version", "state")] + ["b" * 64, "m" * 64]


def _reads(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    return [front.BlobRead(digest=digest, offset=0, length=8) for digest in _blobs(ids)]


def _begins(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    sizes = (len(SOURCE), len(UNFINISHED), 0)
    return [front.BlobBegin(digest=digest, nbytes=nbytes) for digest in _blobs(ids) for nbytes in sizes]


def _chunks(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    """Chunks of what `a` began, of what `b` begins itself, and a whole upload of bytes that `a` has too."""
    return [
        (front.BlobChunk(digest=ids["unfinished"], offset=5), (UNFINISHED[5:],)),
        (front.BlobChunk(digest=ids["file"], offset=0), (SOURCE,)),
        front.BlobBegin(digest=ids["unfinished"], nbytes=len(UNFINISHED)),
        (front.BlobChunk(digest=ids["unfinished"], offset=5), (UNFINISHED[5:],)),
        (front.BlobChunk(digest=ids["unfinished"], offset=0), (b"other bytes instead here.",)),
        front.BlobBegin(digest=ids["payload"], nbytes=len(PAYLOAD)),
        (front.BlobChunk(digest=ids["payload"], offset=0), (PAYLOAD,)),
        front.BlobRead(digest=ids["payload"], offset=0, length=8),
    ]


def _pushes(ids: dict[str, Any], mine: str) -> Sequence[Message | Said]:
    return [
        front.PushDataset(
            dataset=name, files=(front.FileEntry(path="meta/info.json", digest=ids["file"], nbytes=len(SOURCE)),)
        )
        for name in ("demos", "others")
    ]


ATTACKS: dict[type[Message], Attack] = {
    front.Hello: lambda ids, mine: [front.Hello(protocol_min=1, protocol_max=1, client="p")],
    front.Ping: lambda ids, mine: [front.Ping()],
    front.GetPolicy: _each(front.GetPolicy, "policy", "p", "j", "v", "w"),
    front.ListPolicies: lambda ids, mine: [front.ListPolicies()],
    front.GetJob: _each(front.GetJob, "job", "job", "parked", "waiting", "evaluation"),
    front.ListJobs: lambda ids, mine: [front.ListJobs()],
    front.GetDataset: _each(front.GetDataset, "dataset", "demos", "m" * 64),
    front.ListDatasets: lambda ids, mine: [front.ListDatasets()],
    front.Status: lambda ids, mine: [front.Status()],
    front.GetUsage: lambda ids, mine: [front.GetUsage()],
    front.OpenDashboard: lambda ids, mine: [front.OpenDashboard()],
    front.GetVersion: _both(*(_each(front.GetVersion, "policy", "p", "j", version=number) for number in (0, 1, 2))),
    front.BlobRead: _reads,
    front.Act: _acts,
    front.CreatePolicy: _each(front.CreatePolicy, "policy", "p", "j", "v", spec=SPEC),
    front.AcquireLease: _each(front.AcquireLease, "policy", "p", "j", "v", "w", holder="loop"),
    front.ReleaseLease: lambda ids, mine: [
        front.ReleaseLease(policy=policy, lease=ids["lease"]) for policy in ("p", "j", "mine")
    ],
    front.ForwardBackward: _forward,
    front.OptimStep: _ops(front.OptimStep),
    front.Publish: _ops(front.Publish),
    front.SaveState: _ops(front.SaveState, state="s"),
    front.LoadState: _both(_ops(front.LoadState, state="s"), _own(front.LoadState, {"state": "s"})),
    front.LoadWeights: _both(
        _own(front.LoadWeights, *({"weights": name} for name in ("version", "state", "payload", "b" * 64))),
        lambda ids, mine: [front.LoadWeights(policy="p", lease=ids["lease"], seq=4, weights=ids["payload"])],
    ),
    front.SubmitJob: _jobs,
    front.CancelJob: _each(front.CancelJob, "job", "job", "parked", "waiting", "evaluation"),
    front.ResumeJob: _each(front.ResumeJob, "job", "job", "parked", "waiting", "evaluation"),
    front.MovePolicy: lambda ids, mine: [
        front.MovePolicy(policy="p", trainer="trainer-1", tenant=tenant) for tenant in ("", "a", "nobody")
    ],
    front.DrainWorker: _each(front.DrainWorker, "worker", "trainer-1", "env-1", "none"),
    front.CancelJobs: _each(front.CancelJobs, "tenant", "a", "b", "none"),
    front.BackupBegin: lambda ids, mine: [front.BackupBegin(ttl_s=60.0)],
    front.BackupEnd: lambda ids, mine: [front.BackupEnd(ticket="t")],
    front.DeletePolicy: _each(front.DeletePolicy, "policy", "p", "j", "v", "w"),
    front.DeleteVersion: _both(*(_each(front.DeleteVersion, "policy", "p", "j", version=number) for number in (1, 2))),
    front.DeleteDataset: _each(front.DeleteDataset, "dataset", "demos", "m" * 64),
    front.PushDataset: _pushes,
    front.BlobBegin: _begins,
    front.BlobChunk: _chunks,
    hosted.OfferEnvironment: _offers,
    hosted.PullWork: lambda ids, mine: [
        hosted.PullWork(incarnation=ids["incarnation"]),
        hosted.PullWork(incarnation=ids["incarnation"], have=((ids["task"], ids["attempt"]),)),
    ],
    hosted.HostAct: lambda ids, mine: [
        hosted.HostAct(incarnation=ids["incarnation"], task=ids["task"], attempt=ids["attempt"], act=b"\x80")
    ],
    hosted.HostDone: _host_done,
    hosted.WithdrawEnvironment: lambda ids, mine: [hosted.WithdrawEnvironment(incarnation=ids["incarnation"])],
}


def attacked(folder: Path, verb: type[Message], ids: dict[str, Any], scene: Scene) -> list[Any]:
    """Have `b` say all of a row, and return what it is told, at once and later."""
    world = scene.world
    requests: list[str] = []
    for said in ATTACKS[verb](ids, scene.mine):
        message, buffers = said if isinstance(said, tuple) else (said, ())
        requests.append(f"attack{len(requests):03}")
        world.say_as("b", message, buffers=buffers, id=requests[-1])
    pause(scene)
    pulled = {number: buffers for number, _, buffers in world.transcript}
    return [(request, world.answers(request), pulled.get(request, ())) for request in requests]


def pause(scene: Scene) -> None:
    for _ in range(3):
        scene.world.wait(1.0)
        scene.beat()
        scene.trainer.work()
        scene.inference.work()


@pytest.mark.parametrize("verb", FRONT_REQUESTS, ids=lambda verb: verb.__name__)
def test_another_tenants_things_are_as_if_they_were_not_there(verb: type[Message], tmp_path: Path) -> None:
    assert verb in ATTACKS, f"{verb.__name__} has no row: say how a second tenant would misuse it"
    both, alone, quiet = Scene(tmp_path / "1"), Scene(tmp_path / "2", a_is_here=False), Scene(tmp_path / "3")
    told = attacked(tmp_path, verb, both.ids, both)
    assert told, "the row is empty"
    assert plain(told) == plain(attacked(tmp_path, verb, both.ids, alone))
    pause(quiet)
    assert plain(both.view("a")) == plain(quiet.view("a"))


@pytest.mark.parametrize("verb", FRONT_REQUESTS, ids=lambda verb: verb.__name__)
def test_the_first_tenant_is_told_nothing_that_it_did_not_ask(verb: type[Message], tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before = len(scene.world.told)
    attacked(tmp_path, verb, scene.ids, scene)
    theirs = [send for send in scene.world.told[before:] if send.peer.routing_id.startswith(b"a-")]
    assert [send for send in theirs if not isinstance(send.message, hosted.PulledWork)] == []


def test_there_is_something_to_learn(tmp_path: Path) -> None:
    """The rows ask for things that are there: the first tenant itself is answered otherwise."""
    differing = set()
    for verb in ATTACKS:
        own, alone = Scene(tmp_path / f"{verb.__name__}1"), Scene(tmp_path / f"{verb.__name__}2", a_is_here=False)
        for said in ATTACKS[verb](own.ids, own.ids["lease"]):
            message, buffers = said if isinstance(said, tuple) else (said, ())
            answers = [scene.world.say_as("a", message, buffers=buffers, id="x") for scene in (own, alone)]
            if plain(answers[0]) != plain(answers[1]) or not all(isinstance(a, Failure) for a in answers[0]):
                differing.add(verb)
    harmless = {front.Hello, front.Ping, front.MovePolicy, front.DrainWorker, front.OpenDashboard}
    harmless |= {front.CancelJobs, front.BackupBegin, front.BackupEnd}
    assert set(ATTACKS) - differing <= harmless
