"""The configs that command lines declare, and those that an operator has set, which stay until he gives them back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Earlier versions recorded who changed an endpoint in the audit log alone: its newest change tells whose config it has.
_FROM_AUDIT = """
    UPDATE endpoint_configs SET by_operator = true WHERE EXISTS (
        SELECT 1 FROM audit WHERE audit.actor != 'command line' AND audit.id = (
            SELECT MAX(newest.id) FROM audit AS newest
            WHERE newest.target = endpoint_configs.name
            AND newest.action IN ('endpoint.create', 'endpoint.update_config')
        )
    ) AND version = (
        SELECT endpoints.last_version FROM endpoints WHERE endpoints.name = endpoint_configs.name
    )
"""


def upgrade() -> None:
    operator = sa.Column("by_operator", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("endpoint_configs", operator)
    op.add_column("endpoints", sa.Column("declared", sa.Text))
    op.execute(_FROM_AUDIT)


def downgrade() -> None:
    op.drop_column("endpoints", "declared")
    op.drop_column("endpoint_configs", "by_operator")
