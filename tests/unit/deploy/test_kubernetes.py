"""Promises of the manifests for Kubernetes: they are valid, fit together, and say nothing that a role does not know.

`kubectl kustomize` puts them together and speaks with no cluster; the schemas are the published ones, from a package.
No cluster was at hand: what a real one makes of them is not held here.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metrics import MASTER
from common.settings import ALL_SETTINGS, PREFIX, RoleSettings
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile, KeyRegistry

kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.37")
OVERLAYS = ("cpu", "gpu")
FAMILIES = ("maniskill", "libero")
BACK = Addresses(
    front_control="tcp://robots.example.org:5710",
    front_bulk="tcp://robots.example.org:5711",
    back_control="tcp://back:5712",
    back_bulk="tcp://back:5713",
)
Manifest = dict[str, Any]


def build(folder: Path) -> list[Manifest]:
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl: make install brings one")
    made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """A copy of the folder of Secrets, with keys made as its comment says."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    shutil.copytree(FOLDER / "keys", folder, ignore=shutil.ignore_patterns("files"))
    keyring = Keyring(folder / "files")
    keyring.prepare(BACK)
    keyring.issue("default", tenant="default", operator=True)
    return keyring


@pytest.fixture(scope="module")
def secrets(keyring: Keyring) -> list[Manifest]:
    return build(keyring.folder.parent)


@pytest.fixture(scope="module", params=OVERLAYS)
def cluster(request: pytest.FixtureRequest) -> list[Manifest]:
    """All that an overlay makes, with all families of simulators."""
    made = build(FOLDER / "overlays" / request.param)
    return made + [manifest for family in FAMILIES for manifest in build(FOLDER / "families" / family)]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def name(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Manifest) -> Manifest:
    (only,) = pod(workload)["containers"]
    return dict(only)


