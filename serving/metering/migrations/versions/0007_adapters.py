"""Adapters that are loaded into an endpoint's engines while it is served."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "endpoint_adapters",
        sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("adapter", sa.String(128), primary_key=True),
        sa.Column("uri", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("endpoint_adapters")
