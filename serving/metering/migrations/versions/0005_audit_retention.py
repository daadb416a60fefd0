"""Entries of the audit log may be removed by age, where an entry says so: it is there before they go, and stays."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

REFUSAL = "the audit log is append-only"
# an entry that says so: ``target`` is the age in days from which entries go, 90 at least
PRUNED = """
SELECT 1 FROM audit AS entry WHERE entry.action = 'audit.prune'
AND CASE WHEN entry.action = 'audit.prune' THEN CAST(entry.target AS {integer}) END >= 90
AND OLD.at_ms < entry.at_ms - CASE WHEN entry.action = 'audit.prune' THEN CAST(entry.target AS {integer}) END * 86400000
"""


def upgrade() -> None:
    said = sa.text("action = 'audit.prune'")
    op.create_index("audit_prunes", "audit", ["at_ms"], sqlite_where=said, postgresql_where=said)
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_no_delete")
        op.execute(
            "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit "
            f"WHEN NOT EXISTS ({PRUNED.format(integer='INTEGER')}) BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
        )
        return
    op.execute("DROP TRIGGER audit_append_only ON audit")
    op.execute(_on("UPDATE OR TRUNCATE"))
    op.execute(
        "CREATE FUNCTION audit_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NOT EXISTS ({PRUNED.format(integer='BIGINT')}) THEN RAISE EXCEPTION '{REFUSAL}'; END IF; "
        "RETURN OLD; END $$"
    )
    op.execute("CREATE TRIGGER audit_keep BEFORE DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_keep()")


def _on(changes: str) -> str:
    return (
        f"CREATE TRIGGER audit_append_only BEFORE {changes} ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()"
    )


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_no_delete")
        op.execute(f"CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END")
    else:
        op.execute("DROP TRIGGER audit_keep ON audit")
        op.execute("DROP FUNCTION audit_keep()")
        op.execute("DROP TRIGGER audit_append_only ON audit")
        op.execute(_on("UPDATE OR DELETE OR TRUNCATE"))
    op.drop_index("audit_prunes", "audit")
