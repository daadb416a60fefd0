"""The hosts that have joined for engines, and the engines that are placed on them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engine_hosts",
        sa.Column("host", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("draining", sa.Boolean, nullable=False),
        sa.Column("offer", sa.Text, nullable=False),
        sa.Column("report", sa.Text, nullable=False),
    )
    op.create_table(
        "placements",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("host", sa.String(64), nullable=False),
        sa.Column("entity", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Index("placements_by_host", "host"),
    )
    op.add_column("gateways", sa.Column("engines", sa.Text, nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("gateways", "engines")
    op.drop_table("placements")
    op.drop_table("engine_hosts")
