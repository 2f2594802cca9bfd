"""The pages of promises and of security name tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "promises.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
_NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_CASE = re.compile(r"^\| (\d+) \|.*$", re.MULTILINE)


@functools.cache
def functions_of(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", [PAGE, SECURITY], ids=["promises", "security"])
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = _NAMED.findall(page)
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / "tests" / file)]
    assert not missing, f"the page names tests that are not there: {missing}"


@pytest.mark.parametrize("page", [PAGE, SECURITY], ids=["promises", "security"])
def test_no_claim_names_a_test_twice(page: str) -> None:
    for claim in re.split(r"^(?=\*\*|## )", page, flags=re.MULTILINE):
        lines = re.findall(r"^- `.*$", claim, re.MULTILINE)
        assert len(lines) == len(set(lines)), claim.splitlines()[0]


def test_every_claim_of_security_has_a_test() -> None:
    claims = re.split(r"^(?=\*\*|## )", SECURITY.partition("## Doors")[2], flags=re.MULTILINE)
    bold = [claim for claim in claims if claim.startswith("**")]
    assert len(bold) > 20
    bare = [claim.splitlines()[0] for claim in bold if not _NAMED.search(claim)]
    assert not bare, f"docs/security.md claims what no test holds: {bare}"


def test_every_promise_and_every_case_has_a_test() -> None:
    promises = re.split(r"^(?=\*\*)", PAGE.partition("\n## Cases of fault")[0], flags=re.MULTILINE)[1:]
    cases = [found[0] for found in _CASE.finditer(PAGE)]
    assert promises
    assert cases
    bare = [text.splitlines()[0] for text in (*promises, *cases) if not _NAMED.search(text)]
    assert not bare, f"docs/promises.md promises what no test holds: {bare}"


def test_every_case_of_the_harness_is_on_the_page() -> None:
    """Its tests stand in the row of the number that they are marked with."""
    rows = {int(found[1]): found[0] for found in _CASE.finditer(PAGE)}
    assert len(rows) >= 35
    assert list(rows) == list(range(1, len(rows) + 1))
    for path in (ROOT / "tests" / "chaos").glob("test_*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for number in _numbers(function):
                    assert f"`chaos/{path.name}::{function.name}`" in rows.get(number, ""), (number, function.name)


def _numbers(function: ast.FunctionDef) -> list[int]:
    marks = [node for node in function.decorator_list if isinstance(node, ast.Call)]
    return [
        int(mark.args[0].value)
        for mark in marks
        if ast.unparse(mark.func) == "pytest.mark.case" and isinstance(mark.args[0], ast.Constant)
    ]
