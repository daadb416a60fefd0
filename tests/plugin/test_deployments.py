"""The deployments plugin as MLflow loads it."""

from __future__ import annotations

import pandas as pd
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.deployments.base import BaseDeploymentClient
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin import calls, deployments, local_servers


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv(local_servers.STATE_VARIABLE, str(tmp_path))


def test_module_has_one_client():
    """MLflow demands exactly one client class beside its base in the module."""
    found = [
        value
        for value in vars(deployments).values()
        if isinstance(value, type) and issubclass(value, BaseDeploymentClient) and value is not BaseDeploymentClient
    ]
    assert found == [deployments.LlmDeploymentClient]
    assert "models:/" in deployments.target_help()


def test_unknown_deployment():
    """An unknown deployment is an MlflowException; deleting one is none; listing is empty."""
    client = deployments.LlmDeploymentClient("llm")
    with pytest.raises(MlflowException, match="no deployment is called 'nobody'"):
        client.get_deployment("nobody")
    client.delete_deployment("nobody")
    assert client.list_deployments() == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a" * 65, None])
def test_bad_names(name):
    """A name that could leave the state directory is refused."""
    with pytest.raises(MlflowException, match="name"):
        deployments.LlmDeploymentClient("llm").create_deployment(name, "models:/a/1")


def test_remote_target_changes_nothing():
    """A running server's target refuses create, update and delete."""
    client = deployments.LlmDeploymentClient("llm://127.0.0.1:1")
    with pytest.raises(MlflowException, match="only target llm"):
        client.create_deployment("a", "models:/a/1")
    with pytest.raises(MlflowException, match="no server answers"):
        client.list_deployments()


def test_requests_of_a_frame():
    """A row is a request without its empty cells; messages spread over rows are put together again."""
    rows = pd.DataFrame([{"prompt": "a", "max_tokens": 2}, {"prompt": "b"}])
    assert calls.requests_of(rows) == ([{"prompt": "a", "max_tokens": 2.0}, {"prompt": "b"}], False)
    spread = pd.DataFrame({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
    assert calls.requests_of(spread) == ([{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}], True)


def test_a_reused_process_id_is_not_ours():
    """A record whose process number now belongs to another process counts as stopped."""
    import os

    assert not local_servers.is_running({"pid": os.getpid(), "started": 1.0})


def test_entry_point():
    """MLflow finds the target by its entry point."""
    from importlib.metadata import entry_points

    if not [e for e in entry_points(group="mlflow.deployments") if e.name == "llm"]:
        pytest.skip("the project's metadata is older than its entry points: install it again")
    assert isinstance(get_deploy_client("llm"), deployments.LlmDeploymentClient)
