"""Sizes that both sides keep. Checked by the sender, enforced by the receiver before anything is decoded."""

from __future__ import annotations

PROTOCOL = 1
"""Newest protocol version this code speaks."""
PROTOCOL_MIN = 1
"""Oldest protocol version this code speaks."""

MAGIC = b"JNX1"
"""First frame of every message: name and major version."""

MAX_HEADER_BYTES = 16 * 1024
MAX_BODY_BYTES = 1024 * 1024
MAX_BUFFERS = 1024
MAX_CONTROL_FRAME_BYTES = 4 * 1024 * 1024
"""Largest frame on a control socket: a batch of pictures to act on travels inline."""
MAX_BULK_FRAME_BYTES = 8 * 1024 * 1024
INLINE_BYTES = 256 * 1024
"""Payloads above this travel as blobs; observations to act on are the exception."""
CHUNK_BYTES = 1024 * 1024
"""Size of one chunk of a blob on a bulk socket; the protocol allows 4 MiB, under CURVE small chunks are faster."""
MAX_ACT_ROWS = 64
MAX_INSTRUCTION_CHARS = 4000
MAX_BLOB_BYTES = 64 * 1024**3
