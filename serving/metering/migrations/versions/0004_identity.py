"""The store's identity, so that files its processes leave on disk belong to it and to no other."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "identity",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("store_id", sa.String(36), nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("former_id", sa.String(36)),
    )
    op.bulk_insert(table, [{"number": 1, "store_id": str(uuid.uuid4()), "place": "", "former_id": None}])


def downgrade() -> None:
    op.drop_table("identity")
