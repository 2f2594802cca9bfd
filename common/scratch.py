"""A role's scratch folder: files on their way somewhere else.

In: a folder of this role's own, which several processes of the role may share. Out: the same folder, made and rid of
what killed processes left there. Never: a file that somebody may still be writing (only what lay there for a day goes).
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

_LEFT_S = 86_400.0


def open_scratch(folder: Path) -> Path:
    """Make a scratch folder if it is missing, remove files and folders in it that are older than a day, return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        with suppress(FileNotFoundError):  # another process was faster
            if left.lstat().st_mtime >= time.time() - _LEFT_S:
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
    return folder
