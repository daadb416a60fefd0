"""Limits that refuse nothing, and the shares of limits at which webhooks are told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("limits", sa.Column("soft", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("limits", sa.Column("alert_at", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("limits", "alert_at")
    op.drop_column("limits", "soft")
