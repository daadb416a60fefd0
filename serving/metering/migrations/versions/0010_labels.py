"""The model and version that answered a request, and its caller's labels."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

COLUMNS = (
    ("model_version", sa.String(512)),
    ("content_hash", sa.String(128)),
    ("end_user", sa.String(256)),
    ("client_request_id", sa.String(256)),
    ("tags", sa.JSON()),
)


def upgrade() -> None:
    for name, kind in COLUMNS:
        op.add_column("ledger", sa.Column(name, kind))


def downgrade() -> None:
    for name, _ in COLUMNS:
        op.drop_column("ledger", name)
