"""One instance of every message, with every field set: made from the types, always the same.

`python -m tests.wire.samples` writes golden bytes for kinds that have none, and a further file for kinds whose bytes
have changed; it never touches a file that is there. Before the first release of a kind, delete its file instead.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from joynexus.wire import Header, Message
from joynexus.wire.messages import KINDS

GOLDEN = Path(__file__).parent / "golden"


def sample(kind: str) -> Message:
    """Return the instance of a kind."""
    value = make(KINDS[kind], kind)
    assert isinstance(value, msgspec.Struct)
    return value


def make(type_: Any, path: str) -> Any:  # Any: whatever the type says
    """Return an instance of any type; `path` varies its values."""
    return _make(inspect.type_info(type_), path)


def header(kind: str) -> Header:
    """Return a header for it, with every field set."""
    return Header(kind=kind, id="id-1", re="re-1", deadline_ms=1500, sizes=(3, 0))


def golden(kind: str) -> list[Path]:
    """Return the files with a kind's golden bytes, oldest first."""
    return sorted(GOLDEN.glob(f"{kind}.*.bin"), key=lambda path: int(path.suffixes[0][1:]))


def _make(info: inspect.Type, path: str) -> Any:  # Any: whatever the type says
    number = zlib.crc32(path.encode()) % 997 + 1
    match info:
        case inspect.StructType():
            return info.cls(**{field.name: _make(field.type, f"{path}.{field.name}") for field in info.fields})
        case inspect.UnionType():
            return _make(next(type_ for type_ in info.types if not isinstance(type_, inspect.NoneType)), path)
        case inspect.VarTupleType():
            return (_make(info.item_type, f"{path}.0"), _make(info.item_type, f"{path}.1"))
        case inspect.TupleType():
            return tuple(_make(type_, f"{path}.{index}") for index, type_ in enumerate(info.item_types))
        case inspect.DictType():
            return {"key": _make(info.value_type, f"{path}.key")}
        case inspect.LiteralType():
            return info.values[-1]
        case inspect.EnumType():
            return next(iter(info.cls))
        case inspect.StrType():
            return path.rsplit(".", 1)[-1]
        case inspect.BytesType():
            return path.encode()
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return number
        case inspect.FloatType():
            return number + 0.25
        case _:
            raise TypeError(f"{path}: no sample for {info}")


def main() -> None:
    """Write what is missing."""
    GOLDEN.mkdir(exist_ok=True)
    for kind in KINDS:
        body, files = msgspec.msgpack.encode(sample(kind)), golden(kind)
        if not files or files[-1].read_bytes() != body:
            path = GOLDEN / f"{kind}.{len(files) + 1}.bin"
            path.write_bytes(body)
            print("wrote", path.name)


if __name__ == "__main__":
    main()
