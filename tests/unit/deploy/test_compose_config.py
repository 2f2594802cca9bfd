"""Docker Compose itself reads docker-compose.yml, with every profile. No engine is asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def compose(*arguments: str) -> str:
    """Run `docker compose` with the defaults of .env and nothing of the shell's but PATH."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("there is no docker here: docker-compose.yml is read as YAML only")
    environment = {"PATH": str(Path(docker).parent), "HOME": "/nowhere"}
    if subprocess.run([docker, "compose", "version"], env=environment, capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose plugin here: docker-compose.yml is read as YAML only")
    ran = subprocess.run(
        [docker, "compose", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_compose_accepts_the_file_with_all_profiles() -> None:
    assert compose("--profile", "*", "config", "-q") == ""


@pytest.mark.parametrize(
    ("profiles", "roles"),
    [
        ((), {"trainer", "inference"}),  # as .env says
        (("gpu",), {"trainer-gpu", "inference-gpu"}),
        (("cpu", "supervisor"), {"trainer", "inference", "health"}),
        (("gpu", "maniskill", "libero"), {"trainer-gpu", "inference-gpu", "env-maniskill", "env-libero"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_profile_has_its_roles(profiles: tuple[str, ...], roles: set[str]) -> None:
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    assert set(compose(*chosen, "config", "--services").split()) == {"keygen", "master", "env", "dashboard", *roles}
