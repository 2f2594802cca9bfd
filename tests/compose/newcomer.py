"""Somebody on the host who has the client, a key and the README, and nothing else.

In: the folder that the operator gave away, a data set. Out: what the README's example printed and left. Never: the
checkout, its virtual environment, or a package that `pip install .` does not bring.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from services.env.producers.demos import write_demonstrations
from tests.compose.engine import ROOT

DATASET = Path("runs/demo/datasets/press")
"""Where the README's example has it, and `make demo` leaves it."""
TASK = "metaworld/button-press-topdown-v3"

PRELUDE = """
import numpy as np
rng = np.random.default_rng(0)
picture = rng.integers(0, 256, {picture}, dtype=np.uint8)
state = rng.normal(size={state}).astype(np.float32)
"""
EPILOGUE = """
import importlib.util
assert importlib.util.find_spec("torch") is None, "the client brings no torch"
print("chunk", chunk.actions.shape, "of version", chunk.version)
"""


def example() -> str:
    """Return the README's first example."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]


def data_set() -> Path:
    """Return the demonstrations that the demo records, recorded anew if there are none."""
    folder = ROOT / DATASET
    if not (folder / "meta" / "info.json").exists():
        write_demonstrations(folder, TASK, 20, processes=2)
    return folder


class Newcomer:
    """The client in a virtual environment of its own, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = folder / "venv" / "bin" / "python"

    def install(self) -> None:
        """Install the client as the README says, from a copy of what a wheel is made of."""
        source = self._folder / "checkout"
        source.mkdir(parents=True)
        shutil.copytree(ROOT / "joynexus", source / "joynexus", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        _run([sys.executable, "-m", "venv", str(self._python.parents[1])], self._folder, {})
        _run([str(self._python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "."], source, {})

    def run_example(self, config: Path) -> str:
        """Run the README's example; return what it printed."""
        shutil.copytree(data_set(), self._folder / DATASET)
        shapes = json.loads((self._folder / DATASET / "meta" / "info.json").read_text())["features"]
        prelude = PRELUDE.format(
            picture=tuple(shapes["observation.images.corner2"]["shape"]), state=shapes["observation.state"]["shape"][0]
        )
        script = self._folder / "example.py"
        script.write_text(prelude + example() + EPILOGUE)
        printed = _run([str(self._python), script.name], self._folder, {"JOYNEXUS_CONFIG": str(config)})
        assert (self._folder / "press-policy" / "config.json").exists()
        return printed


def _run(command: list[str], folder: Path, more: dict[str, str]) -> str:
    hidden = ("JOYNEXUS_", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{Path(command[0]).name} {' '.join(command[1:])}: {(ran.stdout + ran.stderr)[-2000:]}"
    return ran.stdout
