"""``mlflow-llm keys`` as commands beside a server that asks for keys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from instant_model import write_instant_model
from server_calls import BODY, asking, until
from serving_process import Running, running


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('keys') / 'serving.db'}"


@pytest.fixture(scope="module")
def guarded(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of two workers that requires keys."""
    root: Path = tmp_path_factory.mktemp("guarded")
    settings = {"workers": 2, "database": database, "require_keys": True, "state_dir": str(root / "state")}
    with running(write_instant_model(root), **settings) as server:
        yield server


def keys(database: str, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mlflow_llm.serving.cli", "keys", command, "--database", database, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done


def status(server: Running, secret: str | None) -> int:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with asking(server, BODY, headers=headers) as answer:
        answer.read()
        return answer.status


def states(database: str) -> dict[str, str]:
    """Return the state of each key as ``keys list`` reports it."""
    return {key["key_id"]: key["state"] for key in json.loads(keys(database, "list", "--json").stdout)}


def test_a_keys_life(guarded: Running, database: str) -> None:
    """A key created while the server runs works at once and is listed without its secret; every worker refuses it soon
    after it is revoked, but no other key.
    """
    assert status(guarded, None) == 401
    made = keys(database, "create", "--tenant", "team")
    secret, key_id = made.stdout.strip(), made.stderr.split()[1]
    other = keys(database, "create", "--tenant", "team").stdout.strip()
    assert [status(guarded, given) for given in (secret, other, secret[:-1] + "x")] == [200, 200, 401]
    assert states(database)[key_id] == "active"
    assert secret not in keys(database, "list").stdout
    assert keys(database, "revoke", key_id).stdout == f"revoked {key_id}\n"
    until(lambda: all(status(guarded, secret) == 401 for _ in range(8)), 30)
    assert states(database)[key_id] == "revoked"
    assert status(guarded, other) == 200