def selects(selector: dict[str, str], workload: Manifest) -> bool:
    return selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def role(workload: Manifest) -> str:
    return name(workload).partition("-")[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_published_schemas(
    cluster: list[Manifest], secrets: list[Manifest], version: str
) -> None:
    for manifest in cluster + secrets:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_would_be_found(cluster: list[Manifest]) -> None:
    wrong = {**workloads(cluster)[0], "spec": {**workloads(cluster)[0]["spec"], "replcas": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_role_has_a_workload_and_nothing_has_its_name_twice(cluster: list[Manifest]) -> None:
    names = [name(workload) for workload in workloads(cluster)]
    assert sorted(names) == ["dashboard", "env", "env-libero", "env-maniskill", "inference", "master", "trainer"]
    keys = [(manifest["kind"], name(manifest)) for manifest in cluster]
    assert len(set(keys)) == len(keys)
    assert {manifest["metadata"].get("namespace", "joynexus") for manifest in cluster} == {"joynexus"}


def test_every_pod_is_closed_bounded_and_looked_after(cluster: list[Manifest]) -> None:
    for workload in workloads(cluster):
        spec, only = pod(workload), container(workload)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "variables of Services would be taken for misspelt settings"
        assert only["securityContext"]["readOnlyRootFilesystem"]
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert only["securityContext"]["allowPrivilegeEscalation"] is False
        assert only["resources"]["limits"]["memory"]
        assert only["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert only["livenessProbe"]["httpGet"]["path"] == "/healthz"
        ports = {port["name"]: port["containerPort"] for port in only["ports"]}
        asked = ports[only["readinessProbe"]["httpGet"]["port"]]
        assert asked == (5714 if name(workload) == "dashboard" else 5720)
        mounted = {mount["name"] for mount in only["volumeMounts"]}
        claims = {name(claim) for claim in workload["spec"].get("volumeClaimTemplates", ())}
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claims
    grace = {name(workload): pod(workload)["terminationGracePeriodSeconds"] for workload in workloads(cluster)}
    assert grace["env"] == grace["env-maniskill"] >= 1800, "a rollout takes minutes"
    assert grace["trainer"] >= 120


def test_every_variable_is_a_setting_and_its_value_is_accepted(
    cluster: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, type[RoleSettings]] = {kind.role: kind for kind in ALL_SETTINGS}
    for workload in workloads(cluster):
        variables = {each["name"]: each["value"] for each in container(workload)["env"]}
        assert len(variables) == len(container(workload)["env"])
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            settings = kinds[role(workload)]()
        for variable in variables:
            assert variable.removeprefix(PREFIX).lower() in type(settings).model_fields, (name(workload), variable)


def test_images_are_those_that_the_dockerfiles_make(cluster: list[Manifest]) -> None:
    tag = next(line for line in (ROOT / ".env").read_text().splitlines() if line.startswith("JOYNEXUS_TAG="))
    for workload in workloads(cluster):
        image = container(workload)["image"].removeprefix("joynexus/")
        made = "health" if name(workload) == "dashboard" else name(workload)
        assert image == f"{made}:{tag.partition('=')[2]}"
        assert (ROOT / "services" / made.partition("-")[0] / "Dockerfile").exists()


def test_what_selects_pods_selects_those_that_are_meant_and_no_other(cluster: list[Manifest]) -> None:
    everything = workloads(cluster)
    for workload in everything:
        chosen = [name(other) for other in everything if selects(workload["spec"]["selector"]["matchLabels"], other)]
        assert chosen == [name(workload)]
    for budget in of_kind(cluster, "PodDisruptionBudget"):
        chosen = [name(other) for other in everything if selects(budget["spec"]["selector"]["matchLabels"], other)]
        assert chosen == [name(budget)]
    for service in of_kind(cluster, "Service"):
        (chosen_one,) = [other for other in everything if selects(service["spec"]["selector"], other)]
        ports = {port["name"] for port in container(chosen_one)["ports"]}
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    for policy in of_kind(cluster, "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"].get("matchLabels", {})
        assert any(selects(wanted, other) for other in everything), name(policy)


def test_workers_may_reach_the_master_alone_and_metrics_are_for_who_is_named(cluster: list[Manifest]) -> None:
    policies = {name(policy): policy["spec"] for policy in of_kind(cluster, "NetworkPolicy")}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (names,) = policies["names"]["egress"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"], "where each node answers for names itself"
    assert [(port["protocol"], port["port"]) for port in names["ports"]] == [("UDP", 53), ("TCP", 53)]
    (out,) = policies["workers"]["egress"]
    assert out["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "master"}}}]
    assert {port["port"] for port in out["ports"]} == {5712, 5713}
    for workload in workloads(cluster):
        labelled = selects(policies["workers"]["podSelector"]["matchLabels"], workload)
        assert labelled == (name(workload) != "master")
        assert selects(policies["metrics"]["podSelector"]["matchLabels"], workload)
    for rules in policies.values():
        for rule in rules.get("ingress", ()):
            to = {port["port"] for port in rule["ports"]}
            assert rule.get("from") or to <= {"front-control", "front-bulk", "pages"}, "from anywhere: tenants only"


def test_scaling_goes_by_metrics_that_the_master_has(cluster: list[Manifest]) -> None:
    scalers = {name(scaler): scaler["spec"] for scaler in of_kind(cluster, "HorizontalPodAutoscaler")}
    assert sorted(scalers) == ["env", "env-libero", "env-maniskill", "inference"]
    by_name = {name(workload): workload for workload in workloads(cluster)}
    for scaled, spec in scalers.items():
        assert spec["scaleTargetRef"]["name"] == scaled
        assert "replicas" not in by_name[scaled]["spec"], "applying the manifests again would undo the scaling"
        for metric in (each["external"]["metric"] for each in spec["metrics"]):
            assert set(metric["selector"]["matchLabels"]) <= set(MASTER[metric["name"]].labels)
    assert scalers["env-libero"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["need"] == "libero"


def test_secrets_are_what_each_role_needs_and_no_more(
    cluster: list[Manifest], secrets: list[Manifest], keyring: Keyring, tmp_path: Path
) -> None:
    wanted = {
        volume["secret"]["secretName"]
        for workload in workloads(cluster)
        for volume in pod(workload)["volumes"]
        if "secret" in volume
    }
    assert wanted == {name(secret) for secret in secrets}
    for secret in secrets:
        folder = tmp_path / name(secret)
        write(folder, secret)
        if name(secret) == "master-keys":
            assert KeyRegistry(folder / "registry.json").list() == keyring.registry.list()
            assert all(Keyring(folder).server_keys(domain).secret for domain in ("front", "back"))
        else:
            own = ClusterFile.load(folder / "client.toml")
            own.keys()
            assert own.control == BACK.back_control
            assert own.bulk == BACK.back_bulk


def write(folder: Path, secret: Manifest) -> None:
    """As a Secret is mounted."""
    folder.mkdir()
    for file, content in secret["data"].items():
        (folder / file).write_bytes(base64.b64decode(content))


def test_services_have_the_addresses_that_cluster_files_name(cluster: list[Manifest]) -> None:
    services = {name(service): service["spec"]["ports"] for service in of_kind(cluster, "Service")}
    for address in (BACK.back_control, BACK.back_bulk):
        host, _, port = address.removeprefix("tcp://").partition(":")
        assert int(port) in {each["port"] for each in services[host]}
    comment = (FOLDER / "keys" / "kustomization.yaml").read_text()
    assert BACK.back_control in comment
    assert BACK.back_bulk in comment


def test_no_secret_lies_in_the_repository() -> None:
    assert (FOLDER / "keys" / ".gitignore").read_text() == "files/\n"
    written = [path.read_text() for path in FOLDER.rglob("*.yaml")]
    assert not [text for text in written if "kind: Secret\n" in text or "secret = " in text]
