"""Encode pictures: MP4 files frame by frame, and single PNG pictures.

In: [H, W, 3] uint8 RGB pictures. Out: an MP4 whose frame i is picture i, at i / fps seconds; PNG bytes. Never: a
dropped or repeated frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import av
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
Codec = Literal["h264", "av1"]

# A key frame every second frame: random access stays cheap, as in LeRobot's own files. H264 encodes four to eight times
# faster than AV1 here, at the same size and error (64 and 128 px, mean absolute error 2 of 255).
_ENCODERS: dict[Codec, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"crf": "18", "preset": "veryfast", "g": "2"}),
    "av1": ("libsvtav1", {"crf": "22", "preset": "10", "g": "2", "svtav1-params": "lp=1"}),
}


class VideoWriter:
    """Write pictures to an MP4 file, one after the other; a context manager.

    Args:
        path: the file.
        fps: frames per second.
        height, width: pixels of every picture.
        codec: `h264` or `av1`.

    Raises:
        ValueError: if height or width is odd (4:2:0 video cannot have that) or a picture has another size.
    """

    def __init__(self, path: Path, fps: float, height: int, width: int, codec: Codec = "h264") -> None:
        if height % 2 or width % 2:
            raise ValueError(f"a video of {width}x{height} pixels cannot be written: both sides must be even")
        encoder, options = _ENCODERS[codec]
        self._shape = (height, width, 3)
        self._container = av.open(str(path), "w", format="mp4")
        rate = Fraction(fps).limit_denominator(1000)
        # The stub knows only some encoder names.
        self._stream = cast(av.VideoStream, self._container.add_stream(encoder, rate=rate))
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, "yuv420p"
        self._stream.options = dict(options)
        self._stream.codec_context.thread_count = 1
        self.frames, self._broken = 0, False

    def add(self, picture: Picture) -> None:
        """Append one picture, [H, W, 3] uint8."""
        if picture.shape != self._shape or picture.dtype != np.uint8:
            raise ValueError(f"a picture is {picture.dtype} {picture.shape}, but the video has uint8 {self._shape}")
        self._encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"))
        self.frames += 1

    def close(self) -> None:
        """Write what is left; the file is complete afterwards, unless a picture could not be written."""
        try:
            if self.frames and not self._broken:
                self._encode(None)
        finally:
            self._container.close()

    def _encode(self, frame: av.VideoFrame | None) -> None:
        self._broken = True  # FFmpeg crashes where it is asked to go on after its disk was full
        self._container.mux(self._stream.encode(frame))
        self._broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_video(path: Path, pictures: Iterable[Picture], fps: float) -> None:
    """Write pictures, [H, W, 3] uint8 of one size, to an H264 MP4 file; ValueError if there is none."""
    writer: VideoWriter | None = None
    try:
        for picture in pictures:
            writer = writer or VideoWriter(path, fps, picture.shape[0], picture.shape[1])
            writer.add(picture)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError(f"{path.name} cannot be written: there is no picture")


def encode_png(picture: Picture) -> bytes:
    """Return a picture, [H, W, 3] uint8, as PNG."""
    context = av.CodecContext.create("png", "w")
    context.height, context.width, context.pix_fmt = picture.shape[0], picture.shape[1], "rgb24"
    context.time_base = Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])
