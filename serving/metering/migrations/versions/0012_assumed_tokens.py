"""The part of a row's generated tokens that no engine has counted: they were received, so they were generated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("assumed_tokens", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("ledger", "assumed_tokens")
