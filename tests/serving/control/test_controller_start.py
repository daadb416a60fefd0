"""A controller process whose start fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
from serving_process import INSTANT_CORE

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec


def said_at_start(directory: Path, spec: ServeSpec) -> tuple[dict[str, str], str]:
    """The last step that a controller process reports, and what it writes on standard error, while its server still
    lives."""
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
    """The controller process says why and ends while its server still holds its standard input: nothing is said of
    that."""
    broken = msgspec.structs.replace(instant_bundle, model_dir=str(tmp_path / "nowhere"))
    endpoint = EndpointSpec(name="assistant", entity="assistant", bundle=broken, core=INSTANT_CORE)
    spec = ServeSpec(endpoints=(endpoint,), settings=ServerSettings(), runtime_dir=str(tmp_path / "r"))
    said, complained = said_at_start(tmp_path, spec)
    assert said["stage"] == "failed"
    assert said["message"].startswith("assistant: ")
    assert "Fatal" not in complained
    assert "stdin" not in complained


def test_a_store_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    """The database and the reason, without a trace."""
    spec = ServeSpec(settings=ServerSettings(database="mysql://me:s3cret@host/db"), runtime_dir=str(tmp_path / "r"))
    said, complained = said_at_start(tmp_path, spec)
    message = "database mysql://me:***@host/db: is neither sqlite:// nor postgresql://"
    assert said == {"stage": "failed", "message": message}
    assert complained == ""
