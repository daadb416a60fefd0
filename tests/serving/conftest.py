"""Real stores: a SQLite file a test; PostgreSQL where a server binary is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    found = [Path(on_path).parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((path for path in reversed(found) if (path / "initdb").exists()), None)


def _as_server_user(command: list[str]) -> None:
    """PostgreSQL refuses to run as root: become ``postgres`` then."""
    user = None
    if os.getuid() == 0:
        user = "postgres"
    subprocess.run(command, check=True, capture_output=True, user=user, group=user, extra_groups=[] if user else None)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of our own, without its database's name."""
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed (apt-get install postgresql)")
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses root and there is no user postgres to run it as")
    base = Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if os.getuid() == 0:
        shutil.chown(base, "postgres", "postgres")
    data = str(base / "data")
    _as_server_user([str(binaries / "initdb"), "-D", data, "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"])
    flags = f"-p {port} -k {base} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
    start = [str(binaries / "pg_ctl"), "-D", data, "-l", str(base / "log"), "-w", "-o", flags, "start"]
    _as_server_user(start)
    try:
        yield f"postgresql+psycopg://test@127.0.0.1:{port}"
    finally:
        _as_server_user([str(binaries / "pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop"])
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/metering.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Every test that takes it runs on both databases."""
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_url")
    import psycopg

    server = request.getfixturevalue("postgres_server")
    name = "t" + os.urandom(6).hex()
    with psycopg.connect(server.replace("+psycopg", "") + "/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server}/{name}"
