"""The content hashes of adapters: of those that are loaded at run time, and in the ledger's rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoint_adapters", sa.Column("content_hash", sa.String(64), nullable=False, server_default=""))
    op.add_column("ledger", sa.Column("adapter_hash", sa.String(64)))


def downgrade() -> None:
    op.execute("DELETE FROM files WHERE purpose = 'adapter'")
    op.drop_column("ledger", "adapter_hash")
    op.drop_column("endpoint_adapters", "content_hash")
