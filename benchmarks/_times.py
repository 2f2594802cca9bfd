"""The table of service times, read once: what each piece of work takes on one device.

In: `service_times.toml`. Out: `Times`, seconds. Never: a number without a source, or one that is not in the table.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

TABLE = Path(__file__).with_name("service_times.toml")

Head = Literal["oft", "groot"]
Simulator = Literal["libero", "maniskill"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table."""

    value: float
    kind: Literal["published", "derived", "measured", "assumed"]
    source: str


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Service times in seconds; the fields are the rows of the table."""

    backbone_fixed_s: float
    backbone_row_s: float
    oft_act_s: float
    groot_act_s: float
    oft_train_fixed_s: float
    oft_train_row_s: float
    groot_train_fixed_s: float
    groot_train_row_s: float
    optim_step_s: float
    feature_read_row_s: float
    publish_s: float
    apply_s: float
    checkpoint_s: float
    page_in_s: float
    libero_step_row_s: float
    maniskill_step_fixed_s: float
    maniskill_step_row_s: float
    hop_s: float
    journal_s: float

    def forward(self, rows: int) -> float:
        """One backbone forward."""
        return self.backbone_fixed_s + rows * self.backbone_row_s if rows else 0.0

    def act(self, head: Head) -> float:
        """The private part of one request to act."""
        return self.oft_act_s if head == "oft" else self.groot_act_s

    def train(self, head: Head, rows: int) -> float:
        """Forward and backward of the private part of one micro-batch."""
        if head == "oft":
            return self.oft_train_fixed_s + rows * self.oft_train_row_s
        return self.groot_train_fixed_s + rows * self.groot_train_row_s

    def simulate(self, simulator: Simulator, rows: int, steps: float) -> float:
        """So many steps of so many environments on one device."""
        if simulator == "libero":
            return steps * rows * self.libero_step_row_s
        return steps * (self.maniskill_step_fixed_s + rows * self.maniskill_step_row_s)

    def scaled(self, prefix: str, factor: float) -> Times:
        """Return a table in which all rows with this prefix are multiplied."""
        fields = {name: getattr(self, name) * factor for name in self.__struct_fields__ if name.startswith(prefix)}
        assert fields, f"no row of the table begins with '{prefix}'"
        return msgspec.structs.replace(self, **fields)


def entries() -> dict[str, Entry]:
    """Return the table with its sources."""
    return msgspec.convert(tomllib.loads(TABLE.read_text()), dict[str, Entry])


def load() -> Times:
    """Return the values."""
    return msgspec.convert({name: entry.value for name, entry in entries().items()}, Times)
