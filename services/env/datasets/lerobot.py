"""Read a LeRobot data set (v2.0, v2.1, v3.0) and say what is wrong with it.

In: a folder. Out: a `Scan`, or `DatasetError` with every fault that was found. Never: a decoded video (frames are
counted without decoding), a change to the folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from joynexus.contract import Camera, Contract
from services.env.datasets import lerobot_v2, lerobot_v3
from services.env.datasets.folder import DatasetFolder
from services.env.datasets.layout import CameraSource, EpisodeSource, Layout, VideoSpan, read_info
from services.env.datasets.pictures import Picture, VideoIndex, decode_column, decode_video, index_video
from services.env.datasets.report import Findings
from services.env.datasets.scan import Scan, make_scan
from services.env.datasets.tables import EpisodeRows, iterate_rows

CONTRACT_FILE = "meta/joynexus_contract.json"  # our own writer's: what LeRobot's metadata cannot say
_REMARKS = frozenset({"valid", "invalid", "success", "failure", "good", "bad", ""})


def scan_lerobot(folder: DatasetFolder, alive: Callable[[], None]) -> Scan:
    """Read a set, all but the pixels of its videos; see `check.scan_dataset`."""
    findings = folder.findings
    info = read_info(folder)
    reader = lerobot_v3 if info.version == "v3.0" else lerobot_v2
    layout = reader.read_layout(folder, info)
    videos: dict[str, VideoIndex] = {}
    rows, instructions, frames = [], [], []
    for episode, numbers in iterate_rows(folder, layout):
        alive()
        if numbers is None:
            continue
        rows.append(numbers)
        instructions.append(_instruction(episode, numbers, layout, findings))
        frames.append(_frames(folder, layout, episode, len(numbers.state), videos))
    findings.stop_if_failed()
    steps = sum(len(numbers.state) for numbers in rows)
    declared = info.raw.get("total_frames")
    if declared is not None and declared != steps:
        findings.warn("meta/info.json", f"total_frames says {declared!r} but there are {steps}: the files count")
    _check_constants(layout, rows, findings)
    contract = _contract(folder, layout, rows, _camera_sizes(folder, layout, rows, videos))
    findings.stop_if_failed()
    read = tuple(rows)

    def pictures(number: int, camera: Camera) -> Iterator[Picture]:
        source = next(source for source in layout.cameras if source.name == camera.name)
        episode, size = layout.episodes[number], (camera.height, camera.width)
        if source.video:
            return decode_video(folder, episode.videos[source.key].file, frames[number][source.key], size)
        steps = read[number]
        return decode_column(folder, episode.table, source.key, steps.first_row, len(steps.state), size)

    return make_scan(folder, layout.source_format, layout.fps, contract, read, tuple(instructions), pictures)


def _instruction(episode: EpisodeSource, rows: EpisodeRows, layout: Layout, findings: Findings) -> str:
    """Choose the episode's task text: the one its steps point to, else the first declared one that is no remark."""
    where = f"episode {episode.number}"
    pointed = Counter(rows.task_index.tolist()).most_common() if rows.task_index is not None else []
    if len(pointed) > 1:
        findings.warn_often(where, "its steps have several tasks: the most frequent one is the instruction")
    elif len(episode.tasks) > 1:
        findings.warn_often(where, "several tasks are listed: the one that the steps' task_index names is taken")
    for index, _ in pointed:
        text = layout.tasks.get(index, "")
        if text.lower() not in _REMARKS:
            return text
    for text in episode.tasks:
        if text.lower() not in _REMARKS:
            if pointed:
                findings.warn_often(where, "its task_index names no task: the first listed task is taken")
            return text
    findings.error(where, "has no task text: add it to the tasks and point task_index to it")
    return ""


def _frames(
    folder: DatasetFolder, layout: Layout, episode: EpisodeSource, steps: int, videos: dict[str, VideoIndex]
) -> dict[str, npt.NDArray[np.float64]]:
    """Find the frames that belong to the episode's steps; notes every count that does not fit."""
    findings, where = folder.findings, f"episode {episode.number}"
    found = {}
    for camera in layout.cameras:
        if not camera.video or camera.key not in episode.videos:
            continue
        span = episode.videos[camera.key]
        if span.file not in videos:
            videos[span.file] = index_video(folder, span.file)
            rate = videos[span.file].fps
            if abs(rate - layout.fps) > 0.01 * layout.fps:
                findings.warn_often(
                    span.file, f"plays at {rate:g} frames per second but fps is {layout.fps:g}: frames are counted"
                )
        times = _span_times(videos[span.file], span, steps, layout.fps)
        if times is None or len(times) != steps:
            count = "fewer" if times is None else str(len(times))
            findings.error(where, f"has {steps} steps but {count} frames in {span.file}: record or cut it again")
            continue
        found[camera.key] = times
    if episode.length != steps:
        if layout.shared_files or not found:
            findings.error(where, f"has {steps} rows but its listed length is {episode.length}: write the set again")
        else:
            findings.warn(
                where, f"has {steps} rows and frames but its listed length is {episode.length}: {steps} count"
            )
    return found


