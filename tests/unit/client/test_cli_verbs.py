"""Commands against a service that answers as the test says: what is sent, and what fits a terminal of 80 columns."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from joynexus.cli import app
from joynexus.cli._common import print_table
from joynexus.client._progress import JobBar
from joynexus.keyring import Addresses, Keyring
from joynexus.specs import SftSpec
from joynexus.wire import ErrorCode, Message, Packet, failure
from joynexus.wire.front import (
    CancelJob,
    CancelJobs,
    ClusterStatus,
    Done,
    GetJob,
    GetPolicy,
    GetUsage,
    JobInfo,
    JobList,
    LaneStatus,
    ListJobs,
    ListPolicies,
    LoadWeights,
    MovePolicy,
    PolicyList,
    ResumeJob,
    RoleStatus,
    Status,
    SubmitJob,
    UsageLine,
    UsageReport,
)
from tests.unit.client.service import FakeService, running
from tests.unit.client.test_connection import INFO

EXACT = "exact: 24 samples in 5 groups compared with the same samples alone: all have the same bits"
INEXACT = "not exact: 24 samples in 5 groups compared with the same samples alone: 3 differ, by at most 1.19e-07"
JOB = JobInfo(
    job="j-0123456789ab",
    spec=SftSpec(policy="pick-and-place", dataset="demonstrations-with-a-long-name", steps=300),
    state="parked",
    done=120,
    total=300,
    seconds=4000.0,
    message="3 steps in a row were not finite",
)


def role(kind: str, pid: int, restarts: int = 0, **detail: str) -> RoleStatus:
    return RoleStatus(
        role=kind, worker=f"{kind}-1", phase="working", progress=9, busy_s=43.0, uptime_s=100.0, restarts=restarts,
        pid=pid, detail=detail,
    )  # fmt: skip


def lane(queue: str, tenant: str, weight: float) -> LaneStatus:
    return LaneStatus(
        queue=queue,
        tenant=tenant,
        waiting=10_000,
        running=16,
        weight=weight,
        priority=-1,
        used_s=12345.6,
        oldest_s=0.25,
    )


MODEL = {"backbone": "lite@64", "device": "cpu", "dtype": "float32"}
STATUS = ClusterStatus(
    server="jnx-0123",
    uptime_s=4000.0,
    roles=(
        role("trainer", 4_000_001, restarts=2, numerics=EXACT, **MODEL),
        role("inference", 4_000_002, numerics=INEXACT, **MODEL),
        role("env", 4_000_003, simulators="metaworld, maniskill, libero", python="3.12", quarantined="mend it"),
    ),
    lanes=(lane("inference", "robot-lab-2", 0.25), lane("training", "lab", 1.0)),
    policies=1000,
    policies_resident=32,
    jobs_running=4,
    versions_in_service=9,
)
USAGE = UsageLine(
    tenant="lab", policy="pick-and-place-with-a-long-name", trainer_s=12345.678, inference_s=0.1, env_s=900.0,
    samples=1_000_000, backbone_forwards=250_000, bytes_in=1 << 30,
)  # fmt: skip
ANSWERS: dict[type, Message] = {
    Status: STATUS,
    GetUsage: UsageReport(lines=(USAGE,)),
    ListJobs: JobList(jobs=(JOB,)),
    GetJob: JOB,
    ResumeJob: JOB,
    CancelJob: JOB,
    SubmitJob: JOB,
    ListPolicies: PolicyList(policies=(msgspec.structs.replace(INFO, home="trainer-2", resident=True),)),
    MovePolicy: msgspec.structs.replace(INFO, home="trainer-2"),
    CancelJobs: Done(),
}
Run = Callable[..., list[str]]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with running(tmp_path) as running_service:

        def answer(packet: Packet):
            known = ANSWERS.get(type(packet.message))
            return running_service.ordinary(packet) if known is None else [known]

        running_service.answer = answer
        yield running_service


@pytest.fixture
def joynexus(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command that succeeds; gives the lines it prints."""
    service.cluster.save(tmp_path / "client.toml")
    monkeypatch.setenv("JOYNEXUS_CONFIG", str(tmp_path / "client.toml"))
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, code: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["joynexus", *arguments])
        with pytest.raises(SystemExit) as end:
            app()
        out, err = capsys.readouterr()
        assert end.value.code in (code, None if code == 0 else code), err
        return (out if code == 0 else err).splitlines()

    return run


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


