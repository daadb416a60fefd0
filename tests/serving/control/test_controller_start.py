"""A controller process whose start fails, and one whose server ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from serving_process import INSTANT_CORE

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering.accounts.keys import Keys
from mlflow_llm.serving.metering.store.store import Store
from mlflow_llm.serving.system.child import FAREWELL


def said_at_start(directory: Path, spec: ServeSpec) -> tuple[dict[str, str], str]:
    """Return the last step that a controller process reports and its standard error, while its server still runs."""
    (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", "mlflow_llm.serving.control.main", str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stderr is not None
        said = [json.loads(line) for line in controller.stdout]
        complained = controller.stderr.read()
        assert controller.wait(240) == 1
    return said[-1], complained


def test_a_failed_start_ends_with_its_reason_alone(tmp_path: Path, instant_bundle: Bundle) -> None:
    """A controller process whose start fails reports the reason and ends, even while its server keeps its standard
    input open.
    """
    broken = msgspec.structs.replace(instant_bundle, model_dir=str(tmp_path / "nowhere"))
    endpoint = EndpointSpec(name="assistant", entity="assistant", bundle=broken, core=INSTANT_CORE)
    spec = ServeSpec(endpoints=(endpoint,), settings=ServerSettings(), runtime_dir=str(tmp_path / "r"))
    said, complained = said_at_start(tmp_path, spec)
    assert said["stage"] == "failed"
    assert said["message"].startswith("assistant: ")
    assert "Fatal" not in complained
    assert "stdin" not in complained


@pytest.mark.parametrize(("required", "revoked"), [(False, False), (True, False), (False, True)])
def test_keys_that_are_not_read_are_warned_of(
    tmp_path: Path, instant_bundle: Bundle, required: bool, revoked: bool
) -> None:
    """A server that does not require keys says so if its database has active ones."""
    database = f"sqlite:///{tmp_path}/s.db"
    keys = Keys(Store(database))
    _, key = keys.create("team")
    if revoked:
        keys.revoke(key.key_id)
    broken = msgspec.structs.replace(instant_bundle, model_dir=str(tmp_path / "nowhere"))
    endpoint = EndpointSpec(name="assistant", entity="assistant", bundle=broken, core=INSTANT_CORE)
    settings = ServerSettings(database=database, require_keys=required)
    _, complained = said_at_start(
        tmp_path, ServeSpec(endpoints=(endpoint,), settings=settings, runtime_dir=str(tmp_path / "r"))
    )
    assert ("the database has 1 active API key, which this server does not read" in complained) is not (
        required or revoked
    )


def test_a_store_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    """A store that cannot be opened ends the start with the database and the reason, without a traceback."""
    spec = ServeSpec(settings=ServerSettings(database="mysql://me:s3cret@host/db"), runtime_dir=str(tmp_path / "r"))
    said, complained = said_at_start(tmp_path, spec)
    message = "database mysql://me:***@host/db: is neither sqlite:// nor postgresql://"
    assert said == {"stage": "failed", "message": message}
    assert complained == ""


@pytest.mark.parametrize("farewell", [b"", FAREWELL])
def test_a_servers_directory_is_its_own_to_remove(tmp_path: Path, farewell: bytes) -> None:
    """The controller process removes a dead server's directory, even while the system still reports the server as
    alive.
    """
    directory = tmp_path / "server"
    directory.mkdir()
    (directory / "spec.json").write_bytes(msgspec.json.encode(ServeSpec(runtime_dir=str(tmp_path / "r"))))
    command = [sys.executable, "-m", "mlflow_llm.serving.control.main", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdin is not None
        assert controller.stdout is not None
        assert json.loads(controller.stdout.readline()) == {"stage": "ready"}
        os.write(controller.stdin.fileno(), farewell)
        controller.stdin.close()
        assert controller.wait(240) == 0
    assert directory.exists() == bool(farewell)
