from __future__ import annotations

import errno
import stat
from pathlib import Path

import msgspec
import pytest

from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile, KeyEntry, KeyPair, KeyRegistry, find_cluster_file, write_private


def entry(name: str, public: str | None = None, **fields: object) -> KeyEntry:
    values: dict[str, object] = {"domain": "tenant", "tenant": "acme", **fields}
    return KeyEntry(name=name, public=public or KeyPair.generate().public, **values)  # type: ignore[arg-type]


@pytest.fixture
def registry(tmp_path: Path) -> KeyRegistry:
    return KeyRegistry(tmp_path / "registry.json")


def test_key_file_is_private_and_comes_back(tmp_path: Path) -> None:
    pair = KeyPair.generate()
    pair.save(tmp_path / "key.toml")
    assert KeyPair.load(tmp_path / "key.toml") == pair
    assert stat.S_IMODE((tmp_path / "key.toml").stat().st_mode) == 0o600
    assert len((tmp_path / "key.toml").read_text().splitlines()) == 2


def test_secret_is_not_in_the_representation() -> None:
    pair = KeyPair.generate()
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize("text", ["", "public = 'x'", "public = 'x'\nsecret = 'y'", "\xff", "]["])
def test_broken_key_file_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.toml").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="no key file"):
        KeyPair.load(tmp_path / "key.toml")


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.toml cannot be read"):
        KeyPair.load(tmp_path / "absent.toml")


def test_revoked_key_is_unknown_at_the_next_lookup(registry: KeyRegistry, tmp_path: Path) -> None:
    registry.add(entry("laptop"))
    (kept,) = registry.list()
    reader = KeyRegistry(tmp_path / "registry.json")  # another process
    assert reader.lookup(kept.public) == kept
    assert registry.revoke("laptop") == kept
    assert reader.lookup(kept.public) is None


