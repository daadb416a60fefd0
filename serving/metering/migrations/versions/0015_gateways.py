"""The gateways of a database: what each of them serves, and which of them leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gateways",
        sa.Column("gateway", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("serving", sa.Boolean, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("report", sa.Text, nullable=False),
    )
    op.create_table(
        "leadership",
        sa.Column("role", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("leadership")
    op.drop_table("gateways")
