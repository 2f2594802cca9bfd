"""The folder of keys that an operator keeps: made once, added to when somebody is let in.

In: a folder and the addresses the master listens on. Out: server keys, the registry, a key and a cluster file for each
worker role, and one of each for every tenant's key that is issued. Never: a key replaced behind somebody's back; what
is there stays, until `rotate` is asked for.

    addresses.json           where others dial the master
    registry.json            public keys of everybody who may connect
    front.toml, back.toml    the master's own key pairs, for tenants and for workers
    <name>/key.toml          a key pair that was issued (a worker's has the role's name)
    <name>/client.toml       and the cluster file beside it: this folder is what its owner is given
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from joynexus.keys import WORKER_ROLES, ClusterFile, KeyEntry, KeyPair, KeyRegistry, KeyScope, write_private
from joynexus.unreadable import UNREADABLE

_EVERYWHERE = ("0.0.0.0", "[::]", "*")


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The four addresses by which others dial the master."""

    front_control: str = "tcp://127.0.0.1:5710"
    front_bulk: str = "tcp://127.0.0.1:5711"
    back_control: str = "tcp://127.0.0.1:5712"
    back_bulk: str = "tcp://127.0.0.1:5713"


class Keyring:
    """A cluster's folder of keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = KeyRegistry(folder / "registry.json")

    def prepare(self, addresses: Addresses) -> None:
        """Make what is missing: server keys, and a key for each worker role; cluster files follow the addresses.

        Raises:
            ValueError: if one is an address that a master can listen on and nobody can dial.
        """
        for address in msgspec.structs.astuple(addresses):
            if address.removeprefix("tcp://").rpartition(":")[0] in _EVERYWHERE:
                raise ValueError(
                    f"{address} is where a master listens, and nobody can dial it: say by which name or address this"
                    " machine is known to others (with docker compose: JOYNEXUS_ADDRESS)"
                )
        for domain in ("front", "back"):
            if not (self.folder / f"{domain}.toml").exists():
                KeyPair.generate().save(self.folder / f"{domain}.toml")
        _write_addresses(self.folder, addresses)
        registered = {entry.public for entry in self.registry.list()}
        for role in WORKER_ROLES:
            pair = self._pair(role)
            if pair.public not in registered:
                self.registry.add(KeyEntry(name=role, public=pair.public, domain="worker", roles=(role,)))
            self._cluster_file(role, worker=True, addresses=addresses)
        for entry in self.registry.list():
            if entry.domain == "tenant" and (self.folder / entry.name / "key.toml").exists():
                self._cluster_file(entry.name, worker=False, addresses=addresses)

    def issue(self, name: str, *, tenant: str, scope: KeyScope = "all", operator: bool = False) -> Path:
        """Make and register a key for a tenant.

        Returns:
            The cluster file to give to its owner, together with the `key.toml` beside it.

        Raises:
            ValueError: if the name is taken or may not name a key, or the folder was not prepared.
            OSError: if its files cannot be written; the key is not registered then.
        """
        pair = KeyPair.generate()
        entry = KeyEntry(name=name, public=pair.public, domain="tenant", tenant=tenant, scope=scope, operator=operator)
        return self._issue(pair, entry)

    def issue_worker(self, name: str, *, roles: tuple[str, ...]) -> Path:
        """Make and register a worker's key beside those that `prepare` made; returns and raises as `issue`."""
        pair = KeyPair.generate()
        return self._issue(pair, KeyEntry(name=name, public=pair.public, domain="worker", roles=roles))

    def rotate(self, name: str, *, grace_s: float) -> Path:
        """Make another key of the same name and the same rights; the one before is let in for `grace_s` more seconds.

        Returns:
            The cluster file of the new one, for its owner, together with the `key.toml` beside it.

        Raises:
            ValueError: if there is no key of that name, or it was not made here.
            OSError: if its files cannot be written; the old key stays as it was.
        """
        pair, path = KeyPair.generate(), self.folder / name / "key.toml"
        if not path.exists():
            raise ValueError(f"no key named '{name}' was made in {self.folder}; `joynexus admin keys list` shows names")
        new = path.with_name("key.toml.next")
        pair.save(new)  # first: a key that is let in has a file, whenever this ends
        try:
            self.registry.replace(name, pair.public, grace_s=grace_s)
        except (ValueError, OSError):
            new.unlink()
            raise
        new.replace(path)
        return self.cluster_file(name)

    def server_keys(self, domain: str) -> KeyPair:
        """Return the master's key pair of domain `front` or `back`; ValueError if the folder was not prepared."""
        return KeyPair.load(self.folder / f"{domain}.toml")

    def cluster_file(self, name: str) -> Path:
        """Return where the cluster file of a key lies."""
        return self.folder / name / "client.toml"

    def _issue(self, pair: KeyPair, entry: KeyEntry) -> Path:
        addresses = _read_addresses(self.folder)
        self.registry.add(entry)  # first: of somebody else's name no file is touched
        try:
            pair.save(self.folder / entry.name / "key.toml")
            return self._cluster_file(entry.name, worker=entry.domain == "worker", addresses=addresses)
        except OSError:
            self.registry.revoke(entry.name)
            raise

    def _pair(self, name: str) -> KeyPair:
        path = self.folder / name / "key.toml"
        if not path.exists():
            KeyPair.generate().save(path)
        return KeyPair.load(path)

    def _cluster_file(self, name: str, *, worker: bool, addresses: Addresses) -> Path:
        path = self.cluster_file(name)
        domain = "back" if worker else "front"
        ClusterFile(
            control=addresses.back_control if worker else addresses.front_control,
            bulk=addresses.back_bulk if worker else addresses.front_bulk,
            server_public=self.server_keys(domain).public,
            key_file="key.toml",
        ).save(path)
        return path


def _write_addresses(folder: Path, addresses: Addresses) -> None:
    write_private(folder / "addresses.json", msgspec.json.format(msgspec.json.encode(addresses)) + b"\n")


def _read_addresses(folder: Path) -> Addresses:
    try:
        return msgspec.json.decode((folder / "addresses.json").read_bytes(), type=Addresses)
    except (OSError, *UNREADABLE) as error:
        raise ValueError(f"{folder} is not a folder of keys yet: start the cluster once, then issue keys") from error
