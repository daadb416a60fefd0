"""The chat template that an adapter has of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoint_adapters", sa.Column("template", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("endpoint_adapters", "template")
