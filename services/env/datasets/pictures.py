"""Pictures of a data set, as RGB arrays: MP4 files decoded in order, or encoded pictures in parquet columns.

In: one video file and the frames wanted, or one parquet file and the rows wanted. Out: [H, W, 3] uint8 pictures, one by
one. Never: another container than MP4 (a playlist could make the decoder open other files), a picture too large, or a
frame that is only near the one wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import av
import numpy as np
import numpy.typing as npt

from services.env.datasets.folder import DatasetFolder
from services.env.datasets.tables import UNREADABLE_TABLE, check_size, open_table

MAX_PIXELS = 1 << 25
_BATCH_ROWS = 64
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "mjpeg"}

Picture = npt.NDArray[np.uint8]


class VideoIndex(NamedTuple):
    """What a video file holds, found without decoding it.

    Attributes:
        times: [N] float64, presentation time of each frame in seconds, rising.
        height, width: pixels of a frame.
        fps: frames per second that the file states; 0 if it states none.
    """

    times: npt.NDArray[np.float64]
    height: int
    width: int
    fps: float


def index_video(folder: DatasetFolder, name: str) -> VideoIndex:
    """List a video's frames; DatasetError if it is no readable MP4 with one picture stream."""
    try:
        with av.open(str(folder.path(name)), format="mp4") as container:
            if not container.streams.video:
                raise folder.findings.fail(name, "has no video stream: copy it again")
            stream = container.streams.video[0]
            height, width, rate = stream.codec_context.height, stream.codec_context.width, stream.average_rate
            ticks = [p.pts for p in container.demux(stream) if p.pts is not None and not p.is_discard]
            times = np.sort(np.array(ticks, np.float64)) * float(stream.time_base or 1)
    except (av.FFmpegError, OSError) as error:
        raise folder.findings.fail(name, "is truncated or no MP4 video: copy it again") from error
    if not 0 < height * width <= MAX_PIXELS:
        raise folder.findings.fail(
            name, f"has frames of {width}x{height} pixels, which cannot be read: record it again"
        )
    return VideoIndex(times, height, width, float(rate) if rate else 0.0)


def decode_video(
    folder: DatasetFolder, name: str, times: npt.NDArray[np.float64], size: tuple[int, int]
) -> Iterator[Picture]:
    """Decode consecutive frames.

    Args:
        folder: the data set.
        name: the video.
        times: the frames' presentation times, a slice of `VideoIndex.times`.
        size: (height, width) of the pictures; other frames are resized by area averaging.

    Raises:
        DatasetError: if the frames at these times cannot be decoded.
    """
    position = 0
    tolerance = 1e-6
    try:
        with av.open(str(folder.path(name)), format="mp4") as container:
            stream = container.streams.video[0]
            if times[0] > 0:  # to the key frame at or before the first frame wanted
                container.seek(int(times[0] / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if frame.time is None or frame.time < times[position] - tolerance:
                    continue
                if frame.time > times[position] + tolerance:
                    break
                yield _rgb(frame, size)
                position += 1
                if position == len(times):
                    return
    except (av.FFmpegError, OSError) as error:
        raise folder.findings.fail(name, f"cannot be decoded beyond frame {position}: copy it again") from error
    raise folder.findings.fail(name, f"lacks the frame at {times[position]:.4f} s: copy it again")


def decode_column(
    folder: DatasetFolder, name: str, column: str, first_row: int, rows: int, size: tuple[int, int] | None
) -> Iterator[Picture]:
    """Decode the PNG or JPEG pictures of consecutive rows of a column of `{bytes, path}`.

    Args:
        folder: the data set.
        name: the parquet file.
        column: the camera's column.
        first_row: first row wanted.
        rows: number of rows wanted.
        size: (height, width) of the pictures; None keeps each as it is.

    Raises:
        DatasetError: if a picture is missing or cannot be decoded.
    """
    file = open_table(folder, name)
    if column not in file.schema_arrow.names:
        raise folder.findings.fail(name, f"has no column '{column}', which meta/info.json declares")
    start, wanted = 0, range(first_row, first_row + rows)
    for group in range(file.metadata.num_row_groups):
        stop = start + file.metadata.row_group(group).num_rows
        if stop > wanted.start and start < wanted.stop:
            check_size(folder, name, file, [column], [group])
            row = start
            try:
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column]):
                    first, last = max(row, wanted.start), min(row + batch.num_rows, wanted.stop)
                    values = batch.column(0).slice(first - row, max(0, last - first)).to_pylist()
                    for number, value in enumerate(values, first):
                        yield _decode_picture(folder, value, f"{name}, column {column}, row {number}", size)
                    row += batch.num_rows
            except UNREADABLE_TABLE as error:
                raise folder.findings.fail(name, f"column '{column}' is damaged: copy the file again") from error
        start = stop


def _decode_picture(folder: DatasetFolder, value: object, where: str, size: tuple[int, int] | None) -> Picture:
    data = value.get("bytes") if isinstance(value, dict) else value
    data = data if isinstance(data, bytes) else b""
    codec = next((codec for signature, codec in _SIGNATURES.items() if data.startswith(signature)), None)
    if codec is None:
        raise folder.findings.fail(where, "holds no PNG or JPEG picture: embed the pictures when writing the set")
    try:
        context = cast(av.VideoCodecContext, av.CodecContext.create(codec, "r"))
        context.options = {"max_pixels": str(MAX_PIXELS)}
        frames = context.decode(av.Packet(data)) + context.decode(None)
    except av.FFmpegError as error:
        raise folder.findings.fail(where, "holds a damaged picture: write it again") from error
    if len(frames) != 1:
        raise folder.findings.fail(where, "holds a damaged picture: write it again")
    return _rgb(frames[0], size)


def resize(picture: Picture, size: tuple[int, int]) -> Picture:
    """Return a picture, [H, W, 3] uint8, with (height, width) `size`, by area averaging."""
    if picture.shape[:2] == size:
        return picture
    return _rgb(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"), size)


def _rgb(frame: av.VideoFrame, size: tuple[int, int] | None) -> Picture:
    if size is not None and size != (frame.height, frame.width):
        frame = frame.reformat(height=size[0], width=size[1], format="rgb24", interpolation="AREA")
    return frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
