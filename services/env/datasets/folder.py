"""A data set's folder, read as untrusted input.

In: the folder's path. Out: the files in it, JSON documents within size limits, and paths that a template gives. Never:
a file outside the folder (through `..`, an absolute path or a symbolic link), `str.format` on a template that somebody
sent, or an unbounded read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3

from services.env.datasets.report import Findings

MAX_FILES = 500_000
MAX_JSON_BYTES = 16 << 20
MAX_LINES_BYTES = 512 << 20
_FIELD = re.compile(r"\{([a-z_]+)(?::0?([0-9])d)?\}")


class DatasetFolder:
    """The regular files of a data set, by their POSIX paths relative to the folder.

    Args:
        root: the folder.
        findings: where faults are noted.

    Raises:
        DatasetError: if there is no such folder, it holds too many files, or a file leads out of it.
    """

    def __init__(self, root: Path, findings: Findings) -> None:
        if not root.is_dir():
            raise findings.fail(root.name, "there is no such folder: give the folder that contains 'meta' and 'data'")
        self.root = root.resolve()
        self.findings = findings
        self.files: list[str] = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if not name.startswith("."):
                    self.files.append(path.relative_to(self.root).as_posix())
            links = [name for name in subfolders + names if Path(folder, name).is_symlink()]
            for name in links:
                path = Path(folder, name)
                if not path.resolve().is_relative_to(self.root):
                    where = path.relative_to(self.root).as_posix()
                    raise findings.fail(
                        where, "is a symbolic link that leads out of the data set: copy the file itself"
                    )
            if len(self.files) > MAX_FILES:
                raise findings.fail(root.name, f"has more than {MAX_FILES} files: split it into several data sets")
        self._known = set(self.files)

    def has(self, name: str) -> bool:
        """Return whether the set has this regular file."""
        return name in self._known

    def path(self, name: str) -> Path:
        """Return the place of a file that the set has; DatasetError if it has not."""
        if name not in self._known:
            raise self.findings.fail(name, "is missing: the data set is incomplete, copy it again")
        return self.root / name

    def json(self, name: str) -> dict[str, Any]:
        """Read a JSON object; DatasetError if it is missing, too large or no object."""
        try:
            value = json.loads(self._text(name, MAX_JSON_BYTES))
        except (json.JSONDecodeError, RecursionError) as error:
            raise self.findings.fail(name, f"is not valid JSON ({error}): write it again") from error
        if not isinstance(value, dict):
            raise self.findings.fail(name, "is not a JSON object: write it again")
        return value

    def json_lines(self, name: str) -> list[dict[str, Any]]:
        """Read one JSON object a line; DatasetError if the file is missing or a line is none."""
        rows = []
        for number, line in enumerate(self._text(name, MAX_LINES_BYTES).splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise self.findings.fail(name, f"line {number} is not valid JSON ({error}): write it again") from error
            if not isinstance(row, dict):
                raise self.findings.fail(name, f"line {number} is not a JSON object: write it again")
            rows.append(row)
        return rows

    def _text(self, name: str, limit: int) -> str:
        path = self.path(name)
        if path.stat().st_size > limit:
            raise self.findings.fail(name, f"is larger than {limit >> 20} MiB, more than such a file can need")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise self.findings.fail(name, "is not UTF-8 text: write it again") from error

    def digest(self, alive: Callable[[], None] = lambda: None) -> str:
        """Return a hash (32 hex digits) of all files' names and contents; `alive` is called with each file."""
        total = blake3.blake3()
        for name in self.files:
            alive()
            content = blake3.blake3().update_mmap(self.root / name).digest()
            total.update(len(name.encode()).to_bytes(4, "little") + name.encode() + content)
        return total.hexdigest()[:32]


def fill_template(template: str, values: dict[str, int | str]) -> str | None:
    """Fill a path template such as `data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet`.

    Only plain fields and widths of at most nine digits are understood: the template comes from outside.

    Returns:
        The path, or None if the template names an unknown field or leaves the folder.
    """
    unknown = False

    def fill(match: re.Match[str]) -> str:
        nonlocal unknown
        value = values.get(match[1])
        if value is None:
            unknown = True
            return ""
        return str(value).zfill(int(match[2])) if match[2] else str(value)

    path = _FIELD.sub(fill, template)
    if unknown or "{" in path or path.startswith("/") or ".." in path.split("/"):
        return None
    return path
