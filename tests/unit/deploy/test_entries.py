"""What containers do before they become the command that they were given."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import joynexus
from joynexus import launch
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile
from joynexus.specs import check_name

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def entry(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[str, list[str]]]]:
    """Load an entry; what it would have become is kept."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(module.os, "execvp", lambda file, command: became.append((file, command)))
    return module, became


def test_an_operators_container_dials_the_master_by_its_name_with_the_operators_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keyring = Keyring(tmp_path / ".joynexus" / "keys")
    keyring.prepare(Addresses())
    keyring.issue("default", tenant="default", operator=True)
    module, became = entry("entry_admin", monkeypatch)
    module.main(["joynexus", "status"])
    assert became == [("joynexus", ["joynexus", "status"])]
    cluster = ClusterFile.load()
    assert (cluster.control, cluster.bulk) == ("tcp://master:5710", "tcp://master:5711")
    assert cluster.keys() == ClusterFile.load(keyring.cluster_file("default")).keys()


def test_an_operators_container_works_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, became = entry("entry_admin", monkeypatch)
    module.main(["true"])
    assert became == [("true", ["true"])]
    assert not list(tmp_path.iterdir())


def test_the_password_of_the_journals_server_is_made_once_and_is_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, became = entry("entry_keygen", monkeypatch)
    with pytest.raises(ValueError, match="cannot name a key"):
        check_name("key", module.FOLDER.name)  # so no key's folder is handed to that server
    monkeypatch.setattr(module, "FOLDER", tmp_path / "server")
    module.main(["true"])
    password, line = ((tmp_path / "server" / name).read_text() for name in ("password", "pgpass"))
    assert len(password) > 30
    assert line == f"postgres:5432:joynexus:joynexus:{password}\n"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "server").iterdir()} == {0o600}
    module.main(["true"])
    assert (tmp_path / "server" / "password").read_text() == password
    assert became == [("true", ["true"])] * 2


def test_an_image_with_one_role_is_enough_for_an_operators_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joynexus, "__file__", str(tmp_path / "joynexus" / "__init__.py"))
    with pytest.raises(ValueError, match="not part of the installed package"):
        launch.checkout()
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    assert launch.checkout() == tmp_path
