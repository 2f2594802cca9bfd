"""Who may connect: CURVE key pairs, the registry of public keys, and the small files that carry both.

In: files. Out: `KeyPair` for a socket, `KeyEntry` for an authenticated public key, `ClusterFile` for where to dial.
Never: sockets, or a secret key in a registry, a message, a log line or an exception.

A tenant is what its key stands for. Revocation is the removal of a line of the registry: it is looked up for every
message, and read again as soon as the file has changed, so it acts on the next message of a live connection.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from joynexus.specs import check_name
from joynexus.unreadable import UNREADABLE

Domain = Literal["tenant", "worker"]
KeyScope = Literal["read", "act", "all"]

WORKER_ROLES = ("trainer", "inference", "env", "health", "dashboard")

_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def check_public(public: str) -> str:
    """Return `public` if it looks like a CURVE public key (40 characters of Z85); ValueError otherwise."""
    if not _Z85_KEY.fullmatch(public):
        raise ValueError(f"'{public[:60]}' is no public key: a key has 40 characters (Z85)")
    return public


class KeyPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CURVE key pair, both halves in Z85 (40 characters)."""

    public: str
    secret: str

    def __repr__(self) -> str:  # a secret must not reach a log by accident
        return f"KeyPair(public={self.public!r})"

    @staticmethod
    def generate() -> KeyPair:
        """Make a new key pair."""
        public, secret = zmq.curve_keypair()
        return KeyPair(public=public.decode(), secret=secret.decode())

    @staticmethod
    def load(path: Path) -> KeyPair:
        """Read a key file.

        Raises:
            ValueError: if it is missing or is no key file.
        """
        try:
            pair = msgspec.toml.decode(path.read_bytes(), type=KeyPair)
        except OSError as error:
            raise ValueError(f"the key file {path} cannot be read: {error.strerror}") from error
        except (ValueError, *UNREADABLE) as error:  # ValueError: TOML's errors
            raise ValueError(f"{path} is no key file: it must have the two lines public and secret") from error
        if not _Z85_KEY.fullmatch(pair.public) or not _Z85_KEY.fullmatch(pair.secret):
            raise ValueError(f"{path} is no key file: a key has 40 characters (Z85)")
        return pair

    def save(self, path: Path) -> None:
        """Write a key file that only its owner can read; an existing one is replaced."""
        # Z85 has neither quotes nor backslashes, so nothing needs escaping.
        write_private(path, f'public = "{self.public}"\nsecret = "{self.secret}"\n'.encode())


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a public key stands for.

    Attributes:
        name: the key's own name, unique in the cluster.
        public: the key, Z85.
        domain: `tenant` keys may use the front sockets, `worker` keys the back ones.
        tenant: whose key it is; empty for workers.
        scope: what a tenant's key may do.
        roles: what a worker's key may claim to be.
        operator: a tenant's key that also sees other tenants' work in `Status` and usage.
        until_s: it is let in until then (seconds since the Unix epoch, by the clock on the wall); 0: without end. A key
            that was replaced by another has an end.
        successor: name of the key that has replaced it; empty if none has.
    """

    name: str
    public: str
    domain: Domain
    tenant: str = ""
    scope: KeyScope = "all"
    roles: tuple[str, ...] = ()
    operator: bool = False
    until_s: float = 0.0
    successor: str = ""

    @property
    def bearer(self) -> str:
        """Return the name under which its owner is known, before and after the key is replaced."""
        return self.successor or self.name

    def in_force(self, now_s: float) -> bool:
        """Tell whether the key is let in at this time."""
        return not self.until_s or now_s < self.until_s


Keys = list[KeyEntry]


class _RegistryFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...] = ()


class KeyRegistry:
    """The keys of a cluster, in one JSON file that is replaced as a whole.

    Several processes may change it (they lock), any number may look things up. A missing file is an empty registry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fspath(path)  # `lookup` runs for every message
        # One value, so that threads that read it anew at the same time cannot leave an old table under a new stamp.
        self._known: tuple[tuple[int, int, int], dict[str, KeyEntry]] = ((0, 0, 0), {})

    def lookup(self, public: str) -> KeyEntry | None:
        """Return what a key stands for now, or None; costs one `stat` unless the file changed.

        Raises:
            ValueError: if the file is damaged; nobody is known then.
        """
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"the key registry {self._path} cannot be read ({error}): restore it") from error
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known, table = self._known
        if stamp != known:
            table = {entry.public: entry for entry in self._read().keys}
            self._known = (stamp, table)
        entry = table.get(public)
        return entry if entry is None or entry.in_force(time.time()) else None

    def list(self) -> Keys:
        """Return all keys that are let in, oldest first; ValueError if the file is damaged."""
        return [entry for entry in self._read().keys if entry.in_force(time.time())]

    def add(self, entry: KeyEntry) -> None:
        """Let a key in, from the next handshake on.

        Raises:
            ValueError: if the name or the key is taken, or the entry contradicts itself.
        """
        _check_entry(entry)
        with self._changing() as keys:
            for other in keys:
                if other.name == entry.name:
                    raise ValueError(f"a key named '{entry.name}' exists: revoke it first, or take another name")
                if other.public == entry.public:
                    raise ValueError(f"this key is registered already, under the name '{other.name}'")
            keys.append(entry)

    def revoke(self, name: str) -> KeyEntry:
        """Shut a key out, with those that it has replaced, from the next message on; return what it stood for.

        Raises:
            ValueError: if there is no key of that name.
        """
        with self._changing() as keys:
            for index, entry in enumerate(keys):
                if entry.name == name:
                    del keys[index]
                    keys[:] = [other for other in keys if other.successor != name]
                    return entry
            raise ValueError(f"there is no key named '{name}'; `joynexus admin keys list` shows those there are")

    def replace(self, name: str, public: str, *, grace_s: float) -> KeyEntry | None:
        """Let another public key in under a name; the one before keeps its rights for a while, under a name of its own.

        Args:
            name: of the key that is replaced.
            public: the new one, Z85.
            grace_s: seconds for which the old one is let in too; with 0 it is shut out from its next message on, with
                all that were replaced earlier.

        Returns:
            The old one as it stands in the registry now; None if it does not any more.

        Raises:
            ValueError: if there is no key of that name.
        """
        check_public(public)
        with self._changing() as keys:
            index = next((index for index, entry in enumerate(keys) if entry.name == name), None)
            if index is None:
                raise ValueError(f"there is no key named '{name}'; `joynexus admin keys list` shows those there are")
            entry = keys[index]
            keys[index] = msgspec.structs.replace(entry, public=public, until_s=0.0)
            if grace_s <= 0:  # whoever asks for this fears a thief, who may have the one before that too
                keys[:] = [other for other in keys if other.successor != name]
                return None
            names = {other.name for other in keys}
            free = next(free for number in itertools.count(1) if (free := f"{name[:56]}_old{number}") not in names)
            old = msgspec.structs.replace(entry, name=free, successor=name, until_s=time.time() + grace_s)
            keys.append(old)
            return old

    def _read(self) -> _RegistryFile:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_RegistryFile)
        except FileNotFoundError:
            return _RegistryFile()
        except (OSError, *UNREADABLE) as error:
            raise ValueError(f"the key registry {self._path} cannot be read ({error}): restore it") from error

    @contextmanager
    def _changing(self) -> Iterator[Keys]:
        """Give the list of keys to change; it is written back unless the block raises."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is a file of its own: the registry itself is another file after each change.
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = self.list()  # those whose time is over go with the next change
            yield keys
            content = msgspec.json.encode(_RegistryFile(keys=tuple(keys)))
            write_private(self._path, msgspec.json.format(content, indent=2) + b"\n")


def _check_entry(entry: KeyEntry) -> None:
    check_name("key", entry.name)
    check_public(entry.public)
    if entry.domain == "tenant":
        check_name("tenant", entry.tenant)
        if entry.roles:
            raise ValueError(f"key '{entry.name}' is a tenant's: only a worker's key claims roles")
    else:
        if entry.tenant or entry.operator:
            raise ValueError(f"key '{entry.name}' is a worker's: it stands for no tenant and no operator")
        unknown = sorted(set(entry.roles) - set(WORKER_ROLES))
        if unknown or not entry.roles:
            raise ValueError(
                f"key '{entry.name}' must claim one or more of the roles {', '.join(WORKER_ROLES)}"
                + (f", not {', '.join(unknown)}" if unknown else "")
            )


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a cluster listens and with which key to dial it: all that a tenant or a worker needs to connect.

    Attributes:
        control, bulk: addresses of the two sockets of its domain (`tcp://host:port`).
        server_public: the server's public key, Z85; a server that holds another is not spoken to.
        key_file: the dialler's own key file; a relative path counts from the folder of this file.
    """

    control: str
    bulk: str
    server_public: str
    key_file: str

    @staticmethod
    def load(path: Path | None = None) -> ClusterFile:
        """Read the given file, or the first that exists of the usual places (`find_cluster_file`).

        Raises:
            ValueError: if there is none, or it is not readable.
        """
        path = path or find_cluster_file()
        try:
            cluster = msgspec.toml.decode(path.read_bytes(), type=ClusterFile)
            check_public(cluster.server_public)
        except FileNotFoundError as error:
            raise ValueError(
                f"there is no cluster file {path}: run `joynexus up` or ask the operator for one"
            ) from error
        except OSError as error:
            raise ValueError(f"the cluster file {path} cannot be read: {error.strerror}") from error
        except (ValueError, *UNREADABLE) as error:
            raise ValueError(f"the cluster file {path} is not valid: {error}") from error
        return msgspec.structs.replace(cluster, key_file=str(path.resolve().parent / cluster.key_file))

    def save(self, path: Path) -> None:
        """Write the file; an existing one is replaced.

        Raises:
            ValueError: if a value cannot stand in the file.
        """
        lines = []
        for field in self.__struct_fields__:
            value = str(getattr(self, field))
            if "'" in value or not value.isprintable():
                raise ValueError(f"{value!r} cannot be written to a cluster file: use a path without quotes")
            lines.append(f"{field} = '{value}'\n")
        write_private(path, "".join(lines).encode())

    def keys(self) -> KeyPair:
        """Read the key file; ValueError if that is not possible."""
        return KeyPair.load(Path(self.key_file))


def find_cluster_file() -> Path:
    """Return `$JOYNEXUS_CONFIG`, else the first of `.joynexus/client.toml` here and in the home folder that exists.

    Raises:
        ValueError: if no cluster is configured.
    """
    named = os.environ.get("JOYNEXUS_CONFIG")
    if named:
        return Path(named)
    for folder in (Path.cwd(), Path.home()):
        path = folder / ".joynexus" / "client.toml"
        if path.is_file():
            return path
    raise ValueError(
        "no cluster is configured: run `joynexus up` here, or point JOYNEXUS_CONFIG at the client.toml "
        "that the operator gave you"
    )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, durably, so that a reader sees the old content or the new one.

    Raises:
        OSError: with the file's name, if that cannot be done; nothing of the new content is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
