"""Tokens that engines counted themselves, the journals they were read from, and days folded out of the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("generated_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "journals",
        sa.Column("journal", sa.String(128), primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "folded",
        sa.Column("day", sa.Integer, primary_key=True),
        sa.Column("key_id", sa.String(128), primary_key=True),
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("endpoint", sa.String(256), primary_key=True),
        sa.Column("entity", sa.String(256), primary_key=True),
        sa.Column("mode", sa.String(32), primary_key=True),
        sa.Column("task", sa.String(32), primary_key=True),
        sa.Column("status", sa.String(16), primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("generated_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("folded")
    op.drop_table("journals")
    op.drop_column("ledger", "generated_tokens")
