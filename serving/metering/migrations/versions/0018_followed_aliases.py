"""The version that a followed alias meant when it was last acted upon, when a config became the active one, events
on their way to webhooks, and the shares of budgets that they were told of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoint_configs", sa.Column("served_ms", sa.BigInteger))
    op.create_table(
        "followed_aliases",
        sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("entity", sa.String(512), primary_key=True),
        sa.Column("seen", sa.Text, nullable=False),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("url", sa.String(1024), primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
        sa.Index("webhook_deliveries_by_time", "due_ms"),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("scope", sa.String(16), primary_key=True),
        sa.Column("subject", sa.String(512), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("period", sa.BigInteger, primary_key=True),
        sa.Column("value", sa.BigInteger, primary_key=True),
        sa.Column("share_milli", sa.BigInteger, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("budget_alerts")
    op.drop_table("webhook_deliveries")
    op.drop_table("followed_aliases")
    op.drop_column("endpoint_configs", "served_ms")
