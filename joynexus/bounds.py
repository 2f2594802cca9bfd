"""How long what others send may be: texts, lists, tables.

In: nothing. Out: types for the fields of messages and specs; msgspec refuses what is longer as it decodes. Never: the
bound that a user meets first: where a name or a list has a limit of its own, that is lower, and its refusal says why.

A message as a whole is bounded already (`joynexus.wire.limits`). These are for what is kept of it: a worker's phase
stays in its status, and a policy's name in many records.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

T = TypeVar("T")

Short = Annotated[str, msgspec.Meta(max_length=256)]
"""A name, an id, a digest."""
MAX_TEXT = 4096
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
"""A sentence, an instruction, a path."""
Encoded = Annotated[bytes, msgspec.Meta(max_length=1024 * 1024)]
"""Another message, encoded."""
Few = Annotated[tuple[T, ...], msgspec.Meta(max_length=1024)]
Many = Annotated[tuple[T, ...], msgspec.Meta(max_length=65_536)]
Table = Annotated[dict[Short, T], msgspec.Meta(max_length=1024)]
"""By name."""
