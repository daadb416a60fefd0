"""Keys have weights: how much of an engine one gets beside other tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("weight", sa.Integer, nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("api_keys", "weight")
