"""The command line: what users get wrong is answered by one sentence, exit code 1 or 2, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from joynexus import keys as joynexus_keys
from joynexus.cli import app
from joynexus.cli._dashboard import address_of
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile, KeyEntry
from joynexus.specs import load_job
from joynexus.tenants import TenantLimits, TenantLimitsFile
from joynexus.wire.front import DashboardCode

ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def joynexus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in `tmp_path` as a user without a configuration; gives exit code, output and errors."""
    for name in list(os.environ):
        if name.startswith("JOYNEXUS_"):
            monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["joynexus", *arguments])
        with pytest.raises(SystemExit) as end:
            app()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def keyring(folder: Path) -> Keyring:
    keys = Keyring(folder / ".joynexus" / "keys")
    keys.prepare(Addresses())
    return keys


def test_help_loads_neither_sockets_nor_numpy() -> None:
    program = (
        "import sys\nfrom joynexus.cli._main import commands\n"
        "heavy = {'zmq', 'numpy', 'msgspec', 'torch', 'rich.progress'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["status"], 1, "error: no cluster is configured: run `joynexus up` here, or point JOYNEXUS_CONFIG at"),
        (["status", "--config", "absent.toml"], 1, "error: there is no cluster file absent.toml"),
        (["statsu"], 2, "No such command 'statsu'"),
        (["sft", "--stepz", "3"], 2, "No such option: --stepz"),
        (["sft", "--policy", "p"], 1, "error: joynexus sft needs a spec file, or --dataset"),
        (["evaluate", "--policy", "p"], 1, "error: joynexus evaluate needs a spec file, or --env (or --dataset)"),
        (["sft", "absent.yaml"], 1, "No such file or directory: 'absent.yaml'"),
        (["sft", "absent.yaml", "--steps", "3"], 1, "either a spec file or options"),
        (["evaluate", "absent.yaml", "--episodes", "3"], 1, "either a spec file or options"),
        (["sft", "--policy", "p", "--dataset", "d", "--head-config", "width"], 1, "takes key=value"),
        (["sft", "--policy", "p", "--dataset", "d", "--adapter-config", "a=1", "--adapter-config", "a=2"], 1, "twice"),
        (["jobs", "resume"], 2, "error: Missing argument 'job' (`joynexus jobs resume --help` says what there is)"),
        (["scale", "--timeout", "abc"], 2, "error: Invalid value for '--timeout': "),
        (["usage", "--by", "week"], 2, "'week' is not one of 'tenant', 'policy', 'job', 'month'"),
        (["admin", "keys", "list"], 1, "is no folder of keys: start the cluster once"),
        (["admin", "tenants", "list"], 1, "is no folder of keys: start the cluster once"),
    ],
)
def test_user_errors_are_one_sentence(joynexus: Command, arguments: list[str], code: int, sentence: str) -> None:
    returned, _, err = joynexus(*arguments)
    assert returned == code
    assert sentence in err
    assert err.count("\n") == 1


