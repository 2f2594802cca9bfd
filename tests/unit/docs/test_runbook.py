"""The runbook has a section for each event that the services log at warning or above, and for nothing else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from common.settings import ALL_SETTINGS
from joynexus.cli._main import commands as command_line

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "runbook.md").read_text()
LOUD = {"warning", "error", "critical", "exception"}
AT_TENANTS = ("joynexus/client/", "joynexus/cli/", "joynexus/simulation/serve.py", "joynexus/simulation/own.py")
"""What runs on tenants' machines, where no operator reads."""
COMMANDS: Any = typer.main.get_command(command_line)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the program, file by file."""
    files = [path for top in ("common", "services", "joynexus") for path in sorted((ROOT / top).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def events() -> dict[str, str]:
    """Return where each event is logged, with '…' for what differs from time to time."""
    found: dict[str, str] = {}
    for place, tree in trees().items():
        if not place.startswith(AT_TENANTS):
            for event in _of(tree):
                found[re.sub(r"%[sdr]", "…", event)] = place
    return found


def _of(tree: ast.Module) -> Iterator[str]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        words = [part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        named = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
        match call.func:
            case ast.Attribute(attr=level, value=logger) if level in LOUD and _is_logger(logger):
                yield from words[:1]
            case ast.Attribute(attr="log") if len(words) > 1 and words[0] in LOUD:  # a core's
                yield words[1]
            case ast.Name(id="Said") if words[0] in LOUD:
                yield words[1]
            case ast.Name(id="Log") if named.get("level") in LOUD:
                yield named["event"]
            case ast.Name(id="Refusals") if words:
                yield words[0]
            case ast.Name(id="log_op") if any(word.arg == "level" for word in call.keywords):
                yield "op"


def _is_logger(value: ast.expr) -> bool:
    return ast.unparse(value) == "log" or ast.unparse(value).startswith("logging.getLogger(")


def sections() -> dict[str, str]:
    """Return the events of each section, by title."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def listed(section: str) -> list[str]:
    """Return the events that a section is about: its first lines, `event` by `event`."""
    line = re.search(r"^Events: (.*?)\n\n", section, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", line[1].replace("\n", " ")) if line else []


def test_each_event_has_one_section_and_each_section_an_event_that_is_logged() -> None:
    logged = events()
    assert len(logged) > 30
    named = [event for section in sections().values() for event in listed(section)]
    assert len(named) == len(set(named))
    missing = {event: place for event, place in logged.items() if event not in named}
    assert not missing, f"docs/runbook.md has no section for {missing}"
    assert not set(named) - logged.keys(), f"nobody logs {set(named) - logged.keys()}"


def test_each_section_says_what_it_means_and_what_to_do() -> None:
    for title, section in sections().items():
        if listed(section):
            for heading in ("Means", "Affected", "By itself", "Look", "Do"):
                assert f"**{heading}.**" in section, f"'{title}' does not say: {heading}"


def test_the_table_of_exit_codes_has_those_of_the_code() -> None:
    codes = {
        node.value.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("EXIT_")
        if isinstance(node.value, ast.Constant)
    }
    assert codes
    table = sections()["A role ends, or does not start"]
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}


@pytest.mark.parametrize("name", ["runbook", "security"])
def test_commands_and_settings_that_the_page_names_exist(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    commands = re.findall(r"`joynexus ([^`]+)`", page)
    assert commands
    for line in commands:
        command = COMMANDS
        for word in line.split():
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, f"joynexus {line}"
            command = command.commands[word]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", line)) <= options, f"joynexus {line}"
    known = {f"JOYNEXUS_{field.upper()}" for kind in ALL_SETTINGS for field in kind.model_fields}
    known |= set(re.findall(r"\$\{(JOYNEXUS_[A-Z_]+)", (ROOT / "docker-compose.yml").read_text()))
    assert set(re.findall(r"JOYNEXUS_[A-Z_]+", page)) <= known | {"JOYNEXUS_GYMNASIUM_MODULES", "JOYNEXUS_FAILPOINTS"}
