"""A bundle for a bug report says much about the service, and nothing of what is its tenants' alone."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from common.dump import main
from common.journal.journal import Journal, journal_url
from common.journal.records import DatasetRecord, JobRecord, OpRecord, PolicyRecord, StateRecord
from common.scrub import Scrub
from joynexus.contract import Contract
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile
from joynexus.specs import EvaluateSpec, PolicySpec
from joynexus.wire.front import ClusterStatus, FileEntry, LaneStatus, UsageLine, UsageReport

NAMES = {
    "tenant": "canary-lab", "policy": "canary-policy", "dataset": "canary-set", "state": "canary-state",
    "key": "canary-arm", "host": "canary-host",
}  # fmt: skip
TEXTS = {
    "instruction": "canary: pour the secret tea", "payload": "canary payload of samples",
    "robot": "canary robot mark two", "file": "canary/folder/episode.parquet", "job key": "canary key of a job",
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster's folder in which all of these stand where they may: in the journal, in logs, in keys."""
    keyring = Keyring(tmp_path / "keys")
    keyring.prepare(Addresses())
    keyring.issue(NAMES["key"], tenant=NAMES["tenant"])
    for folder in ("state", "blobs/ab", "run"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs" / "ab" / "abcd").write_bytes(TEXTS["payload"].encode())
    tenant, policy = NAMES["tenant"], NAMES["policy"]
    contract = Contract(robot=TEXTS["robot"], cameras=(), state_dim=2, action_dim=2)
    spec = EvaluateSpec(policy=policy, env=f"own/{NAMES['host']}", episodes=1)
    with closing(Journal(journal_url(tmp_path / "state" / "journal.db"))) as journal:
        journal.append([
            PolicyRecord(tenant=tenant, policy=policy, spec=PolicySpec(backbone="lite", contract=contract)),
            StateRecord(tenant=tenant, policy=policy, state=NAMES["state"], digest="d", nbytes=1, seq=1),
            JobRecord(tenant=tenant, job="evaluate-1", key=TEXTS["job key"], number=1, spec=spec, accepted_s=1.0),
            DatasetRecord(
                tenant=tenant, dataset=NAMES["dataset"], content="c", instructions=(TEXTS["instruction"],),
                files=(FileEntry(path=TEXTS["file"], digest="d", nbytes=1),),
            ),
            OpRecord(tenant=tenant, policy=policy, seq=1, kind="train_step", payload=TEXTS["payload"].encode()),
        ])  # fmt: skip
    pair = ClusterFile.load(keyring.cluster_file(NAMES["key"])).keys()
    lines = [
        f"warning policy_not_opened tenant={tenant} policy={policy} why='no room for {policy}'",
        f"warning odd key={NAMES['key']} public={pair.public} secret={pair.secret}",
        f"info op tenant=canary-gone policy=canary-deleted groups=[('{tenant}', '{policy}')]",
        f"error host own/{NAMES['host']} of '{tenant}': \"{TEXTS['instruction']}\" {TEXTS['file']} {NAMES['state']}",
        f'{{"event": "x", "tenant": "{tenant}", "dataset": "{NAMES["dataset"]}", "why": "{TEXTS["robot"]}"}}',
        "error password=canary-word",
        "info step_taken busy_s=0.25 rows=17",
    ]
    (tmp_path / "run" / "master.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "run" / "plan.json").write_text('{"python": "python3", "roles": [{"name": "trainer-1"}]}')
    return tmp_path


def dump(cluster: Path, *options: str) -> dict[str, str]:
    """Make a bundle, and return its files."""
    tenant, policy = NAMES["tenant"], NAMES["policy"]
    status = ClusterStatus(
        server="joynexus", uptime_s=1.0, roles=(), policies=1, jobs_running=1, versions_in_service=0,
        lanes=(LaneStatus(queue="env", tenant=tenant, waiting=1, running=2),),
    )  # fmt: skip
    usage = UsageReport(lines=(UsageLine(tenant=tenant, policy=policy), UsageLine(tenant="canary-gone", policy="x")))
    folders = [word for name in ("state", "blobs", "keys", "run") for word in (f"--{name}", str(cluster / name))]
    said = msgspec.json.encode({"status": status, "usage": usage})
    assert main([str(cluster / "bug.tar.gz"), *folders, *options], said) == 0
    with tarfile.open(fileobj=io.BytesIO((cluster / "bug.tar.gz").read_bytes())) as bundle:
        return {name.partition("/")[2]: bundle.extractfile(name).read().decode() for name in bundle.getnames()}  # type: ignore[union-attr]  # all are files


def test_bundle_has_what_helps_and_nothing_of_tenants(cluster: Path) -> None:
    files = dump(cluster)
    everything = "\n".join([*files, *files.values()])
    found = {what: word for what, word in {**NAMES, **TEXTS}.items() if word in everything}
    assert not found
    assert "canary" not in everything
    for path in (cluster / "keys").rglob("*.toml"):
        for line in path.read_text().splitlines():
            if line.startswith(("public", "secret")):
                assert line.split('"')[1] not in everything
    assert set(files) == {
        "about.json", "status.json", "journal.json", "keys.json", "plan.json", "logs/master.log"
    }  # fmt: skip
    assert '"rows"' in files["journal.json"]
    assert msgspec.json.decode(files["journal.json"])["rows"]["ops"] == 1
    assert msgspec.json.decode(files["status.json"])["status"]["lanes"][0]["waiting"] == 1
    assert "info step_taken busy_s=0.25 rows=17" in files["logs/master.log"]
    assert "policy_not_opened" in files["logs/master.log"]


def test_one_name_has_one_stand_in_everywhere(cluster: Path) -> None:
    files = dump(cluster)
    tenant = msgspec.json.decode(files["status.json"])["status"]["lanes"][0]["tenant"]
    policy = msgspec.json.decode(files["status.json"])["usage"]["lines"][0]["policy"]
    assert f"tenant={tenant} policy={policy} why='no room for {policy}'" in files["logs/master.log"]


def test_names_stay_if_that_is_asked_and_keys_and_texts_never(cluster: Path) -> None:
    everything = "\n".join(dump(cluster, "--names").values())
    assert NAMES["tenant"] in everything
    assert NAMES["policy"] in everything
    for what, text in TEXTS.items():
        assert text not in everything, what
    assert "canary-word" not in everything


def test_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [word for name in ("state", "blobs", "keys", "run") for word in (f"--{name}", str(tmp_path / name))]
    assert main([str(tmp_path / "absent" / "bug.tar.gz"), *folders], b"{}") == 1
    assert f"there is no folder {tmp_path / 'absent'} for the bundle" in capsys.readouterr().err


def test_bundle_is_made_of_a_cluster_that_is_broken(cluster: Path) -> None:
    (cluster / "state" / "journal.db").write_bytes(b"no journal" * 1000)
    (cluster / "keys" / "registry.json").write_bytes(b"{")
    files = dump(cluster)
    assert "unreadable" in files["journal.json"]
    assert "unreadable" in files["keys.json"]
    assert NAMES["tenant"] not in files["status.json"]  # by the field that it stands in


def test_short_names_are_not_taken_for_parts_of_words() -> None:
    scrub = Scrub([], ["k"], {"tenant": {"a", "lab"}}, keep_names=False)
    assert scrub.text("a label of lab, k: take") == "tenant-1 label of tenant-2, [tenants' text]: take"


@pytest.mark.parametrize(
    "text", ['press the "red" one', "it's the cup\nnow", "öffne die Tür", "a\\path", "'both' \"quotes\""]
)
def test_a_tenants_text_is_found_however_a_log_quotes_it(text: str) -> None:
    scrub = Scrub([], [text], {}, keep_names=False)
    lines = [
        text, f"why={text!r}", f"why={f'no {text}'!r}", json.dumps({"why": f"no {text}"}),
        json.dumps({"why": text}, ensure_ascii=False), json.dumps({"why": f"no {text!r}"}),
        f"""{f"it's '{text}'" + ' "so"'!r}""",
    ]  # fmt: skip
    assert [line for line in lines if "[tenants' text]" not in scrub.text(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "GRAFANA_PASSWORD=canary", "postgresql://user:canary@db/x", "Authorization: Bearer canary",
        'info x api_key="two canary words"', '{"proxy-token": "canary \\" canary"}', "Cookie: joynexus-5714=canary",
    ],
)  # fmt: skip
def test_a_secret_that_nobody_knows_is_found_by_its_name(line: str) -> None:
    scrub = Scrub([], [], {}, keep_names=True)
    assert "canary" not in scrub.text(line)
    assert scrub.value({"JOYNEXUS_SOME_PASSWORD": "canary", "tokens": "7"}) == {
        "JOYNEXUS_SOME_PASSWORD": "[key]", "tokens": "7"
    }  # fmt: skip
