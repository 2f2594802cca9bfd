"""The first schema of the journal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# table -> key columns; a trailing number sign marks an integer
TABLES = {
    "policies": ("tenant", "policy"),
    "leases": ("tenant", "policy"),
    "versions": ("tenant", "policy", "version#"),
    "checkpoints": ("tenant", "policy"),
    "states": ("tenant", "policy", "state"),
    "jobs": ("tenant", "job"),
    "pages": ("tenant", "job", "page#"),
    "curves": ("tenant", "job", "first#"),
    "datasets": ("tenant", "dataset"),
    "usage": ("tenant", "policy"),
    "blobs": ("tenant", "digest"),
}


def upgrade() -> None:
    for name, keys in TABLES.items():
        op.create_table(name, *(_key(key) for key in keys), sa.Column("record", sa.LargeBinary, nullable=False))
    op.create_table(
        "ops",
        *(_key(key) for key in ("tenant", "policy", "seq#")),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=True),
        sa.Column("done", sa.LargeBinary, nullable=True),
    )


def _key(name: str) -> sa.Column[int] | sa.Column[str]:
    if name.endswith("#"):
        return sa.Column(name[:-1], sa.Integer, primary_key=True, autoincrement=False)
    return sa.Column(name, sa.Text, primary_key=True)
