"""Alembic's entry: migrates over the connection (and inside the transaction) that ``Store`` passes in."""

from __future__ import annotations

from alembic import context

from mlflow_llm.serving.metering.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
