"""Weights on disk: converted once, memory-mapped by every process of the host.

In: source files of a backbone and a function that converts them. Out: a path under the cache directory that is
complete or not there at all, and the digest of the sources. Never: a half-written file under its final name, or a
folder that lacks what its builder should have left there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import blake3


def files_digest(files: Sequence[Path], cache_dir: Path) -> str:
    """Hash names and contents of files, 32 hex digits.

    Hashing some GB takes seconds, so the result is remembered under the files' paths, sizes and modification times.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]
    identity = blake3.blake3(repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats]).encode()).hexdigest()
    remembered = cache_dir / "digests" / identity
    if remembered.is_file():
        text = remembered.read_text()
        if len(text) == 32:
            return text
    hasher = blake3.blake3()
    for file in files:
        content = blake3.blake3()
        content.update_mmap(file)
        hasher.update(f"{file.name}\0{content.hexdigest()}\n".encode())
    digest = hasher.hexdigest()[:32]
    build_once(remembered, lambda target: _write_text(target, digest))
    return digest


CHECKPOINT = ("config.json", "*.safetensors")
"""What a folder that transformers has written must hold."""


def build_once(target: Path, build: Callable[[Path], None], *, holds: Sequence[str] = ()) -> Path:
    """Make `target` (a file or a directory) with `build(path)` unless it is there.

    Several processes may race: each builds beside the target and renames; the first rename wins.

    Args:
        target: what is to be there.
        build: makes it at the path that it is given.
        holds: patterns of files that a directory must have. One that lacks any is not taken for built: a library that
            saves nothing in a process that it takes for a helper of another one raises no error.

    Raises:
        FileNotFoundError: if `build` left less than that.
    """
    if target.exists() and not _lacks(target, holds):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        built = workplace / target.name
        build(built)
        if missing := _lacks(built, holds):
            raise FileNotFoundError(f"{target.name} was built without {missing}: nothing of it is kept")
        if built.is_file():
            built.chmod(0o644)  # other users of the host may share the cache
        if target.exists() and _lacks(target, holds):  # left by who did not look at it
            with suppress(OSError):  # another process is mending it too
                target.rename(workplace / "incomplete")
        try:
            os.replace(built, target)
        except OSError:
            if not target.exists():  # a directory that another process finished first may not be replaced
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def _lacks(built: Path, holds: Sequence[str]) -> str:
    """Return the first pattern of files that a directory has none of."""
    return next((pattern for pattern in holds if not any(built.glob(pattern))), "")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def text_digest(text: str) -> str:
    """Hash a string, 32 hex digits."""
    return blake3.blake3(text.encode()).hexdigest()[:32]
