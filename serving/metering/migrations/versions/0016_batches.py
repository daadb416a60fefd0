"""Uploaded files in chunks, batches, and a row for each request of a batch with its reply."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
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
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.String(64), sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "batches",
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
    op.create_table(
        "batch_rows",
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


def downgrade() -> None:
    for name in ("batch_rows", "batches", "file_chunks", "files"):
        op.drop_table(name)
