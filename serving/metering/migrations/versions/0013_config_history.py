"""The author of each version of an endpoint's configuration, why it failed, and which earlier one it restores."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoint_configs", sa.Column("creator", sa.String(128), nullable=False, server_default=""))
    op.add_column("endpoint_configs", sa.Column("message", sa.Text, nullable=False, server_default=""))
    op.add_column("endpoint_configs", sa.Column("restores", sa.Integer))


def downgrade() -> None:
    for name in ("restores", "message", "creator"):
        op.drop_column("endpoint_configs", name)
