"""End users that trusted callers name: the limits on each of them, and when their windows were used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("limited_user", sa.String(256)))
    _partial_index("ledger_by_limited_user", "ledger", ["limited_user", "tenant"])
    op.add_column("windows", sa.Column("used_at", sa.BigInteger()))
    _partial_index("windows_by_use", "windows", ["used_at"])
    with op.batch_alter_table("limits") as table:
        table.alter_column("subject", existing_type=sa.String(256), type_=sa.String(512), existing_nullable=False)


def _partial_index(name: str, table: str, columns: list[str]) -> None:
    where = sa.text(f"{columns[0]} IS NOT NULL")
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.execute(sa.text("DELETE FROM limits WHERE scope IN ('key_user', 'tenant_user', 'endpoint_user')"))
    op.execute(sa.text("DELETE FROM windows WHERE scope IN ('key_user', 'tenant_user', 'endpoint_user')"))
    with op.batch_alter_table("limits") as table:
        table.alter_column("subject", existing_type=sa.String(512), type_=sa.String(256), existing_nullable=False)
    op.drop_index("windows_by_use", "windows")
    op.drop_column("windows", "used_at")
    op.drop_index("ledger_by_limited_user", "ledger")
    op.drop_column("ledger", "limited_user")
