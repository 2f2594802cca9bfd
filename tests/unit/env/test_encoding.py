"""Promises of videos where they cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("av")

# In a process of its own: FFmpeg ends it where it is handled wrongly. A limit of a file's size stands for a full disk.
SCRIPT = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from services.env.encoding import write_video

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
random = np.random.default_rng(0)
pictures = [random.integers(0, 255, (64, 64, 3), np.uint8) for _ in range(int(sys.argv[3]))]
try:
    write_video(Path(sys.argv[1]), pictures, 20.0)
except OSError as error:
    print("told:", error.strerror)
"""


@pytest.mark.parametrize(("room", "pictures"), [(0, 60), (0, 3), (20_000, 60)])
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, room: int, pictures: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "video.mp4"), str(room), str(pictures)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "told: File too large\n"), run.stderr
