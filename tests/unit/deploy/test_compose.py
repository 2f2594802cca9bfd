"""The containers are as closed and as bounded as docs/security.md and docs/operating.md say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from joynexus.wire.front import BlobBegin
from joynexus.wire.messages import BACK_REQUESTS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONCE = {"keygen", "admin"}
"""They do one thing and end."""
FOREIGN = {"prometheus": "observability", "grafana": "observability", "postgres": "postgres"}
"""Images of other projects, and the profiles that have them."""
ROLES = SERVICES.keys() - ONCE - FOREIGN.keys()
RECIPES = sorted((ROOT / "services").glob("*/Dockerfile"))


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_is_read_only_without_privileges_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"]
    assert service["mem_limit"]
    assert service["cpus"]
    assert all("size=" in mount for mount in service["tmpfs"])
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    for key in ("privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "container_name"):
        assert key not in service  # a container name would also keep a service from being scaled


@pytest.mark.parametrize("name", sorted(ROLES))
def test_each_role_is_asked_whether_it_is_ready_and_has_time_to_end(name: str) -> None:
    service = SERVICES[name]
    asked = (
        ["grep", "-qsE", ":1650 01", "/proc/net/tcp"] if name == "health" else ["python", "-I", "-S", "deploy/probe.py"]
    )
    assert service["healthcheck"]["test"] == ["CMD", *asked]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) >= 10


def test_only_the_master_and_the_dashboard_can_be_reached_from_outside_on_loopback_unless_said_otherwise() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"master", "dashboard", "grafana"}
    assert all(port.startswith("${JOYNEXUS_PUBLISH:-127.0.0.1}:") for port in published["master"])
    assert all(port.startswith("${JOYNEXUS_DASHBOARD_PUBLISH:-127.0.0.1}:") for port in published["dashboard"])
    assert all(port.startswith("${GRAFANA_PUBLISH:-127.0.0.1}:") for port in published["grafana"])
    assert SERVICES["grafana"]["profiles"] == ["observability"]
    assert COMPOSE["networks"]["backplane"]["internal"] is True
    workers = ROLES - published.keys()
    assert all(SERVICES[name]["networks"] == ["backplane"] for name in workers)
    assert SERVICES["keygen"]["network_mode"] == "none"
    assert COMPOSE["networks"]["store"]["internal"] is True
    assert {name for name in SERVICES if "store" in SERVICES[name].get("networks", ())} == {"master", "postgres"}
    assert SERVICES["admin"]["networks"] == ["frontdoor"]


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_what_others_made_is_optional_not_root_and_changes_nothing_of_what_it_is_given(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert service["profiles"] == [FOREIGN[name]]
    assert service["healthcheck"]["test"][0] == "CMD"
    for volume in service["volumes"]:
        if isinstance(volume, dict):
            assert volume["read_only"] is True
            continue
        source, _, rest = volume.partition(":")
        if source.startswith("."):
            assert rest.endswith(":ro")
            assert (ROOT / source).exists()
        else:
            assert source == name


def test_whoever_holds_the_engines_socket_is_asked_for_by_name_and_listens_on_no_port() -> None:
    holders = [name for name, service in SERVICES.items() if any("docker.sock" in str(v) for v in service["volumes"])]
    assert holders == ["health"]
    health = SERVICES["health"]
    assert health["profiles"] == ["supervisor"]
    assert health["environment"]["JOYNEXUS_METRICS"] == ""
    assert "JOYNEXUS_LISTEN" not in health["environment"]
    assert "ports" not in health


def test_a_role_that_only_reads_blobs_cannot_write_them() -> None:
    writers = BACK_REQUESTS[BlobBegin] | {"master", "admin"}
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("blobs:"):
                assert volume.endswith(":ro") != (name.partition("-")[0] in writers), name


def test_each_role_sees_its_own_key_and_only_an_operators_containers_can_change_keys() -> None:
    for name, service in SERVICES.items():
        mounts = [volume for volume in service["volumes"] if isinstance(volume, dict) and volume["source"] == "keys"]
        if name in ONCE or FOREIGN.get(name) == "observability":
            assert not mounts
            continue
        assert len(mounts) == 1
        assert mounts[0]["read_only"] is True
        role = name.partition("-")[0]
        folder = {"master": None, "postgres": "_postgres"}.get(role, role)
        assert mounts[0].get("volume", {}).get("subpath") == folder


def test_the_address_that_is_published_is_the_one_in_the_tenants_files() -> None:
    address = "${JOYNEXUS_ADDRESS:-${JOYNEXUS_PUBLISH:-127.0.0.1}}"
    command = SERVICES["keygen"]["command"]
    assert f"--front-control tcp://{address}:${{JOYNEXUS_PORT:-5710}}" in command
    assert f"--front-bulk tcp://{address}:${{JOYNEXUS_BULK_PORT:-5711}}" in command


def test_the_dashboard_answers_to_the_address_that_it_is_published_on() -> None:
    host, port = "${JOYNEXUS_DASHBOARD_PUBLISH:-127.0.0.1}", "${JOYNEXUS_DASHBOARD_PORT:-5714}"
    dashboard = SERVICES["dashboard"]
    assert dashboard["ports"] == [f"{host}:{port}:5714"]
    assert dashboard["environment"]["JOYNEXUS_DASHBOARD_URL"] == f"${{JOYNEXUS_DASHBOARD_URL:-http://{host}:{port}}}"


def test_there_are_as_many_roles_for_a_gpu_as_for_a_cpu_and_one_profile_has_each() -> None:
    for role in ("trainer", "inference"):
        cpu, gpu = SERVICES[role], SERVICES[f"{role}-gpu"]
        assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
        (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert (gpu["environment"]["JOYNEXUS_DEVICE"], gpu["environment"]["JOYNEXUS_DTYPE"]) == ("cuda", "bfloat16")
        assert "JOYNEXUS_DEVICE" not in cpu["environment"]
    assert "profiles" not in SERVICES["master"]
    assert "profiles" not in SERVICES["env"]
    assert "profiles" not in SERVICES["dashboard"]


def test_each_version_is_pinned_in_one_file_and_each_variable_of_that_file_is_used() -> None:
    defaults = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE))
    assert set(re.findall(r"\$\{([A-Z_]+)", TEXT)) | {"COMPOSE_PROFILES"} == set(defaults)
    assert defaults["COMPOSE_PROFILES"] == "cpu"
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^${}]*)\}", TEXT):
        assert defaults[name] == default, f"{name} has another default in .env"
    for name, service in SERVICES.items():
        assert re.fullmatch(r"(joynexus/[a-z-]+:)?\$\{[A-Z_]+:\?is in \.env\}", service["image"]), name
    pinned = {name: value for name, value in defaults.items() if name.endswith(("_IMAGE", "_TAG"))}
    assert all(re.search(r"\d+\.\d+", value) and "latest" not in value for value in pinned.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_an_image_has_one_role_and_runs_as_a_numeric_user_of_its_own(recipe: Path) -> None:
    role, lines = recipe.parent.name, recipe.read_text().splitlines()
    stages = [index for index, line in enumerate(lines) if line.startswith("FROM ")]
    assert len(stages) > 1, "what builds is not what runs"
    assert "ARG PYTHON_IMAGE=python:3.11-slim-trixie" in lines
    assert {line for line in lines if line.startswith("USER ")} == {"USER 10001:10001"}
    assert lines.index("USER 10001:10001") > stages[1]
    assert f'CMD ["python", "-m", "services.{role}"]' in lines
    assert "JOYNEXUS_METRICS=0.0.0.0:5720" in recipe.read_text(), "where the health check asks"
    copied = re.findall(r"^COPY services/(\S+)", "\n".join(lines), re.MULTILINE)
    assert copied == ["__init__.py", role]
    assert not any(line.startswith("ADD ") for line in lines)


def test_each_role_has_a_recipe_and_what_is_built_is_what_they_say() -> None:
    assert [recipe.parent.name for recipe in RECIPES] == ["env", "health", "inference", "master", "trainer"]
    targets = set(re.findall(r"^FROM role AS (\w+)$", (ROOT / "services/env/Dockerfile").read_text(), re.MULTILINE))
    for name, service in SERVICES.items():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).exists(), name
            assert service["build"].get("target") in {None, *targets}, name


def test_no_key_journal_or_data_set_of_a_checkout_gets_into_an_image() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert let_in == {"pyproject.toml", "joynexus", "common", "services", "deploy/*.py", "deploy/*.sh"}
