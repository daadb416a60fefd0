"""The first schema: keys, ledger, limits and their windows, prices, provisioned minutes, endpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _identity_and_ledger()
    _limits_and_prices()
    _endpoints()


def _identity_and_ledger() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.tenant"), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("scopes", sa.String(256), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("revoked_ms", sa.BigInteger),
    )
    op.create_table(
        "ledger",
        sa.Column("request_id", sa.String(256), primary_key=True),
        sa.Column("nonce", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("key_id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("endpoint", sa.String(256), nullable=False),
        sa.Column("entity", sa.String(256), nullable=False),
        sa.Column("adapter", sa.String(256)),
        sa.Column("mode", sa.String(32), nullable=False),
        sa.Column("task", sa.String(32), nullable=False),
        sa.Column("reserved_input", sa.BigInteger, nullable=False),
        sa.Column("reserved_output", sa.BigInteger, nullable=False),
        sa.Column("reserved_cost", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("price_input", sa.BigInteger, nullable=False),
        sa.Column("price_cached", sa.BigInteger, nullable=False),
        sa.Column("price_output", sa.BigInteger, nullable=False),
        sa.Column("cost", sa.BigInteger, nullable=False),
        sa.Column("charged_at", sa.BigInteger, nullable=False),
        sa.Column("bucket_milli", sa.BigInteger, nullable=False),
        sa.Column("prompt_weight_milli", sa.BigInteger, nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("status", sa.String(16), nullable=False),
    )
    op.create_index("ledger_by_time", "ledger", ["started_ms", "request_id"])
    op.create_index("ledger_by_key", "ledger", ["key_id", "charged_at"])
    op.create_index("ledger_by_tenant", "ledger", ["tenant", "charged_at"])
    op.create_index("ledger_by_endpoint", "ledger", ["endpoint", "charged_at"])
    op.create_index(
        "ledger_open",
        "ledger",
        ["owner"],
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )


def _limits_and_prices() -> None:
    op.create_table(
        "limits",
        sa.Column("scope", sa.String(16), primary_key=True),
        sa.Column("subject", sa.String(256), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "windows",
        sa.Column("scope", sa.String(16), primary_key=True),
        sa.Column("subject", sa.String(512), primary_key=True),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "buckets",
        sa.Column("subject", sa.String(512), primary_key=True),
        sa.Column("level_milli", sa.BigInteger, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "prices",
        sa.Column("entity", sa.String(256), primary_key=True),
        sa.Column("effective_ms", sa.BigInteger, primary_key=True),
        sa.Column("input", sa.BigInteger, nullable=False),
        sa.Column("cached", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("unit_minute", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "owners",
        sa.Column("owner", sa.String(128), primary_key=True),
        sa.Column("heartbeat_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "provisioned_minutes",
        sa.Column("endpoint", sa.String(256), primary_key=True),
        sa.Column("entity", sa.String(256), primary_key=True),
        sa.Column("minute", sa.BigInteger, primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("units", sa.BigInteger, nullable=False),
        sa.Column("unit_price", sa.BigInteger, nullable=False),
        sa.Column("cost", sa.BigInteger, nullable=False),
    )
    op.create_index("provisioned_minutes_by_tenant", "provisioned_minutes", ["tenant", "minute"])


def _endpoints() -> None:
    op.create_table(
        "endpoints",
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("creator", sa.String(128), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
        sa.Column("tasks", sa.String(128), nullable=False),
        sa.Column("ready", sa.String(16), nullable=False),
        sa.Column("config_update", sa.String(24), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("active_version", sa.Integer),
        sa.Column("pending_version", sa.Integer),
        sa.Column("last_version", sa.Integer, nullable=False),
    )
    op.create_table(
        "endpoint_configs",
        sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("tasks", sa.String(128), nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
    )
    op.create_table(
        "endpoint_tags",
        sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(256), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def downgrade() -> None:
    for table in (
        "endpoint_tags",
        "endpoint_configs",
        "endpoints",
        "provisioned_minutes",
        "owners",
        "prices",
        "buckets",
        "windows",
        "limits",
        "ledger",
        "api_keys",
        "tenants",
    ):
        op.drop_table(table)
