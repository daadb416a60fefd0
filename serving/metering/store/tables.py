"""The tables of the metering store for SQLAlchemy Core. Migrations create them; see docs/metering.md.

Times ending in ``_ms`` are milliseconds since the epoch; ``charged_at`` is in whole seconds. Money is in integer
micro-units (millionths of the currency's unit), prices are in micro-units per million tokens.
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa

metadata = sa.MetaData()


def new_epoch() -> int:
    """Return the epoch of a window that is built: no other has it, so that none is taken for one of before."""
    return secrets.randbits(62)


identity = sa.Table(  # one row
    "identity",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("store_id", sa.String(36), nullable=False),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("former_id", sa.String(36)),
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.tenant"), nullable=False),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("scopes", sa.String(256), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("revoked_ms", sa.BigInteger),
    sa.Column("expires_ms", sa.BigInteger),
    sa.Column("endpoints", sa.Text),
    sa.Column("weight", sa.Integer, nullable=False, server_default="1"),
)

old_secrets = sa.Table(
    "old_secrets",
    metadata,
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(32), sa.ForeignKey("api_keys.key_id", ondelete="CASCADE"), nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Index("old_secrets_by_key", "key_id"),
)

_PRUNES = sa.text("action = 'audit.prune'")
audit = sa.Table(
    "audit",
    metadata,
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
    sa.Index("audit_by_time", "at_ms"),
    sa.Index("audit_prunes", "at_ms", sqlite_where=_PRUNES, postgresql_where=_PRUNES),
    sqlite_autoincrement=True,
)

settings = sa.Table(
    "settings",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.String(256), nullable=False),
)

_UNCHAINED = sa.text("status <> 'open' AND chained IS NULL")
ledger = sa.Table(
    "ledger",
    metadata,
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
    sa.Column("generated_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("assumed_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("draft_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("accepted_draft_tokens", sa.BigInteger, nullable=False, server_default="0"),
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
    sa.Column("model_version", sa.String(512)),
    sa.Column("content_hash", sa.String(128)),
    sa.Column("end_user", sa.String(256)),
    sa.Column("client_request_id", sa.String(256)),
    sa.Column("tags", sa.JSON(none_as_null=True)),
    sa.Column("limited_user", sa.String(256)),  # the end user, where a trusted caller named it: limits count by it
    sa.Column("proof", sa.JSON(none_as_null=True)),  # ``metering.proof.answers.Proof``
    sa.Column("output", sa.Text),  # JSON of a ``Said`` for each choice
    sa.Column("adapter_hash", sa.String(64)),  # of the content of an adapter that was loaded at run time
    sa.Column("chained", sa.BigInteger),  # its newest link; null until it has one, and since it changed
    sa.Index("ledger_by_time", "started_ms", "request_id"),
    sa.Index("ledger_by_key", "key_id", "charged_at"),
    sa.Index("ledger_by_tenant", "tenant", "charged_at"),
    sa.Index("ledger_by_endpoint", "endpoint", "charged_at"),
    sa.Index(
        "ledger_by_limited_user",
        "limited_user",
        "tenant",
        sqlite_where=sa.text("limited_user IS NOT NULL"),
        postgresql_where=sa.text("limited_user IS NOT NULL"),
    ),
    sa.Index(
        "ledger_open",
        "owner",
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    ),
    sa.Index("ledger_unchained", "request_id", sqlite_where=_UNCHAINED, postgresql_where=_UNCHAINED),
)

links = sa.Table(  # the hash chain of the ledger (``metering.proof.chain``)
    "ledger_links",
    metadata,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.String(256), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # the row's status; repaired, folded
    sa.Column("row_hash", sa.String(64), nullable=False),
    sa.Column("previous", sa.String(64), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("signature", sa.String(128)),  # of the last link of a batch
    sa.Column("folded_by", sa.BigInteger),  # the link of the rows whose sums replaced this one's
    sa.Index("ledger_links_by_request", "request_id"),
)

journals = sa.Table(
    "journals",
    metadata,
    sa.Column("journal", sa.String(128), primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
)

folded = sa.Table(
    "folded",
    metadata,
    *(
        sa.Column(name, kind, primary_key=True)
        for name, kind in (
            ("day", sa.Integer),
            ("key_id", sa.String(128)),
            ("tenant", sa.String(128)),
            ("endpoint", sa.String(256)),
            ("entity", sa.String(256)),
            ("mode", sa.String(32)),
            ("task", sa.String(32)),
            ("status", sa.String(16)),
        )
    ),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "generated_tokens", "cost")
    ),
    *(
        sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        for name in ("draft_tokens", "accepted_draft_tokens")
    ),
)

limits = sa.Table(
    "limits",
    metadata,
    sa.Column("scope", sa.String(16), primary_key=True),
    sa.Column("subject", sa.String(512), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
    sa.Column("soft", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("alert_at", sa.JSON(none_as_null=True)),  # shares at which webhooks are told; NULL: those of the server
)

windows = sa.Table(
    "windows",
    metadata,
    sa.Column("scope", sa.String(16), primary_key=True),
    sa.Column("subject", sa.String(512), primary_key=True),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("used_at", sa.BigInteger),  # the second of the last use, of windows of end users, which are pruned by it
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),  # another one each time that it is built
    sa.Index(
        "windows_by_use",
        "used_at",
        sqlite_where=sa.text("used_at IS NOT NULL"),
        postgresql_where=sa.text("used_at IS NOT NULL"),
    ),
)

buckets = sa.Table(
    "buckets",
    metadata,
    sa.Column("subject", sa.String(512), primary_key=True),
    sa.Column("level_milli", sa.BigInteger, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("entity", sa.String(256), primary_key=True),
    sa.Column("effective_ms", sa.BigInteger, primary_key=True),
    sa.Column("input", sa.BigInteger, nullable=False),
    sa.Column("cached", sa.BigInteger, nullable=False),
    sa.Column("output", sa.BigInteger, nullable=False),
    sa.Column("unit_minute", sa.BigInteger, nullable=False),
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("owner", sa.String(128), primary_key=True),
    sa.Column("heartbeat_ms", sa.BigInteger, nullable=False),
)

provisioned_minutes = sa.Table(
    "provisioned_minutes",
    metadata,
    sa.Column("endpoint", sa.String(256), primary_key=True),
    sa.Column("entity", sa.String(256), primary_key=True),
    sa.Column("minute", sa.BigInteger, primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("units", sa.BigInteger, nullable=False),
    sa.Column("unit_price", sa.BigInteger, nullable=False),
    sa.Column("cost", sa.BigInteger, nullable=False),
    sa.Index("provisioned_minutes_by_tenant", "tenant", "minute"),
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    sa.Column("name", sa.String(256), primary_key=True),
    sa.Column("id", sa.String(32), nullable=False),
    sa.Column("creator", sa.String(128), nullable=False),
    sa.Column("tenant", sa.String(128)),
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
    sa.Column("declared", sa.Text),
)

endpoint_configs = sa.Table(
    "endpoint_configs",
    metadata,
    sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("tasks", sa.String(128), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("by_operator", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("creator", sa.String(128), nullable=False, server_default=""),
    sa.Column("message", sa.Text, nullable=False, server_default=""),
    sa.Column("restores", sa.Integer),  # the version that it is equal to, of a rollback
    sa.Column("served_ms", sa.BigInteger),  # when it became the active one
)

webhook_deliveries = sa.Table(  # events on their way to webhooks; a delivery that was made has no row
    "webhook_deliveries",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("url", sa.String(1024), primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_ms", sa.BigInteger, nullable=False),
    sa.Index("webhook_deliveries_by_time", "due_ms"),
)

budget_alerts = sa.Table(  # the shares of budgets that webhooks were told of, in each period
    "budget_alerts",
    metadata,
    sa.Column("scope", sa.String(16), primary_key=True),
    sa.Column("subject", sa.String(512), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    sa.Column("period", sa.BigInteger, primary_key=True),
    sa.Column("value", sa.BigInteger, primary_key=True),
    sa.Column("share_milli", sa.BigInteger, primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
)

followed_aliases = sa.Table(  # the version that an alias meant when it was last looked at, and acted upon
    "followed_aliases",
    metadata,
    sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("entity", sa.String(512), primary_key=True),
    sa.Column("seen", sa.Text, nullable=False),
)

endpoint_adapters = sa.Table(
    "endpoint_adapters",
    metadata,
    sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("adapter", sa.String(128), primary_key=True),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("revision", sa.String(32), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("template", sa.Text, nullable=False, server_default=""),
    sa.Column("content_hash", sa.String(64), nullable=False, server_default=""),  # "": of an earlier release
)

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("key_id", sa.String(128), nullable=False),
    sa.Column("filename", sa.String(256), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),  # uploading, processed
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger),
    sa.Column("batch_id", sa.String(64)),  # of a file made of a batch's rows, which has no chunks
    sa.Index("files_by_tenant", "tenant", "created_ms"),
    sa.Index("files_by_batch", "batch_id"),
)

file_chunks = sa.Table(
    "file_chunks",
    metadata,
    sa.Column("file_id", sa.String(64), sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("key_id", sa.String(128), nullable=False),
    sa.Column("caller", sa.Text, nullable=False),  # JSON of ``Caller``: its rows run with its permissions
    sa.Column("endpoint", sa.String(64), nullable=False),  # the route of its rows
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(8), nullable=False),
    sa.Column("metadata", sa.Text),
    sa.Column("output_seconds", sa.BigInteger, nullable=False),  # how long its output files are kept
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("errors", sa.Text),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("num_rows", sa.Integer, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    *(
        sa.Column(f"{status}_ms", sa.BigInteger)
        for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    ),
    sa.Column("claimed_by", sa.String(128)),  # the owner that validates it
    sa.Index("batches_by_tenant", "tenant", "created_ms"),
    sa.Index("batches_by_status", "status"),
    sa.Index("batches_by_input", "input_file_id"),
)

batch_rows = sa.Table(
    "batch_rows",
    metadata,
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),  # of its line in the input
    sa.Column("custom_id", sa.String(512), nullable=False),
    sa.Column("chunk", sa.Integer, nullable=False),
    sa.Column("start", sa.Integer, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("claimed_by", sa.String(128)),
    sa.Column("retry_ms", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_bytes", sa.Integer, nullable=False),
    sa.Column("output", sa.LargeBinary),
    sa.Index("batch_rows_by_status", "batch_id", "status", "number"),
)

payloads = sa.Table(  # texts of requests, of endpoints that log them
    "payloads",
    metadata,
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
    sa.Column("model_version", sa.String(512)),
    sa.Column("shadow", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Index("payloads_by_endpoint", "endpoint", "number", "size"),
    sa.Index("payloads_by_request", "request_id"),
    sa.Index("payloads_by_end", "expires_ms"),
    sqlite_autoincrement=True,
)

endpoint_tags = sa.Table(
    "endpoint_tags",
    metadata,
    sa.Column("name", sa.String(256), sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("key", sa.String(256), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

gateways = sa.Table(  # the servers of this database that live; the leader removes those that are silent
    "gateways",
    metadata,
    sa.Column("gateway", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("started_ms", sa.BigInteger, nullable=False),
    sa.Column("serving", sa.Boolean, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False),
    sa.Column("report", sa.Text, nullable=False),
    sa.Column("engines", sa.Text, nullable=False, server_default="[]"),  # on joined hosts, which its workers may use
)

leadership = sa.Table(  # one row for each role
    "leadership",
    metadata,
    sa.Column("role", sa.String(32), primary_key=True),
    sa.Column("holder", sa.String(64), nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False),
)

engine_hosts = sa.Table(  # the hosts that offer to run engines; the leader removes those that are silent
    "engine_hosts",
    metadata,
    sa.Column("host", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("started_ms", sa.BigInteger, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),  # grows with every start of the host's command
    sa.Column("beat", sa.BigInteger, nullable=False),
    sa.Column("draining", sa.Boolean, nullable=False),
    sa.Column("offer", sa.Text, nullable=False),
    sa.Column("report", sa.Text, nullable=False),
)

placements = sa.Table(  # one row for each replica that the leader has placed on a joined host
    "placements",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("engine", sa.String(64), nullable=False),
    sa.Column("host", sa.String(64), nullable=False),
    sa.Column("entity", sa.Text, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Index("placements_by_host", "host"),
)