@pytest.mark.parametrize("command", [["status"], ["usage"], ["jobs", "list"], ["policies"]])
def test_tables_fit_80_columns_and_programs_get_json(joynexus: Run, command: list[str]) -> None:
    lines = joynexus(*command)
    tables = [line for line in lines if "  " in line.strip()]
    assert len(tables) >= 2
    assert max(map(len, tables)) <= 80
    assert msgspec.json.decode("\n".join(joynexus(*command, "--json")))


def test_status_says_who_runs_what_how_exactly_and_who_waits(joynexus: Run) -> None:
    lines = joynexus("status")
    text = "\n".join(lines)
    assert f"numerics of trainer-1: {EXACT}" in lines
    assert f"numerics of inference-1: {INEXACT}" in lines
    assert "env-1 is quarantined: mend it" in lines
    assert "trainer-1 was restarted 2 times" in lines
    assert "lite@64, cpu float32, not exact" in text
    assert ["inference", "robot-lab-2", "0.25", "-1", "10000", "16", "3.4", "h", "250", "ms"] in words(lines)
    assert "policies 1000, in a trainer's memory 32; jobs not ended 4; versions served 9" in lines


def test_brackets_in_names_and_reasons_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would take `[b]` for a style, and end with an error at `[/d]`."""
    print_table(("backbone",), [("models/[b]/:key:/[/d]",)])
    with JobBar("evaluate p on [/d]", enabled=True) as bar:
        bar.show(msgspec.structs.replace(JOB, message="actions [a] are not finite [/b]"))
        Console(width=200).print(bar._progress)
    out = capsys.readouterr().out
    assert "models/[b]/:key:/[/d]" in out
    assert "evaluate p on [/d]" in out
    assert "parked: actions [a] are not finite [/b]" in out


def test_use_of_several_tenants_is_told_apart(joynexus: Run, service: FakeService) -> None:
    ordinary, theirs = service.answer, msgspec.structs.replace(USAGE, tenant="robot-lab-2")
    both = UsageReport(lines=(USAGE, theirs))
    service.answer = lambda packet: [both] if isinstance(packet.message, GetUsage) else ordinary(packet)
    lines = joynexus("usage")
    assert [words[0] for words in words(lines) if "1000000" in words] == ["lab", "robot-lab-2"]
    assert max(map(len, lines)) <= 80


NOVEMBER = msgspec.structs.replace(USAGE, policy="p", job="sft-1", month="2026-11", trainer_s=10.0, env_s=0.0)
PRICED = UsageReport(
    lines=(
        UsageLine(tenant="", policy="replay", month="2026-11", trainer_s=2.0),
        msgspec.structs.replace(NOVEMBER, job="", month="2026-10", trainer_s=1.0),
        NOVEMBER,
        msgspec.structs.replace(NOVEMBER, job="rl-2", trainer_s=0.5),
        msgspec.structs.replace(NOVEMBER, job="rl-2", month="2026-12", trainer_s=4.0),
    ),
    prices={"currency": "EUR", "trainer_s": "0.1", "out_gb": "1"},
)


@pytest.fixture
def priced(service: FakeService) -> FakeService:
    ordinary = service.answer
    service.answer = lambda packet: [PRICED] if isinstance(packet.message, GetUsage) else ordinary(packet)
    return service


@pytest.mark.parametrize(
    ("by", "seconds"),
    [
        ("tenant", {("", "", "", ""): 2.0, ("lab", "", "", ""): 15.5}),
        ("policy", {("", "replay", "", ""): 2.0, ("lab", "p", "", ""): 15.5}),
        ("job", {("", "replay", "", ""): 2.0, ("lab", "p", "", ""): 1.0, ("lab", "p", "sft-1", ""): 10.0,
                 ("lab", "p", "rl-2", ""): 4.5}),
        ("month", {("", "", "", "2026-11"): 2.0, ("lab", "", "", "2026-10"): 1.0, ("lab", "", "", "2026-11"): 10.5,
                   ("lab", "", "", "2026-12"): 4.0}),
    ],
)  # fmt: skip
def test_use_is_summed_and_priced(
    joynexus: Run, priced: FakeService, by: str, seconds: dict[tuple[str, ...], float]
) -> None:
    said = msgspec.json.decode("\n".join(joynexus("usage", "--by", by, "--json")))["lines"]
    names = ("tenant", "policy", "job", "month")
    assert {tuple(line[name] for name in names): line["trainer_s"] for line in said} == seconds
    assert all(float(line["cost"]) == pytest.approx(0.1 * line["trainer_s"]) for line in said)
    table = joynexus("usage", "--by", by)
    assert max(map(len, table)) <= 80
    assert "EUR" in "".join(table)
    assert table[-1] == "tenants together 1.55 EUR"  # what the service used is nobody's bill


def test_use_of_one_month_is_a_spreadsheets_lines(joynexus: Run, priced: FakeService) -> None:
    rows = list(csv.DictReader(joynexus("usage", "--by", "job", "--month", "2026-11", "--csv")))
    assert [(row["tenant"], row["job"], row["trainer_s"], row["cost"], row["currency"]) for row in rows] == [
        ("", "", "2.0", "0.20", "EUR"), ("lab", "rl-2", "0.5", "0.05", "EUR"), ("lab", "sft-1", "10.0", "1.00", "EUR")
    ]  # fmt: skip
    assert {row["month"] for row in rows} == {"2026-11"}  # whoever keeps several months' can put them together
    asked = [packet.message for packet in priced.heard if isinstance(packet.message, GetUsage)]
    assert asked[-1].since_month == "2026-11"


def test_csv_and_json_at_once_are_refused(joynexus: Run) -> None:
    joynexus("usage", "--csv", "--json", code=1)


def test_a_month_without_use_is_a_sentence(joynexus: Run, priced: FakeService) -> None:
    assert joynexus("usage", "--month", "2025-01") == ["nothing was used in 2025-01"]


def test_without_prices_nothing_costs_anything(joynexus: Run) -> None:
    assert "together" not in "".join(joynexus("usage"))
    (row,) = csv.DictReader(joynexus("usage", "--csv"))
    assert (row["cost"], row["currency"]) == ("", "")


def test_a_long_report_is_asked_for_page_by_page(joynexus: Run, service: FakeService) -> None:
    ordinary = service.answer
    first = UsageReport(lines=(NOVEMBER,), more=True)
    last = UsageReport(lines=(msgspec.structs.replace(NOVEMBER, job="sft-9"),))

    def answer(packet: Packet) -> list[Message]:
        if not isinstance(packet.message, GetUsage):
            return ordinary(packet)
        return [first if packet.message.after is None else last]

    service.answer = answer
    lines = msgspec.json.decode("\n".join(joynexus("usage", "--by", "job", "--json")))["lines"]
    assert [line["job"] for line in lines] == ["sft-1", "sft-9"]
    asked = [packet.message.after for packet in service.heard if isinstance(packet.message, GetUsage)]
    assert asked[-2:] == [None, ("lab", "p", "sft-1", "2026-11")]


def test_policies_say_where_they_live(joynexus: Run) -> None:
    assert ["p", "oft", "lite", "0", "0", "-", "trainer-2", "yes"] in words(joynexus("policies"))


def test_policy_is_moved_by_name_or_for_a_tenant(joynexus: Run, service: FakeService) -> None:
    assert joynexus("admin", "move", "lab/p", "trainer-2") == ["policy 'lab/p' lives on trainer-2"]
    joynexus("admin", "move", "p", "trainer-2")
    moves = [packet.message for packet in service.heard if isinstance(packet.message, MovePolicy)]
    assert [(move.tenant, move.policy, move.trainer) for move in moves] == [
        ("lab", "p", "trainer-2"),
        ("", "p", "trainer-2"),
    ]


def test_tenant_that_is_shut_out_may_have_its_jobs_cancelled_too(
    joynexus: Run, service: FakeService, tmp_path: Path
) -> None:
    keyring = Keyring(tmp_path / "keys")
    keyring.prepare(Addresses())
    keyring.issue("lab", tenant="lab")
    told = joynexus("admin", "tenants", "revoke", "lab", "--cancel-jobs", "--keys-dir", str(tmp_path / "keys"))
    cancelled = "jobs of tenant 'lab' that had not ended are cancelled"
    assert told == ["tenant 'lab' is shut out: key lab revoked", cancelled]
    told = joynexus("admin", "tenants", "revoke", "lab", "--cancel-jobs", "--keys-dir", str(tmp_path / "keys"))  # again
    assert told == ["no key stands for a tenant 'lab'", cancelled]
    assert [packet.message.tenant for packet in service.heard if isinstance(packet.message, CancelJobs)] == ["lab"] * 2


def test_weights_are_loaded_from_an_exported_folder(joynexus: Run, service: FakeService, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "policy.safetensors").write_bytes(b"weights")
    assert joynexus("load-weights", "p", str(tmp_path / "exported"))[0].startswith("policy 'p' goes on from ")
    (message,) = (packet.message for packet in service.heard if isinstance(packet.message, LoadWeights))
    assert service.blobs.path(message.weights).read_bytes() == b"weights"
    assert "give a safetensors file" in joynexus("load-weights", "p", str(tmp_path), code=1)[0]


def test_parked_job_is_shown_with_its_reason_and_resumed(joynexus: Run, service: FakeService) -> None:
    assert f"{JOB.job} parked: 3 steps in a row were not finite" in joynexus("jobs", "list")
    lines = joynexus("jobs", "show", JOB.job)
    assert "why: 3 steps in a row were not finite" in lines
    assert f"`joynexus jobs resume {JOB.job}` has it go on, `joynexus jobs cancel {JOB.job}` ends it" in lines
    assert "is parked: 3 steps in a row" in joynexus("jobs", "wait", JOB.job, code=1)[0]
    joynexus("jobs", "resume", JOB.job)
    joynexus("jobs", "cancel", JOB.job)
    asked = [type(packet.message) for packet in service.heard]
    assert ResumeJob in asked
    assert CancelJob in asked


def test_head_adapter_and_their_sizes_reach_the_spec(joynexus: Run, service: FakeService) -> None:
    options = ["--head", "groot", "--head-config", "size=small", "--head-config", "width=192", "--lr", "0.002"]
    joynexus("sft", "--policy", "p", "--dataset", "d", "--detach", *options, "--adapter", "bottleneck",
             "--adapter-config", "width=32", "--seed", "7")  # fmt: skip
    (message,) = (packet.message for packet in service.heard if isinstance(packet.message, SubmitJob))
    create = message.spec.create
    assert (create.head, create.head_config) == ("groot", {"size": "small", "width": 192})
    assert (create.adapter, create.adapter_config) == ("bottleneck", {"width": 32})
    assert (create.optimizer.lr, create.seed, message.spec.seed) == (0.002, 7, 7)


def test_more_pictures_than_cameras_are_refused_not_dropped(
    joynexus: Run, service: FakeService, tmp_path: Path
) -> None:
    ordinary = service.answer
    service.answer = lambda packet: [INFO] if isinstance(packet.message, GetPolicy) else ordinary(packet)
    pictures = [option for side in "ab" for option in ("--image", str(tmp_path / f"{side}.png"))]
    (line,) = joynexus("act", "--policy", "p", "--state", "0,0,0", *pictures, code=1)
    assert line == "error: there are 2 pictures; the policy sees front"


def test_refusal_of_the_service_is_the_sentence_it_said(joynexus: Run, service: FakeService) -> None:
    service.answer = lambda packet: (
        [failure(ErrorCode.CONFLICT, "job j1 is not parked: it is running")]
        if isinstance(packet.message, ResumeJob)
        else [ANSWERS.get(type(packet.message)) or service.ordinary(packet)[0]]
    )
    assert joynexus("jobs", "resume", "j1", code=1) == ["error: job j1 is not parked: it is running"]
