"""Databases of their own on the PostgreSQL server that the tests share."""

from __future__ import annotations

import os


def new_database(server: str) -> str:
    """Create a database on ``server`` (``postgresql+psycopg://…``) and return its URL."""
    import psycopg  # not everybody who runs some of the tests has it

    name = "t" + os.urandom(6).hex()
    with psycopg.connect(server.replace("+psycopg", "") + "/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server}/{name}"
