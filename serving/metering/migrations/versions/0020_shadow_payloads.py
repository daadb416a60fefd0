"""Answers of shadows among the texts of requests, and the version that gave each answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("payloads", sa.Column("model_version", sa.String(512)))
    op.add_column("payloads", sa.Column("shadow", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("payloads", "shadow")
    op.drop_column("payloads", "model_version")
