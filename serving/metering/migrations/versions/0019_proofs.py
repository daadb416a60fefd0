"""The hash chain of the ledger, and what repeats and proves an answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_WAITING = sa.text("status <> 'open' AND chained IS NULL")


def upgrade() -> None:
    op.add_column("ledger", sa.Column("proof", sa.JSON(none_as_null=True)))
    op.add_column("ledger", sa.Column("output", sa.Text))
    op.add_column("ledger", sa.Column("chained", sa.BigInteger))
    op.create_index("ledger_unchained", "ledger", ["request_id"], sqlite_where=_WAITING, postgresql_where=_WAITING)
    op.create_table(
        "ledger_links",
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.String(256), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("row_hash", sa.String(64), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("signature", sa.String(128)),
        sa.Column("folded_by", sa.BigInteger),
        sa.Index("ledger_links_by_request", "request_id"),
    )


def downgrade() -> None:
    op.drop_table("ledger_links")
    op.drop_index("ledger_unchained", "ledger")
    for name in ("chained", "output", "proof"):
        op.drop_column("ledger", name)
