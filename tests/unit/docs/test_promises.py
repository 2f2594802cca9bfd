"""The page of promises names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "promises.md").read_text()
_NAMED = re.compile(r"^- `([\w/]+\.py)::(test_\w+)`$", re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = _NAMED.findall(PAGE)
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / "tests" / file)]
    assert not missing, f"docs/promises.md names tests that are not there: {missing}"


def test_every_promise_has_a_test() -> None:
    promises = re.split(r"^(?=\*\*)", PAGE, flags=re.MULTILINE)[1:]
    assert promises
    bare = [promise.splitlines()[0] for promise in promises if not _NAMED.search(promise)]
    assert not bare, f"docs/promises.md promises what no test holds: {bare}"


def test_every_line_of_a_list_names_a_test() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("-")]
    assert len(lines) == len(_NAMED.findall(PAGE))
