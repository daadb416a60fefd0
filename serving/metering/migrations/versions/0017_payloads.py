"""The texts of requests, of endpoints that log them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "payloads",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("request_id", sa.String(256), nullable=False),
        sa.Column("endpoint", sa.String(256), nullable=False),
        sa.Column("entity", sa.String(256), nullable=False),
        sa.Column("adapter", sa.String(256)),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("key_id", sa.String(128), nullable=False),
        sa.Column("client_request_id", sa.String(256)),
        sa.Column("status_code", sa.Integer, nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("duration_ms", sa.BigInteger, nullable=False),
        sa.Column("sample", sa.Float, nullable=False),
        sa.Column("request", sa.Text),
        sa.Column("response", sa.Text),
        sa.Column("codes", sa.String(256), nullable=False),  # why a text is missing, separated by spaces
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Index("payloads_by_endpoint", "endpoint", "number", "size"),
        sa.Index("payloads_by_request", "request_id"),
        sa.Index("payloads_by_end", "expires_ms"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    op.drop_table("payloads")
