"""RL jobs, pipelines and evaluations over several tasks: what is sent, and how what they found is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from joynexus.cli._results import describe_job, first_difference
from joynexus.client import connect
from joynexus.specs import EvaluateSpec, GrpoSpec, PipelineSpec, RlSpec, SftSpec, load_job
from joynexus.wire import Packet
from joynexus.wire.front import (
    EpisodeResult,
    EvaluationResult,
    GetJob,
    JobInfo,
    StageInfo,
    SubmitJob,
    TaskResult,
    UpdatePoint,
)
from tests.unit.client.service import FakeService
from tests.unit.client.test_cli_verbs import Run, joynexus, service

__all__ = ["joynexus", "service"]  # fixtures

RL = RlSpec(policy="reach", env="metaworld/reach-v3", updates=30)


def point(update: int) -> UpdatePoint:
    metrics = {"policy_loss": -0.01, "value_loss": 0.5, "entropy": 2.0, "approx_kl": 0.011, "clip_fraction": 0.2}
    return UpdatePoint(
        update=update, version=update + 1, episodes=32, steps=3200, success=update / 30, reward=12345.678 * update,
        length=100.0, staleness=update % 2, metrics=metrics,
    )  # fmt: skip


def task(env: str, successes: int) -> TaskResult:
    return TaskResult(
        env=env, successes=successes, episodes=50, success=successes / 50, low=0.0, high=1.0, mean_steps=99.5,
        mean_reward=1234.5, failures={"limit": 50 - successes}, contract_digest="c",
    )  # fmt: skip


def evaluation(*rewards: float) -> EvaluationResult:
    episodes = tuple(
        EpisodeResult(seed=seed, success=True, steps=7, reward=reward, env="metaworld/reach-v3")
        for seed, reward in enumerate(rewards)
    )
    return EvaluationResult(
        version=3, successes=60, episodes=100, success=0.6, low=0.5, high=0.7, mean_steps=99.5, mean_reward=1.0,
        failures={"limit": 40}, contract_digest="c", software={}, results=episodes,
        tasks=(task("metaworld/button-press-topdown-wall-v3", 49), task("metaworld/reach-v3", 11)),
    )  # fmt: skip


EVALUATED = JobInfo(
    job="evaluate-1",
    spec=EvaluateSpec(policy="reach", env=("metaworld/button-press-topdown-wall-v3", "metaworld/reach-v3")),
    state="succeeded",
    done=100,
    total=100,
    version=3,
    evaluation=evaluation(1.0, 2.0),
)


def shown(info: JobInfo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    describe_job(info, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_learning_curve_fits_a_screen_and_ends_with_the_last_update(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = tuple(map(point, range(31)))
    lines = shown(JobInfo(job="rl-1", spec=RL, state="succeeded", done=31, total=31, updates=points),
                  monkeypatch, capsys)  # fmt: skip
    rows = [line.split() for line in lines if line.split() and line.split()[0].isdigit()]
    assert len(rows) <= 13
    assert rows[0][:2] == ["0", "0%"]
    assert rows[-1][:2] == ["30", "100%"]


def test_evaluation_over_several_tasks_has_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(EVALUATED, monkeypatch, capsys)
    assert any("metaworld/reach-v3" in line and "11/50" in line and "39x limit" in line for line in lines)
    assert any("49/50" in line and "1x limit" in line for line in lines)


def test_stages_of_a_pipeline_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stages = (StageInfo(kind="sft", job="sft-1", state="succeeded"), StageInfo(kind="rl", job="rl-2", state="running"))
    spec = PipelineSpec(policy="p", stages=(SftSpec(policy="p", dataset="d"), RL))
    lines = shown(JobInfo(job="pipeline-3", spec=spec, state="running", done=1, total=2, stages=stages),
                  monkeypatch, capsys)  # fmt: skip
    assert [line.split() for line in lines if "sft-1" in line] == [["1", "sft", "sft-1", "succeeded"]]
    assert [line.split() for line in lines if "rl-2" in line] == [["2", "rl", "rl-2", "running"]]


def test_options_of_rl_reach_the_spec(joynexus: Run, service: FakeService) -> None:
    joynexus("rl", "--policy", "p", "--env", "metaworld/push-v3", "--algorithm", "grpo", "--updates", "7", "--reward",
             "success", "--max-staleness", "2", "--lr", "0.0003", "--seed", "5", "--detach")  # fmt: skip
    (spec,) = (packet.message.spec for packet in service.heard if isinstance(packet.message, SubmitJob))
    assert (spec.policy, spec.env, spec.algorithm, spec.updates) == ("p", "metaworld/push-v3", GrpoSpec(), 7)
    assert (spec.reward, spec.max_staleness, spec.optimizer.lr) == ("success", 2, 0.0003)
    assert (spec.seed, spec.create.seed) == (5, 5)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [(("--algorithm", "sac"), "there is no algorithm 'sac'"), (("--reward", "shaped"), "there is no reward 'shaped'")],
)
def test_unknown_choices_of_rl_are_named(joynexus: Run, option: tuple[str, str], sentence: str) -> None:
    assert sentence in joynexus("rl", "--policy", "p", "--env", "metaworld/push-v3", *option, code=1)[0]


def test_stages_take_the_pipelines_policy_and_any_spec_file_runs(
    joynexus: Run, service: FakeService, tmp_path: Path
) -> None:
    stages = "- {kind: rl, env: metaworld/reach-v3}\n- {kind: evaluate, env: [a/b, c/d]}\n"
    text = f"kind: pipeline\npolicy: p\nstages:\n{stages}"
    spec = load_job(text)
    assert [stage.policy for stage in spec.stages] == ["p", "p"]
    assert spec.stages[1].tasks == ("a/b", "c/d")
    (tmp_path / "pipeline.yaml").write_text(text)
    joynexus("run", str(tmp_path / "pipeline.yaml"), "--detach")
    (sent,) = (packet.message.spec for packet in service.heard if isinstance(packet.message, SubmitJob))
    assert sent == spec


def test_learning_curve_is_fetched_in_parts_and_handed_out_whole(service: FakeService) -> None:
    states = [(0, 2, "running"), (2, 3, "succeeded")]

    def answer(packet: Packet):
        message = packet.message
        if isinstance(message, SubmitJob):
            return [JobInfo(job="rl-1", spec=message.spec, state="running", done=0, total=3)]
        if isinstance(message, GetJob):
            first, end, state = states.pop(0)
            assert message.since == first
            return [JobInfo(job="rl-1", spec=RL, state=state, done=end, total=3,
                            updates=tuple(map(point, range(first, end))))]  # fmt: skip
        return service.ordinary(packet)

    service.answer = answer
    with connect(service.cluster) as client:
        job = client.rl(policy="reach", env="metaworld/reach-v3", updates=3)
        info = job.wait(progress=False)
    assert [point.update for point in info.updates] == [0, 1, 2]
    assert job.updates == list(info.updates)


@pytest.fixture
def evaluations(service: FakeService) -> list[JobInfo]:
    """What successive evaluations find."""
    found: list[JobInfo] = []
    ordinary = service.answer

    def answer(packet: Packet):
        if isinstance(packet.message, SubmitJob):
            return [found[0]]
        if isinstance(packet.message, GetJob):
            return [found.pop(0)]
        return ordinary(packet)

    service.answer = answer
    return found


def test_repeated_evaluation_proves_the_same_table_with_the_version_pinned(
    joynexus: Run, service: FakeService, evaluations: list[JobInfo]
) -> None:
    evaluations += [EVALUATED, EVALUATED]
    lines = joynexus("evaluate", "--policy", "reach", "--env", "metaworld/reach-v3", "--repeat", "2")
    assert lines[-1] == "2 evaluations, the same table each time"
    versions = [packet.message.spec.version for packet in service.heard if isinstance(packet.message, SubmitJob)]
    assert versions == [0, 3]


def test_repeated_evaluation_that_differs_is_an_error_that_names_the_episode(
    joynexus: Run, evaluations: list[JobInfo]
) -> None:
    evaluations += [EVALUATED, msgspec.structs.replace(EVALUATED, evaluation=evaluation(1.0, 2.5))]
    lines = joynexus("evaluate", "--policy", "reach", "--env", "metaworld/reach-v3", "--repeat", "2", code=1)
    assert "evaluation 2 differs from the first: seed 1 of metaworld/reach-v3" in " ".join(lines)


@pytest.mark.parametrize("option", [("--detach",), ("--video-dir", "videos")])
def test_repeated_evaluation_refuses_what_it_would_ignore(joynexus: Run, option: tuple[str, ...]) -> None:
    lines = joynexus("evaluate", "--policy", "p", "--env", "metaworld/reach-v3", "--repeat", "2", *option, code=1)
    assert "leave --detach and --video-dir out" in " ".join(lines)


def test_another_contract_is_a_difference() -> None:
    other = msgspec.structs.replace(evaluation(1.0), contract_digest="d")
    assert "contract was c, then d" in (first_difference(evaluation(1.0), other) or "")
    assert first_difference(evaluation(1.0), evaluation(1.0)) is None
