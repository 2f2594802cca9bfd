"""What a LeRobot data set claims to be: its features, episodes and files, whatever the format's version.

In: the `meta` files of a LeRobot v2.0, v2.1 or v3.0 folder. Out: one `Layout` that names, for each episode, the table
with its rows and the video with its frames. Never: the contents of tables of steps or of videos.

Formats: v2.x has one parquet and one MP4 an episode, named in JSON lines; v3.0 puts many episodes into one file and
lists their places in parquet (https://github.com/huggingface/lerobot, docs/source/lerobot-dataset-v3.mdx).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from services.env.datasets.folder import DatasetFolder
from services.env.datasets.report import Findings

STATE_KEYS = ("observation.state", "state", "observation/state")
ACTION_KEYS = ("action", "actions")
CAMERA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Vector(NamedTuple):
    """The column of a state or an action: its name, length, element names (or none) and declared type."""

    column: str
    dim: int
    names: tuple[str, ...]
    dtype: str


class CameraSource(NamedTuple):
    """A camera: its feature key, its short name, whether its pictures are video, and its declared shape."""

    key: str
    name: str
    video: bool
    shape: tuple[int, ...]


class VideoSpan(NamedTuple):
    """Where an episode's frames are: a file, and seconds into it (None: the file holds this episode alone)."""

    file: str
    start_s: float | None


class EpisodeSource(NamedTuple):
    """One episode as the meta files describe it.

    Attributes:
        number: its number.
        length: steps, as declared.
        tasks: task texts, as declared; there may be several, some of them remarks such as "valid".
        table: parquet file with its rows.
        videos: span of each video camera, by feature key; a camera without a file is missing.
    """

    number: int
    length: int
    tasks: tuple[str, ...]
    table: str
    videos: dict[str, VideoSpan]


class Layout(NamedTuple):
    """A whole data set as its meta files describe it; `shared_files` if files hold several episodes (v3.0)."""

    source_format: str
    shared_files: bool
    robot: str
    fps: float
    state: Vector
    action: Vector
    cameras: tuple[CameraSource, ...]
    tasks: dict[int, str]
    episodes: tuple[EpisodeSource, ...]


class Info(NamedTuple):
    """`meta/info.json`, checked."""

    raw: dict[str, Any]
    version: str
    robot: str
    fps: float
    state: Vector
    action: Vector
    cameras: tuple[CameraSource, ...]

    def template(self, field: str) -> str:
        """Return a path template, empty if there is none."""
        value = self.raw.get(field)
        return value if isinstance(value, str) else ""


def read_info(folder: DatasetFolder) -> Info:
    """Read and check `meta/info.json`; DatasetError if the set cannot be understood."""
    findings, where = folder.findings, "meta/info.json"
    raw = folder.json(where)
    version = raw.get("codebase_version")
    if version not in ("v2.0", "v2.1", "v3.0"):
        raise findings.fail(where, f"codebase_version is {version!r}: only v2.0, v2.1 and v3.0 can be read")
    fps = raw.get("fps")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps <= 10_000:
        raise findings.fail(where, f"fps is {fps!r}: it must be the number of steps per second")
    features = raw.get("features")
    if not isinstance(features, dict) or not all(isinstance(value, dict) for value in features.values()):
        raise findings.fail(where, "has no 'features': they must name each column with its dtype and shape")
    if len(features) > 1000:
        raise findings.fail(where, f"declares {len(features)} features, more than the 1000 that can be read")
    robot = raw.get("robot_type")
    return Info(
        raw=raw,
        version=version,
        robot=robot[:64] if isinstance(robot, str) and robot else "unspecified",
        fps=float(fps),
        state=_vector(features, STATE_KEYS, "state", findings),
        action=_vector(features, ACTION_KEYS, "action", findings),
        cameras=_cameras(features, findings),
    )