def test_key_that_was_replaced_ends_with_its_grace(registry: KeyRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.add(entry("laptop", scope="act"))
    (old,) = registry.list()
    now = 1e9
    monkeypatch.setattr("joynexus.keys.time.time", lambda: now)
    public = KeyPair.generate().public
    registry.replace("laptop", public, grace_s=60.0)
    assert registry.lookup(public) == msgspec.structs.replace(old, public=public)
    assert registry.lookup(old.public) == msgspec.structs.replace(
        old, name="laptop_old1", successor="laptop", until_s=now + 60
    )
    now += 60
    assert registry.lookup(old.public) is None
    assert [found.public for found in registry.list()] == [public]
    registry.replace("laptop", KeyPair.generate().public, grace_s=0.0)
    assert registry.lookup(public) is None


def test_without_a_grace_no_earlier_key_is_left_either(registry: KeyRegistry) -> None:
    registry.add(entry("laptop"))
    registry.add(entry("robot"))
    for name in ("laptop", "robot"):
        registry.replace(name, KeyPair.generate().public, grace_s=60.0)
    registry.replace("laptop", KeyPair.generate().public, grace_s=0.0)
    assert [found.name for found in registry.list()] == ["laptop", "robot", "robot_old1"]


def test_whoever_revokes_a_key_shuts_out_those_that_it_has_replaced(registry: KeyRegistry) -> None:
    registry.add(entry("laptop"))
    registry.add(entry("robot"))
    for _ in range(2):
        registry.replace("laptop", KeyPair.generate().public, grace_s=60.0)
    assert [found.bearer for found in registry.list()] == ["laptop", "robot", "laptop", "laptop"]
    registry.revoke("laptop_old1")
    assert [found.name for found in registry.list()] == ["laptop", "robot", "laptop_old2"]
    registry.revoke("laptop")
    assert [found.name for found in registry.list()] == ["robot"]


def test_rotated_key_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(tmp_path)
    keyring.prepare(Addresses())
    before = ClusterFile.load(keyring.issue("laptop", tenant="acme")).keys()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(KeyPair, "save", full)
        with pytest.raises(OSError, match="No space"):
            keyring.rotate("laptop", grace_s=0.0)
    assert keyring.registry.lookup(before.public) is not None
    assert ClusterFile.load(keyring.rotate("laptop", grace_s=60.0)).keys() != before
    with pytest.raises(ValueError, match="no key named 'laptop_old1' was made in"):
        keyring.rotate("laptop_old1", grace_s=60.0)


def test_added_key_is_known_at_the_next_lookup(registry: KeyRegistry, tmp_path: Path) -> None:
    reader = KeyRegistry(tmp_path / "registry.json")
    robot = entry("robot", scope="act")
    assert reader.lookup(robot.public) is None
    registry.add(robot)
    assert reader.lookup(robot.public) == robot


def test_damaged_registry_lets_nobody_in_until_it_is_repaired(registry: KeyRegistry, tmp_path: Path) -> None:
    registry.add(entry("laptop"))
    (kept,) = registry.list()
    good = (tmp_path / "registry.json").read_bytes()
    (tmp_path / "registry.json").write_bytes(good[:-20])
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be read"):
            registry.lookup(kept.public)
    (tmp_path / "registry.json").write_bytes(good)
    assert registry.lookup(kept.public) == kept


def test_name_and_key_are_unique(registry: KeyRegistry) -> None:
    registry.add(entry("laptop"))
    with pytest.raises(ValueError, match="a key named 'laptop' exists"):
        registry.add(entry("laptop"))
    with pytest.raises(ValueError, match="registered already, under the name 'laptop'"):
        registry.add(entry("other", registry.list()[0].public))
    with pytest.raises(ValueError, match="no key named 'ghost'"):
        registry.revoke("ghost")
    assert len(registry.list()) == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "Laptop!"}, "cannot name a key"),
        ({"public": "short"}, "no public key"),
        ({"tenant": "../x"}, "cannot name a tenant"),
        ({"roles": ("env",)}, "only a worker's key claims roles"),
        ({"domain": "worker", "tenant": ""}, "must claim"),
        ({"domain": "worker", "tenant": "", "roles": ("boss",)}, "not boss"),
        ({"domain": "worker", "roles": ("env",)}, "no tenant"),
    ],
)
def test_entry_that_contradicts_itself_is_refused(registry: KeyRegistry, fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        registry.add(entry(**{"name": "key", **fields}))
    assert registry.list() == []


def test_keyring_keeps_what_is_there(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.prepare(Addresses())
    front, keys = keyring.server_keys("front"), keyring.registry.list()
    keyring.prepare(Addresses(front_control="tcp://elsewhere:1"))
    assert keyring.server_keys("front") == front
    assert keyring.registry.list() == keys
    assert {key.name for key in keys} == {"trainer", "inference", "env", "health", "dashboard"}


def test_issued_cluster_file_leads_to_the_key_and_follows_the_addresses(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.prepare(Addresses())
    path = keyring.issue("robot", tenant="acme", scope="act")
    cluster = ClusterFile.load(path)
    known = keyring.registry.lookup(cluster.keys().public)
    assert known is not None
    assert (known.tenant, known.scope) == ("acme", "act")
    assert cluster.server_public == keyring.server_keys("front").public
    keyring.prepare(Addresses(front_control="tcp://elsewhere:1"))
    assert ClusterFile.load(path).control == "tcp://elsewhere:1"
    assert ClusterFile.load(keyring.cluster_file("env")).server_public == keyring.server_keys("back").public


def test_a_key_whose_files_cannot_be_written_is_not_registered(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.prepare(Addresses())
    (tmp_path / "lab").write_text("in the way")
    for _ in range(2):  # the second one is told the same, not that the name is taken
        with pytest.raises(OSError, match="lab"):
            keyring.issue("lab", tenant="lab")
    assert "lab" not in {entry.name for entry in keyring.registry.list()}


def test_a_full_disk_leaves_the_old_file_alone_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.json"
    write_private(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*registry\.json"):
        write_private(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("registry.json", b"old")]


def test_tenants_key_cannot_take_a_workers_name(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.prepare(Addresses())
    before = (tmp_path / "env" / "key.toml").read_bytes()
    with pytest.raises(ValueError, match="exists"):
        keyring.issue("env", tenant="acme")
    assert (tmp_path / "env" / "key.toml").read_bytes() == before


def test_cluster_file_is_searched_where_people_expect_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        (folder / ".joynexus").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("JOYNEXUS_CONFIG", raising=False)
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="no cluster is configured: run `joynexus up`"):
        find_cluster_file()
    (home / ".joynexus/client.toml").touch()
    assert find_cluster_file() == home / ".joynexus/client.toml"
    (here / ".joynexus/client.toml").touch()
    assert find_cluster_file() == here / ".joynexus/client.toml"
    monkeypatch.setenv("JOYNEXUS_CONFIG", "/named/client.toml")
    assert find_cluster_file() == Path("/named/client.toml")


@pytest.mark.parametrize(
    "text",
    ["", "control = 1", "control='a'\nbulk='b'\nserver_public='c'\nkey_file='d'", "controll='tcp://x'"],
)
def test_broken_cluster_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ValueError, match=r"client.toml is not valid"):
        ClusterFile.load(tmp_path / "client.toml")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5710", "tcp://[::]:5710", "tcp://*:5710"])
def test_nobody_is_told_to_dial_an_address_that_can_only_be_listened_on(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match=r"nobody can dial it.*JOYNEXUS_ADDRESS"):
        Keyring(tmp_path).prepare(Addresses(front_control=address))
    assert not list(tmp_path.iterdir())