def test_whoever_interrupts_a_command_is_told_that_jobs_go_on(
    joynexus: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(joynexus_keys, "find_cluster_file", interrupted)
    code, _, err = joynexus("status")
    assert code == 130
    assert err.strip() == "error: interrupted; jobs that were started go on in the cluster"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kind: sft\npolicy: p\ndataset: d\nstepz: 3\n", "stepz"),
        ("kind: sft\npolicy: p\ndataset: d\ncreate: {haed: oft}\n", "haed"),
        ("kind: sft\npolicy: p\ndataset: d\nsteps: many\n", "steps"),
        ("policy: p\n", "kind"),
        ("kind: [", "not valid"),
        ("", "the job spec is empty: it must have lines `field: value`"),
        ("- sft\n", "the job spec is a list"),
        ("kind: sft\npolicy: p\ndataset: d\ncreate: {optimizer: {lr: 1e-3}}\n", "write 0.001"),
        ("\0", "not valid: unacceptable character"),
    ],
)
def test_wrong_field_of_a_spec_file_is_named(joynexus: Command, tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    code, _, err = joynexus("sft", "job.yaml")
    assert code == 1
    assert err.count("error:") == 1
    assert named in err


def test_binary_file_is_no_spec_and_its_bytes_are_not_shown(joynexus: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(bytes(range(256)))
    code, _, err = joynexus("sft", "job.yaml")
    assert code == 1
    assert err.strip() == "error: job.yaml is no text file: a job spec is YAML, as in examples/jobs"


def test_spec_of_another_kind_is_refused(joynexus: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("kind: evaluate\npolicy: p\nenv: metaworld/reach-v3\n")
    code, _, err = joynexus("sft", "job.yaml")
    assert code == 1
    assert "another kind of job" in err


def test_master_that_does_not_run_is_said_within_the_deadline(joynexus: Command, tmp_path: Path) -> None:
    keys = keyring(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    file = ClusterFile.load(keys.issue("me", tenant="me"))
    dead = msgspec.structs.replace(file, control=f"tcp://127.0.0.1:{port}")
    dead.save(tmp_path / ".joynexus" / "client.toml")
    code, _, err = joynexus("status")
    assert code == 1
    assert f"no answer from tcp://127.0.0.1:{port} within 5 s: is the cluster running?" in err


def test_keys_are_added_listed_and_revoked(joynexus: Command, tmp_path: Path) -> None:
    keyring(tmp_path)
    code, out, _ = joynexus("admin", "keys", "add", "robot-3", "--tenant", "lab", "--scope", "act")
    assert code == 0
    assert "JOYNEXUS_CONFIG=" in out
    assert ClusterFile.load(tmp_path / ".joynexus/keys/robot-3/client.toml").keys().public
    joynexus("admin", "keys", "add", "env-b", "--role", "env")
    _, out, _ = joynexus("admin", "keys", "list", "--json")
    entries = {entry.name: entry for entry in msgspec.json.decode(out, type=list[KeyEntry])}
    assert (entries["robot-3"].tenant, entries["robot-3"].scope) == ("lab", "act")
    assert entries["env-b"].roles == ("env",)
    assert joynexus("admin", "keys", "revoke", "robot-3")[0] == 0
    code, _, err = joynexus("admin", "keys", "revoke", "robot-3")
    assert code == 1
    assert "there is no key named 'robot-3'" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scope", "everything"], "'everything' is no scope"),
        (["--role", "king"], "must claim one or more of the roles"),
        (["--role", "env", "--tenant", "lab"], "a worker's key has roles only"),
    ],
)
def test_contradictory_keys_are_refused(joynexus: Command, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    keyring(tmp_path)
    code, _, err = joynexus("admin", "keys", "add", "k", *arguments)
    assert code == 1
    assert sentence in err


def test_tenant_is_let_in_with_limits_and_told_what_to_hand_out(joynexus: Command, tmp_path: Path) -> None:
    keys = keyring(tmp_path)
    code, out, _ = joynexus("admin", "tenants", "add", "lab", "--weight", "2", "--max-waiting-acts", "9")
    assert code == 0
    assert "tenant 'lab' is let in, with weight 2.0, max_waiting_acts 9" in out
    assert f"the folder {Path('.joynexus/keys/lab')}" in out
    assert "tcp://127.0.0.1:5710" in out
    pair = ClusterFile.load(keys.cluster_file("lab")).keys()
    assert keys.registry.lookup(pair.public) == KeyEntry(name="lab", public=pair.public, domain="tenant", tenant="lab")
    assert TenantLimitsFile(keys.folder / "limits.json").load() == {"lab": TenantLimits(weight=2.0, max_waiting_acts=9)}
    assert pair.secret not in out


def test_limits_are_set_shown_and_cleared_and_what_is_not_given_stays(joynexus: Command, tmp_path: Path) -> None:
    keyring(tmp_path).issue("lab", tenant="lab")
    limits = TenantLimitsFile(tmp_path / ".joynexus/keys/limits.json")
    assert joynexus("admin", "tenants", "limits", "lab")[1].strip() == "tenant 'lab' has the service's defaults"
    joynexus("admin", "tenants", "limits", "lab", "--weight", "2", "--quota-bytes", "1048576")
    _, out, _ = joynexus("admin", "tenants", "limits", "lab", "--priority", "-1")
    assert out.strip() == "tenant 'lab': weight 2.0, priority -1, quota_bytes 1.0 MiB"
    assert limits.load() == {"lab": TenantLimits(weight=2.0, priority=-1, quota_bytes=1048576)}
    joynexus("admin", "tenants", "limits", "lab", "--budget", "7.5")
    assert joynexus("admin", "tenants", "limits", "lab", "--default")[0] == 0
    assert limits.load() == {}


@pytest.mark.parametrize("limit", TenantLimits.__struct_fields__)
def test_each_limit_can_be_taken_back_alone(joynexus: Command, tmp_path: Path, limit: str) -> None:
    keyring(tmp_path).issue("lab", tenant="lab")
    file, option = TenantLimitsFile(tmp_path / ".joynexus/keys/limits.json"), f"--{limit.replace('_', '-')}"
    every = dict.fromkeys(TenantLimits.__struct_fields__, 3)
    file.change("lab", every)
    assert joynexus("admin", "tenants", "limits", "lab", option, "none")[0] == 0
    del every[limit]
    assert file.load() == {"lab": TenantLimits(**every)}
    file.clear("lab")
    file.change("lab", {limit: 3})
    _, out, _ = joynexus("admin", "tenants", "limits", "lab", option, "none")
    assert out.strip() == "tenant 'lab' has the service's defaults"
    assert file.load() == {}


def test_tenants_are_listed_with_their_keys_and_limits(joynexus: Command, tmp_path: Path) -> None:
    keys = keyring(tmp_path)
    keys.issue("lab", tenant="lab")
    keys.issue("robot", tenant="lab", scope="act")
    keys.issue("boss", tenant="boss", operator=True)
    joynexus("admin", "tenants", "limits", "lab", "--weight", "2")
    rows = [line.split() for line in joynexus("admin", "tenants", "list")[1].splitlines()]
    assert ["lab", "lab,", "robot", "2.0"] in rows
    assert ["boss", "boss", "operator"] in rows
    boss, lab = msgspec.json.decode(joynexus("admin", "tenants", "list", "--json")[1])
    assert (boss["tenant"], lab["keys"], lab["limits"]) == ("boss", ["lab", "robot"], {"weight": 2.0})


def test_revoked_tenant_is_shut_out_with_all_its_keys(joynexus: Command, tmp_path: Path) -> None:
    keys = keyring(tmp_path)
    for name, tenant in {"lab": "lab", "robot": "lab", "other": "other"}.items():
        keys.issue(name, tenant=tenant)
    code, out, _ = joynexus("admin", "tenants", "revoke", "lab")
    assert code == 0
    assert "keys lab, robot revoked" in out
    assert "go on" in out
    assert {entry.tenant for entry in keys.registry.list()} == {"", "other"}
    code, _, err = joynexus("admin", "tenants", "revoke", "lab")
    assert code == 1
    assert "no key stands for a tenant 'lab'" in err
    assert joynexus("admin", "tenants", "add", "lab")[0] == 0  # and may come again


def test_rotated_keys_are_new_and_the_old_ones_go_on_for_a_while(joynexus: Command, tmp_path: Path) -> None:
    keys = keyring(tmp_path)
    keys.issue("lab", tenant="lab")
    keys.issue("robot", tenant="lab", scope="act")
    before = {name: ClusterFile.load(keys.cluster_file(name)).keys().public for name in ("lab", "robot")}
    code, out, _ = joynexus("admin", "tenants", "rotate", "lab", "--grace-hours", "2")
    assert code == 0
    assert "the keys of before (lab, robot) are let in for 2 more hours" in out
    for name, public in before.items():
        now = ClusterFile.load(keys.cluster_file(name)).keys().public
        new, old = keys.registry.lookup(now), keys.registry.lookup(public)
        assert new is not None
        assert old is not None
        assert now != public
        assert (new.name, new.until_s) == (name, 0.0)
        assert (old.tenant, old.scope) == (new.tenant, new.scope)
    listed = joynexus("admin", "keys", "list")[1]
    assert "UTC" in listed
    assert keys.registry.list()[-1].public[:8] not in listed  # nobody reads them; `--json` has them
    joynexus("admin", "tenants", "rotate", "lab", "--grace-hours", "0")
    names = [entry.name for entry in keys.registry.list() if entry.tenant]
    assert sorted(names) == ["lab", "robot"]  # also those of before that had some of their grace left


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["limits", "lba", "--weight", "2"], "no key stands for a tenant 'lba'; there are lab"),
        (["limits", "lab", "--weight", "0"], "weight must lie between 1e-06 and 1e+06, not 0"),
        (["limits", "lab", "--priority", "11"], "priority must lie between -10 and 10, not 11"),
        (["limits", "lab", "--quota-bytes", "-1"], "quota_bytes cannot be negative: -1"),
        (["limits", "lab", "--budget", "much"], "--budget takes a number, or `none` to take it back, not 'much'"),
        (["limits", "lab", "--quota-bytes", "1.5"], "--quota-bytes takes a whole number, or `none` to take it back"),
        (["limits", "lab", "--default"], "tenant 'lab' has no limits of its own"),
        (["limits", "lab", "--default", "--weight", "2"], "either --default or limits"),
        (["add", "lab"], "is let in already, with key lab: `joynexus admin keys add NAME --tenant lab`"),
        (["add", "new", "--weight", "0"], "weight must lie between"),
        (["add", "No"], "'No' cannot name a"),
        (["rotate", "lba"], "no key stands for a tenant 'lba'"),
        (["revoke", "lba"], "no key stands for a tenant 'lba'"),
    ],
)
def test_impossible_changes_of_tenants_are_refused_and_nothing_changes(
    joynexus: Command, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    keys = keyring(tmp_path)
    keys.issue("lab", tenant="lab")
    before = keys.registry.list()
    code, _, err = joynexus("admin", "tenants", *arguments)
    assert code == 1
    assert sentence in err
    assert TenantLimitsFile(keys.folder / "limits.json").load() == {}
    assert keys.registry.list() == before


def test_down_without_a_cluster_says_that_nothing_runs(joynexus: Command) -> None:
    code, out, _ = joynexus("down")
    assert (code, out.strip()) == (0, "nothing runs in .joynexus")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_jobs_are_valid(path: Path) -> None:
    job = load_job(path.read_text())
    assert f"policy: {job.policy}\n" in path.read_text()


def test_way_into_the_dashboard_is_an_address_with_a_code_and_no_key() -> None:
    entry = DashboardCode(code="c0de", url="http://127.0.0.1:5714", valid_s=60.0)
    assert address_of(entry) == "http://127.0.0.1:5714/login?code=c0de"
    assert address_of(entry, "https://dash.example/") == "https://dash.example/login?code=c0de"
    with pytest.raises(ValueError, match="no dashboard is connected to this cluster: have its operator start one"):
        address_of(msgspec.structs.replace(entry, url=""))
