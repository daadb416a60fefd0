"""How many tokens were drafted for a request, and how many of them were taken."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLES = ("ledger", "folded")
COLUMNS = ("draft_tokens", "accepted_draft_tokens")


def upgrade() -> None:
    for table in TABLES:
        for name in COLUMNS:
            op.add_column(table, sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for table in TABLES:
        for name in COLUMNS:
            op.drop_column(table, name)