def _vector(features: dict[str, Any], keys: tuple[str, ...], what: str, findings: Findings) -> Vector:
    where = "meta/info.json"
    found = [key for key in keys if key in features]
    if not found:
        raise findings.fail(where, f"declares no {what}: a feature '{keys[0]}' is needed")
    feature, shape = features[found[0]], features[found[0]].get("shape")
    if not (isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int) and 1 <= shape[0] <= 4096):
        raise findings.fail(
            where, f"feature '{found[0]}' has shape {shape!r}: it must be one vector of 1 to 4096 numbers"
        )
    names = tuple(_flatten_names(feature.get("names")))
    if names and len(names) != shape[0]:
        findings.warn(
            where, f"feature '{found[0]}' has {shape[0]} numbers but {len(names)} names: the names are ignored"
        )
        names = ()
    return Vector(found[0], shape[0], names, str(feature.get("dtype")))


def _flatten_names(names: Any) -> list[str]:
    """Collect element names from the shapes that sets use: a list, a list of lists, or `{"motors": [...]}`."""
    if isinstance(names, dict):
        names = list(names.values()) if all(isinstance(v, list) for v in names.values()) else list(names)
    if not isinstance(names, list):
        return []
    return [name for item in names for name in (_flatten_names(item) if isinstance(item, list) else [str(item)[:64]])]


def _cameras(features: dict[str, Any], findings: Findings) -> tuple[CameraSource, ...]:
    cameras: list[CameraSource] = []
    for key, feature in features.items():
        if feature.get("dtype") not in ("image", "video"):
            continue
        details = {**_dict(feature.get("video_info")), **_dict(feature.get("info"))}
        if details.get("video.is_depth_map") or details.get("is_depth_map"):
            findings.warn("meta/info.json", f"camera '{key}' has depth maps, not pictures: it is left out")
            continue
        name = key.removeprefix("observation.").removeprefix("images.").removeprefix("image.")
        if not CAMERA_NAME.fullmatch(name):
            raise findings.fail("meta/info.json", f"camera '{key[:80]}' has a name that cannot be used: rename it")
        if name in (camera.name for camera in cameras):
            raise findings.fail("meta/info.json", f"two cameras are called '{name}': rename one of them")
        shape = feature.get("shape")
        sizes = tuple(s for s in shape if isinstance(s, int)) if isinstance(shape, list) else ()
        cameras.append(CameraSource(key, name, feature["dtype"] == "video", sizes))
    return tuple(cameras)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def check_counts(info: Info, episodes: int, videos: int | None, findings: Findings) -> None:
    """Warn where the totals and splits of `info.json` contradict what is there (None: v3.0 counts no videos)."""
    for field, actual in (("total_episodes", episodes), ("total_videos", videos)):
        declared = info.raw.get(field)
        if None not in (declared, actual) and declared != actual:
            findings.warn("meta/info.json", f"{field} says {declared!r} but there are {actual}: the files count")
    for split, span in _dict(info.raw.get("splits")).items():
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", span) if isinstance(span, str) else None
        if match is None or not int(match[1]) <= int(match[2]) <= episodes:
            findings.warn(
                "meta/info.json",
                f"split '{split}' is {span!r} but there are episodes 0:{episodes}: what is there is read",
            )


def drop_cameras_without_files(
    cameras: tuple[CameraSource, ...], episodes: tuple[EpisodeSource, ...], findings: Findings
) -> tuple[CameraSource, ...]:
    """Keep the cameras that have files: none at all drops the camera, some missing is an error."""
    kept = []
    for camera in cameras:
        missing = [episode.number for episode in episodes if camera.key not in episode.videos] if camera.video else []
        if missing and len(missing) == len(episodes):
            findings.warn("meta/info.json", f"camera '{camera.key}' is declared but has no file: it is left out")
            continue
        for number in missing:
            findings.error(
                f"episode {number}", f"the video of camera '{camera.key}' is missing: copy it, or remove the camera"
            )
        kept.append(camera)
    return tuple(kept)
