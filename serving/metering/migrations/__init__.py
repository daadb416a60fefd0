"""Alembic's environment and versions, run by ``Store`` when it opens a database."""
