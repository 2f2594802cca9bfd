"""Runs the migrations on the connection that `Journal` hands over; alembic finds this file by its name."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
