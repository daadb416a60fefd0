"""Models that cannot be served, and servers of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException
from stub_deployments import refused

from mlflow_llm.plugin import records
from mlflow_llm.serving.cli import cli


@pytest.mark.parametrize(
    ("uri", "code", "reason"),
    [
        ("nothing", "RESOURCE_DOES_NOT_EXIST", "nothing"),
        ("sk", "INVALID_PARAMETER_VALUE", "logged with the flavors sklearn"),
        (None, "INVALID_PARAMETER_VALUE", "model_uri: None is not allowed"),
    ],
)
def test_a_model_that_cannot_be_served(client: Any, models: Path, uri: str | None, code: str, reason: str) -> None:
    """A model that cannot be served is refused before a server is started, with an error code."""
    given = uri if uri is None else str(models / uri)
    refused(code, reason, client.create_deployment, "a", given)
    assert client.list_deployments() == []
    assert not records.log_of("a").exists()


def test_a_target_of_another_kind(stranger: int) -> None:
    """Foreign JSON of a target is an MlflowException, too."""
    client = get_deploy_client(f"llm://127.0.0.1:{stranger}")
    for call in (client.list_deployments, lambda: client.get_deployment("a"), lambda: client.update_deployment("a")):
        with pytest.raises(MlflowException, match="does not answer like an mlflow-llm server"):
            call()


@pytest.mark.parametrize("words", [("endpoints",), ("chat", "Hi"), ("bench",)])
def test_commands_at_a_server_of_another_kind(stranger: int, words: tuple[str, ...]) -> None:
    """The commands chat, bench and endpoints report a foreign server in one line."""
    done = CliRunner().invoke(cli, [*words, "--url", f"http://127.0.0.1:{stranger}"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert f"127.0.0.1:{stranger} does not answer like an mlflow-llm server" in done.stderr
