"""One HDF5 file, read as untrusted input.

In: a file of a data set, paths within it. Out: names, attributes, and arrays of plain numbers within size limits.
Never: anything that leads out of the file (soft and external links, external storage, virtual data sets), an object or
reference type, or a whole array of pictures in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from services.env.datasets.folder import DatasetFolder
from services.env.datasets.report import DatasetError

MAX_ARRAY_BYTES = 4 << 30  # of one array of vectors
MAX_CHUNK_BYTES = 256 << 20  # what HDF5 unpacks at once
_MAX_MEMBERS = 200_000
_PART_BYTES = 16 << 20
_MAX_TEXT = 16 << 20


class ArrayInfo(NamedTuple):
    """Shape and type of an array that can be read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Hdf5File:
    """A file of the set.

    Args:
        folder: the data set.
        name: the file.
    """

    def __init__(self, folder: DatasetFolder, name: str) -> None:
        self.name, self.findings = name, folder.findings
        self._path = folder.path(name)

    def groups(self, path: str) -> list[str]:
        """Return the names of the groups in a group; DatasetError if there is no such group."""
        with self._open() as file:
            group = self._group(file, path)
            if len(group) > _MAX_MEMBERS:
                raise self.findings.fail(self.name, f"'{path}' has more than {_MAX_MEMBERS} members: use several files")
            return [name for name in group if isinstance(self._member(group, name), h5py.Group)]

    def arrays(self, path: str) -> dict[str, ArrayInfo]:
        """Return the arrays of numbers in a group, by name; empty if there is no such group."""
        with self._open() as file:
            try:
                group = self._group(file, path)
            except KeyError:
                return {}
            found = {}
            for name in group:
                member = self._member(group, name)
                if isinstance(member, h5py.Dataset) and member.dtype.kind in "biuf" and member.shape:
                    self._check(member, f"{path}/{name}")
                    found[name] = ArrayInfo(member.shape, member.dtype)
            return found

    def text(self, path: str, attribute: str) -> str:
        """Return an attribute that is text; empty if there is none."""
        with self._open() as file:
            value = self._group(file, path).attrs.get(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return value if isinstance(value, str) and len(value) <= _MAX_TEXT else ""

    def number(self, path: str, attribute: str) -> int | None:
        """Return an attribute that is one whole number, or None."""
        with self._open() as file:
            value = self._group(file, path).attrs.get(attribute)
        return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None

    def json(self, path: str, attribute: str) -> dict[str, Any]:
        """Return an attribute that is a JSON object; empty if there is none; DatasetError if it is something else."""
        text = self.text(path, attribute)
        try:
            value = json.loads(text) if text else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise self.findings.fail(self.name, f"attribute '{attribute}' of '{path}' is no JSON ({error})") from error
        return value if isinstance(value, dict) else {}

    def read(self, path: str, name: str) -> npt.NDArray[Any]:
        """Return a whole array that `arrays` listed; DatasetError if it is too large."""
        with self._open() as file:
            member = self._group(file, path)[name]
            if math.prod(member.shape) * member.dtype.itemsize > MAX_ARRAY_BYTES:
                raise self.findings.fail(
                    f"{self.name}, {path}", f"'{name}' has {member.shape} numbers, too many to read"
                )
            values: npt.NDArray[Any] = member[()]
        return values

    def read_parts(self, path: str, name: str, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Give the rows of an array before `stop`, as many at a time as are some megabytes."""
        with self._open() as file:
            member = self._group(file, path)[name]
            rows = max(1, _PART_BYTES // max(1, math.prod(member.shape[1:]) * member.dtype.itemsize))
            for start in range(0, stop, rows):
                yield member[start : min(start + rows, stop)]

    @contextmanager
    def _open(self) -> Iterator[h5py.File]:
        try:
            with h5py.File(self._path, "r", locking=False) as file:
                yield file
        except DatasetError:
            raise
        except KeyError as error:
            raise self.findings.fail(self.name, f"lacks {error.args[0]}: it is no set of demonstrations") from error
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise self.findings.fail(self.name, "is truncated or no HDF5 file: copy it again") from error

    def _group(self, file: h5py.File, path: str) -> h5py.Group:
        """Follow a path by hard links only; KeyError if it leads to no group."""
        group: h5py.Group = file
        for part in path.split("/"):
            member = self._member(group, part)
            if not isinstance(member, h5py.Group):
                raise KeyError(f"group '{path}'")
            group = member
        return group

    def _member(self, group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset | None:
        link = group.get(name, getlink=True)
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise self.findings.fail(
                self.name, f"'{group.name}/{name[:80]}' is a link to another place: copy what it names instead"
            )
        return group[name]

    def _check(self, member: h5py.Dataset, path: str) -> None:
        if member.external or member.is_virtual:
            raise self.findings.fail(
                self.name, f"'{path[:80]}' keeps its numbers in another file: copy them into this one"
            )
        if member.chunks and math.prod(member.chunks) * member.dtype.itemsize > MAX_CHUNK_BYTES:
            raise self.findings.fail(
                self.name, f"'{path[:80]}' is packed in parts of {member.chunks}: use smaller chunks"
            )
