"""Inputs out of other inputs: bytes, and where they are MessagePack, JSON or safetensors, the values in them.

In: dice, inputs to start from. Out: inputs, at most `MOST_BYTES` long. Never: one that does not follow from the dice.

An input is a letter (`targets.TARGETS`) and byte strings, each but the last after three bytes of its length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

MOST_BYTES = 1_200_000
"""A body and a header as large as they may be, and a bit more."""

_LENGTH = 3


def pack(letter: str, parts: Sequence[bytes]) -> bytes:
    """Write an input."""
    *first, last = parts or [b""]
    return letter.encode() + b"".join(len(part).to_bytes(_LENGTH, "little") + part for part in first) + _last(last)


def _last(part: bytes) -> bytes:
    return b"\xff" * _LENGTH + part  # longer than what is there: the rest


def unpack(data: bytes) -> tuple[str, list[bytes]]:
    """Read any bytes as an input."""
    letter, at, parts = chr(data[0]) if data else "", 1, []
    while at + _LENGTH <= len(data):
        end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
        parts.append(data[at + _LENGTH : end])
        at = end
    return letter, parts


Tree = Any  # what MessagePack and JSON are made of
Format = tuple[Callable[[bytes], Tree], Callable[[Tree], bytes]]


def _read_tensors(data: bytes) -> Tree:
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("no safetensors")
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    inner = {key: json.loads(text) for key, text in metadata.items()}  # specs and the like are JSON within JSON
    return {**header, "__metadata__": inner, "": data[8 + size :]}


def _write_tensors(tree: Tree) -> bytes:
    header = dict(tree)
    data = header.pop("", b"")
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        header["__metadata__"] = {key: json.dumps(value) for key, value in metadata.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + (data if isinstance(data, bytes) else b"")


def _write_json(tree: Tree) -> bytes:
    return json.dumps(tree, default=str).encode()


_FORMATS: tuple[Format, ...] = (
    (_read_tensors, _write_tensors),
    (json.loads, _write_json),
    (msgspec.msgpack.decode, msgspec.msgpack.encode),
)


def _nested(depth: int) -> Tree:
    tree: Tree = 0
    for _ in range(depth):
        tree = [tree]
    return tree


_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 255, 256, 2**31, 2**40, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-320, 1e30, 1e308, float("nan"), float("inf"), float("-inf"))
_NAMES = (
    "a",
    "p",
    "q",
    "id1",
    "id2",
    "id3",
    "id9",
    "lite",
    "tiny-qwen3vl",
    "metaworld/reach-v3",
    "own/a",
    "demos",
    "oft",
)
_DTYPES = ("|O", "<f4", "<f8", "|u1", "|b1", "F32", "F64", "I64", "BF16", "BOOL", "float32", "uint8")
_TEXTS = (*_NAMES, *_DTYPES, "", "x" * 65, "x" * 20_000, "../../x", "\0", "\ud7ff", "ü" * 40, "b" * 64, "0" * 64, "{0}")
_LISTS: tuple[Tree, ...] = ([0, 2**31, 2**31], [-1], [-1, -4], [1] * 9, [2**62, 4], [0] * 5000, [1, 0])
_BYTES = (b"", b"\xc1", b"x" * 300, b"\x80", bytes(8))
_OTHERS: tuple[Tree, ...] = (None, True, False, b"", b"\xc1", b"x" * 300, [], {}, [[]], {"": {}})


class Mutator:
    """Makes inputs.

    Args:
        chance: the dice.
        corpus: inputs to start from, by letter; may grow.
    """

    def __init__(self, chance: random.Random, corpus: Mapping[str, list[bytes]]) -> None:
        self._chance = chance
        self._corpus = corpus

    def next(self, letter: str) -> bytes:
        """Make an input for a target."""
        return self.mutate(self._chance.choice(self._corpus[letter]))

    def mutate(self, data: bytes) -> bytes:
        """Make another input out of one, for the same target."""
        letter, parts = unpack(data)
        if letter not in self._corpus:
            letter = self._chance.choice(sorted(self._corpus))
        for _ in range(self._chance.choice((1, 1, 1, 2, 4))):
            if self._chance.random() < 0.15:
                self._change_parts(letter, parts)
            elif parts:
                index = self._chance.randrange(len(parts))
                parts[index] = self._change(letter, parts[index])
        return pack(letter, parts)[:MOST_BYTES]

    def _change_parts(self, letter: str, parts: list[bytes]) -> None:
        """Leave one out, repeat one, exchange two, or take some of another input."""
        chance = self._chance
        what = chance.randrange(5)
        if what == 0 and parts:
            del parts[chance.randrange(len(parts))]
        elif what == 1 and parts:
            again = chance.choice(parts)
            parts.extend([again] * min(chance.choice((1, 1, 2, 30, 1100)), 1 + MOST_BYTES // (len(again) + _LENGTH)))
        elif what == 2 and len(parts) > 1:
            one, other = chance.sample(range(len(parts)), 2)
            parts[one], parts[other] = parts[other], parts[one]
        else:
            _, others = unpack(chance.choice(self._corpus[letter]))
            at = chance.randrange(len(parts) + 1)
            parts[at:at] = others if what == 3 else others[:1]

    def _change(self, letter: str, part: bytes) -> bytes:
        if self._chance.random() < 0.7:
            for read, write in _FORMATS:
                try:
                    tree = read(part)
                except (ValueError, RecursionError, AttributeError, TypeError):
                    continue
                if not isinstance(tree, dict | list):
                    continue  # chance bytes
                try:
                    return write(self._change_tree(tree, letter))[:MOST_BYTES]
                except (ValueError, TypeError, RecursionError, OverflowError):
                    return part
        return self._change_bytes(part)

    def _change_bytes(self, part: bytes) -> bytes:
        chance, changed = self._chance, bytearray(part)
        at = chance.randrange(len(part) + 1)
        what = chance.randrange(6)
        if what == 0:
            del changed[at : at + chance.choice((1, 2, 4, 8, len(part)))]
        elif what == 1:
            changed[at:at] = chance.randbytes(chance.choice((1, 2, 8)))
        elif what == 2 and at < len(part):
            changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif what == 3 and at < len(part):
            changed[at] ^= 1 << chance.randrange(8)
        elif what == 4:
            changed[at : at + 8] = chance.choice(_NUMBERS).to_bytes(9, "little", signed=True)[:8]
        else:
            changed[at:at] = changed[at : at + 64] * chance.choice((1, 2, 100, 8000))
        return bytes(changed)

    def _change_tree(self, tree: Tree, letter: str) -> Tree:
        """Change one value anywhere in a tree."""
        chance, holder = self._chance, tree
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                return self._value(letter)
            key = chance.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and chance.random() < 0.85:
                holder = inner
                continue
            break
        what = chance.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder[key:key] = [inner] * chance.choice((1, 9, 100) if isinstance(inner, dict | list) else (1, 9, 40_000))
        elif what == 2:
            holder[key] = chance.choice(([inner], {"a": inner}, [inner] * 3))
        elif what == 3:
            holder[key] = holder[chance.choice(keys)]
        elif what == 4 and isinstance(inner, int | float):
            holder[key] = inner + chance.choice((-1, 1, -0.5, 2**32))
        else:
            holder[key] = self._like(inner) if chance.random() < 0.7 else self._value(letter)
        return tree

    def _like(self, value: Tree) -> Tree:
        """Return another value of the same type, which a typed decoder lets through."""
        if isinstance(value, bool):
            return not value
        for kind, values in ((int, _NUMBERS), (float, _FLOATS), (str, _TEXTS), (bytes, _BYTES)):
            if isinstance(value, kind):
                return self._chance.choice(values)
        return type(value)() if isinstance(value, dict | list) else value

    def _value(self, letter: str) -> Tree:
        chance = self._chance
        kind = chance.randrange(12)
        if kind < 3:
            return chance.choice(_NUMBERS)
        if kind < 5:
            return chance.choice(_FLOATS)
        if kind < 8:
            return chance.choice(_TEXTS)
        if kind < 9:
            return chance.choice(_LISTS)
        if kind < 10:
            return _nested(chance.choice((3, 40, 900, 3000)))
        if kind < 11:
            return self._from_another(letter)
        return chance.choice(_OTHERS)

    def _from_another(self, letter: str) -> Tree:
        """Return a value out of another input."""
        _, parts = unpack(self._chance.choice(self._corpus[letter]))
        for part in parts:
            try:
                tree = msgspec.msgpack.decode(part)
            except (ValueError, RecursionError):
                continue
            while isinstance(tree, dict | list) and tree and self._chance.random() < 0.7:
                tree = self._chance.choice(list(tree.values()) if isinstance(tree, dict) else tree)
            return tree
        return None
