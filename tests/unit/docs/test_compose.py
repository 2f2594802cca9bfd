"""The containers are as closed as docs/security.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from joynexus.wire.front import BlobBegin
from joynexus.wire.messages import BACK_REQUESTS

COMPOSE = yaml.safe_load((Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_is_read_only_without_privileges_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"]
    assert service["mem_limit"]
    assert "privileged" not in service
    assert "cap_add" not in service


def test_only_the_master_can_be_reached_from_outside_and_on_loopback_unless_said_otherwise() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["master"]
    assert all(port.startswith("${JOYNEXUS_PUBLISH:-127.0.0.1}:") for port in SERVICES["master"]["ports"])
    assert COMPOSE["networks"]["backplane"]["internal"] is True
    workers = SERVICES.keys() - {"master", "keygen"}
    assert all(SERVICES[name]["networks"] == ["backplane"] for name in workers)
    assert SERVICES["keygen"]["network_mode"] == "none"


def test_a_role_that_only_reads_blobs_cannot_write_them() -> None:
    writers = BACK_REQUESTS[BlobBegin] | {"master"}
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("blobs:"):
                assert volume.endswith(":ro") != (name.partition("-")[0] in writers), name


def test_each_role_sees_its_own_key_and_no_container_but_keygen_can_change_keys() -> None:
    for name, service in SERVICES.items():
        mounts = [volume for volume in service["volumes"] if isinstance(volume, dict) and volume["source"] == "keys"]
        if name == "keygen":
            assert not mounts
            continue
        assert len(mounts) == 1
        assert mounts[0]["read_only"] is True
        role = name.partition("-")[0]
        assert mounts[0].get("volume", {}).get("subpath") == (None if role == "master" else role)


def test_the_image_runs_as_a_user_of_its_own() -> None:
    recipe = (Path(__file__).resolve().parents[3] / "deploy" / "Dockerfile").read_text()
    assert "\nUSER joynexus\n" in recipe
