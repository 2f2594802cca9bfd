"""Use has a job and a month; how much of each worker's busy time was charged is written down."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

KEYS = ("tenant", "policy", "job", "month")


def upgrade() -> None:
    op.create_table("usage_by_month", *_columns(*KEYS))
    op.execute(
        "INSERT INTO usage_by_month (tenant, policy, job, month, record) "
        "SELECT tenant, policy, '', '', record FROM usage"
    )
    op.drop_table("usage")
    op.rename_table("usage_by_month", "usage")
    op.create_table("lives", *_columns("incarnation"))


def _columns(*keys: str) -> list[sa.Column[str] | sa.Column[bytes]]:
    return [
        *(sa.Column(key, sa.Text, primary_key=True) for key in keys),
        sa.Column("record", sa.LargeBinary, nullable=False),
    ]
