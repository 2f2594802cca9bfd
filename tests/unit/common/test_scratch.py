"""Promises of scratch folders: what killed processes left goes after a day, what is being written stays."""

import os
from pathlib import Path

from common.scratch import open_scratch


def test_files_and_folders_go_after_a_day_and_young_ones_stay(tmp_path: Path) -> None:
    folder = open_scratch(tmp_path / "a" / "scratch")
    for name in ("old-folder", "young-folder"):
        (folder / name).mkdir()
        (folder / name / "half").write_bytes(b"half a file")
    for name in ("old-file", "young-file"):
        (folder / name).write_bytes(b"half a file")
    outside = tmp_path / "outside"
    outside.write_bytes(b"whole")
    (folder / "old-link").symlink_to(outside)
    for name in ("old-folder", "old-file", "old-link"):
        os.utime(folder / name, (0, 0), follow_symlinks=False)
    assert open_scratch(folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["young-file", "young-folder"]
    assert outside.exists()