def _span_times(video: VideoIndex, span: VideoSpan, steps: int, fps: float) -> npt.NDArray[np.float64] | None:
    """Return the times of an episode's frames; None if a shared file lacks some of them where they should be."""
    if span.start_s is None:
        return video.times
    first = int(np.searchsorted(video.times, span.start_s - 0.5 / fps))
    times = video.times[first : first + steps]
    if len(times) < steps or np.abs(times - span.start_s - np.arange(steps) / fps).max() > 0.5 / fps:
        return None
    return times


def _check_constants(layout: Layout, rows: list[EpisodeRows], findings: Findings) -> None:
    low = np.min([numbers.action.min(0) for numbers in rows], axis=0)
    high = np.max([numbers.action.max(0) for numbers in rows], axis=0)
    constant = int((low == high).sum())
    if constant:
        findings.warn(
            layout.action.column,
            f"{constant} of {layout.action.dim} action numbers never change: nothing can be learned about them",
        )


def _camera_sizes(
    folder: DatasetFolder, layout: Layout, rows: list[EpisodeRows], videos: dict[str, VideoIndex]
) -> tuple[Camera, ...]:
    cameras = []
    for camera in layout.cameras:
        sizes = _sizes(folder, layout, camera, rows, videos)
        if len(set(sizes.values())) > 1:
            (one, first), (other, second), *_ = {size: name for name, size in sizes.items()}.items()
            folder.findings.error(second, f"has pictures of {other} where {first} has {one}: one camera has one size")
        height, width = next(iter(sizes.values()))
        if camera.shape and not {height, width} <= set(camera.shape):
            folder.findings.warn(
                "meta/info.json", f"camera '{camera.key}' says {list(camera.shape)} but has {height}x{width} pixels"
            )
        cameras.append(Camera(name=camera.name, height=height, width=width))
    return tuple(cameras)


def _sizes(
    folder: DatasetFolder, layout: Layout, camera: CameraSource, rows: list[EpisodeRows], videos: dict[str, VideoIndex]
) -> dict[str, tuple[int, int]]:
    """Return (height, width) by file: of every video, or of the first picture of an image column."""
    if not camera.video:
        table = layout.episodes[0].table
        picture = next(decode_column(folder, table, camera.key, rows[0].first_row, 1, None))
        return {table: (picture.shape[0], picture.shape[1])}
    files = {episode.videos[camera.key].file for episode in layout.episodes}
    return {name: (videos[name].height, videos[name].width) for name in sorted(files)}


def _contract(folder: DatasetFolder, layout: Layout, rows: list[EpisodeRows], cameras: tuple[Camera, ...]) -> Contract:
    """Return the contract that the set brings along, checked against the files; else what its metadata tells."""
    if not folder.has(CONTRACT_FILE):
        return Contract(
            robot=layout.robot,
            cameras=cameras,
            state_dim=layout.state.dim,
            action_dim=layout.action.dim,
            state_names=layout.state.names,
            action_names=layout.action.names,
            rate_hz=layout.fps,
        )
    try:
        contract = msgspec.convert(folder.json(CONTRACT_FILE), Contract)
    except msgspec.ValidationError as error:
        raise folder.findings.fail(CONTRACT_FILE, f"is no embodiment contract ({error}): write it again") from error
    absent = sorted({camera.name for camera in contract.cameras} - {camera.name for camera in cameras})
    if absent:
        raise folder.findings.fail(
            f"camera '{absent[0]}'", f"its videos are missing: copy them, or take it out of {CONTRACT_FILE}"
        )
    plain = tuple((camera.name, camera.height, camera.width) for camera in contract.cameras)
    for field, stated, actual in (
        ("state_dim", contract.state_dim, layout.state.dim),
        ("action_dim", contract.action_dim, layout.action.dim),
        ("cameras", sorted(plain), sorted((camera.name, camera.height, camera.width) for camera in cameras)),
    ):
        if stated != actual:
            folder.findings.error(CONTRACT_FILE, f"states {field} {stated} but the data has {actual}: write it again")
    return contract
