"""Keys that expire, are rotated and are for some endpoints; the audit log; the currency; who pays for an endpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("expires_ms", sa.BigInteger))
    op.add_column("api_keys", sa.Column("endpoints", sa.Text))
    op.create_table(
        "old_secrets",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(32), sa.ForeignKey("api_keys.key_id", ondelete="CASCADE"), nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("old_secrets_by_key", "old_secrets", ["key_id"])
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128)),
        sa.Column("via", sa.String(16), nullable=False),
        sa.Column("request_id", sa.String(256)),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(512), nullable=False),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_time", "audit", ["at_ms"])
    op.create_table(
        "settings",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.String(256), nullable=False),
    )
    op.add_column("endpoints", sa.Column("tenant", sa.String(128)))
    _append_only()


def _append_only() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()"
    )


def downgrade() -> None:
    op.drop_column("endpoints", "tenant")
    op.drop_table("settings")
    op.drop_table("audit")
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_append_only()")
    op.drop_table("old_secrets")
    op.drop_column("api_keys", "endpoints")
    op.drop_column("api_keys", "expires_ms")
