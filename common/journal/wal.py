"""SQLite's log beside a journal (`journal.db-wal`): whether a transaction in its middle is damaged.

In: the bytes of a log that nobody writes. Out: what is wrong with it, in a clause; a log that SQLite reads to its end.
Never: a word against a log whose last transaction a power cut tore, or which frames of an earlier one lie behind.

SQLite reads a log up to the first frame whose checksum does not fit, and drops the rest without a word: that is how the
last transaction ends that was being written when the power went. But SQLite begins a transaction only once the one
before it is on disk. So a frame that goes on from the sum of one that ended a transaction proves that all before it had
been on disk, and one of them that does not fit is damage. The format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = 0x377F0682
"""Of a log whose sums are of little-endian numbers; one more: big-endian."""
_FORMAT = 3007000
_HEADER = struct.Struct(">IIII8s8s")
"""Magic, format, bytes of a page, number of the checkpoint, salts, sum."""
_FRAME = struct.Struct(">II8s8s")
"""Page, pages of the database if the frame ends a transaction (else 0), salts, sum."""
_SUMMED = 8
"""So many bytes of a frame's header are summed, and then its page."""
_NO_SUM = bytes(8)


class _Frame(NamedTuple):
    """One page as a transaction left it."""

    page: int
    ends: int
    content: bytes
    fits: bool  # it is this log's, and as it was written
    in_place: bool  # its place in the log and its number may be believed, if not its content


class _Log(NamedTuple):
    """How to read a log."""

    big_endian: bool
    page_bytes: int
    salts: bytes
    sum: bytes


def damage(log: bytes) -> str:
    """Return what is wrong with a log, in a clause; empty if nothing, or what may be a torn write."""
    if len(log) <= _HEADER.size:
        return ""
    how = _read_header(log)
    if how is None:  # it is on disk before the first frame is written
        return "the header of its -wal file is not as it was written, so SQLite would drop the whole file"
    fits, ends, first, proven = True, 0, 0, 0
    number = 0
    for number, frame in enumerate(_frames(log, how), 1):
        if frame.fits and ends:
            proven = number
        if fits and not frame.fits:
            fits, first = False, number
        ends = frame.ends
    if fits or first > proven:
        return ""
    return (
        f"frame {first} of {number} in its -wal file is not as it was written, and transactions behind it were "
        "acknowledged that SQLite would drop"
    )


def mended(log: bytes, page_bytes: int) -> bytes:
    """Return a damaged log with sums that fit, so that SQLite reads it up to its last whole transaction.

    Args:
        log: a log with `damage`.
        page_bytes: of the journal's file, in case that the log's header does not say it.
    """
    how = _read_header(log)
    if how is None:
        salts = log[_HEADER.size + _SUMMED : _HEADER.size + _FRAME.size - len(_NO_SUM)]
        how = _Log(sys.byteorder == "big", page_bytes, salts, _NO_SUM)
    frames = list(_frames(log, how))
    whole = max((number for number, frame in enumerate(frames, 1) if frame.fits and frame.ends), default=0)
    kept = [frame for frame in frames[:whole] if frame.in_place and frame.page]
    head = _HEADER.pack(_MAGIC, _FORMAT, how.page_bytes, 0, how.salts, _NO_SUM)[: -len(_NO_SUM)]
    summed = _sum(_NO_SUM, head, big_endian=False)
    parts = [head, summed]
    for number, frame in enumerate(kept, 1):
        place = struct.pack(">II", frame.page, frame.ends if number == len(kept) else 0)
        summed = _sum(summed, place + frame.content, big_endian=False)
        parts += [place, how.salts, summed, frame.content]
    return b"".join(parts)


def _read_header(log: bytes) -> _Log | None:
    """Return what the header says; nothing if it is not as it was written."""
    magic, _, page_bytes, _, salts, stored = _HEADER.unpack_from(log)
    big_endian = bool(magic & 1)
    if magic & ~1 != _MAGIC or _sum(_NO_SUM, log[: _HEADER.size - len(stored)], big_endian=big_endian) != stored:
        return None
    return _Log(big_endian, page_bytes, salts, stored)


def _frames(log: bytes, how: _Log) -> Iterator[_Frame]:
    """Give the frames that are there with all their bytes, those of earlier logs too."""
    before: tuple[bytes, ...] = (how.sum,) if how.sum != _NO_SUM else ()
    for start in range(_HEADER.size, len(log) - _FRAME.size - how.page_bytes + 1, _FRAME.size + how.page_bytes):
        page, ends, salts, stored = _FRAME.unpack_from(log, start)
        content = log[start + _FRAME.size : start + _FRAME.size + how.page_bytes]
        data = log[start : start + _SUMMED] + content
        sums = [_sum(summed, data, big_endian=how.big_endian) for summed in before]
        as_written, ours = stored in sums or not before, salts == how.salts
        yield _Frame(page, ends, content, as_written and ours and page > 0, as_written or ours)
        # Of a frame that does not fit it may be the sum that is damaged, or what it is the sum of.
        before = (stored,) if as_written else (stored, sums[0])


def _sum(before: bytes, data: bytes, *, big_endian: bool) -> bytes:
    """Return the sum of bytes, a multiple of 8, behind others."""
    first, second = struct.unpack(">II", before)
    numbers = iter(struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data))
    for one, other in zip(numbers, numbers, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return struct.pack(">II", first, second)
