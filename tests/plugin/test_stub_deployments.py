"""Deployments of a stub server: how it is started, changed and found again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from mlflow.deployments import get_deploy_client
from stores import own_stores
from stub_deployments import kill, refused, started

from mlflow_llm.plugin import endpoint_calls, processes

TOKENS = {"jwt_issuer": "https://idp.example", "jwt_audience": "llm"}
OTHERS = {"max_connections": 60}


def test_a_port_of_another(client: Any, models: Path, stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is ready when its own process listens, not when another process answers at its port."""
    create, config = client.create_deployment, {"port": stranger}
    refused(
        "RESOURCE_CONFLICT", f"cannot listen on 127.0.0.1:{stranger}", create, "a", str(models / "one"), config=config
    )
    monkeypatch.setattr(processes, "must_be_free", lambda *_: None)  # taken between the look and the start
    refused("INTERNAL_ERROR", "in use", create, "a", str(models / "one"), config=config)
    assert client.list_deployments() == []


def test_values_of_python(client: Any, models: Path) -> None:
    """Booleans and numbers become JSON on the command line, and None is left out."""
    config = {"prefix_caching": False, "max_model_len": None, "max_num_seqs": 4, "workers": "1", "dtype": "float32"}
    made = client.create_deployment("a", str(models / "one"), config=config)
    words = started(made)["words"]
    assert {"prefix_caching=false", "max_num_seqs=4", "dtype=float32"} == {
        word for option, word in pairwise(words) if option == "-C"
    }
    assert made["config"] == {"prefix_caching": False, "max_num_seqs": 4, "workers": 1, "dtype": "float32"}


def test_options_of_the_server(client: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the server's command line are passed on: files by their full path, lists as repeated options."""
    monkeypatch.chdir(tmp_path)
    config = {"probe_port": 0, "max_connections": "50", "allowed_host": "llm.example, 10.0.0.7", "trace_content": True}
    made = client.create_deployment("a", str(models / "one"), config=config | {"jwt_jwks": "keys.json"} | TOKENS)
    words = started(made)["words"]
    assert "--trace-content" in words
    given = set(pairwise(words))
    assert given >= {("--probe-port", "0"), ("--max-connections", "50"), ("--jwt-jwks", str(tmp_path / "keys.json"))}
    assert given >= {("--allowed-host", "llm.example"), ("--allowed-host", "10.0.0.7")}
    refused("INVALID_PARAMETER_VALUE", "max_connections cannot change", client.update_deployment, "a", config=OTHERS)
    assert client.update_deployment("a", config={"allowed_host": ["llm.example", "10.0.0.7"]}) == made


def test_a_deployment_with_tls(client: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment with TLS has an https URL, checked by the authority in MLFLOW_LLM_CA; without one it is refused at
    once and nothing is left."""
    authority = Authority(tmp_path)
    cert, key, _ = authority.issue("server")
    config = {"tls_cert": cert, "tls_key": key}
    refused("INTERNAL_ERROR", "MLFLOW_LLM_CA names", client.create_deployment, "a", str(models / "one"), config=config)
    assert client.list_deployments() == []
    monkeypatch.setenv("MLFLOW_LLM_CA", authority.ca)
    made = client.create_deployment("a", str(models / "one"), config=config)
    assert made["url"].startswith("https://127.0.0.1:")
    assert (made["status"], client.get_deployment("a")["status"]) == ("RUNNING", "RUNNING")
    assert client.predict("a", {"prompt": "Hi"})["body"] == {"prompt": "Hi"}


def test_settings_of_an_endpoint(client: Any, models: Path) -> None:
    """Settings of the management API alone are taken by create and update, and kept by a restart of the server."""
    made = client.create_deployment("a", str(models / "one"), config={"scale_to_zero_enabled": "true"})
    assert made["config"] == {"scale_to_zero_enabled": True}
    client.update_deployment("a", config={"max_num_seqs": 2})
    kill(made)
    again = client.update_deployment("a")
    assert again["config"] == {"scale_to_zero_enabled": True, "max_num_seqs": 2}
    assert again["pid"] != made["pid"]


def test_options_of_a_running_server_cannot_change(client: Any, models: Path) -> None:
    """Command-line options of a running server cannot change; the same value in another notation is no change."""
    made = client.create_deployment("a", str(models / "one"), config={"workers": 3})
    for given in ({"trust_remote_code": True}, {"workers": 2}, {"port": 1}, {"host": "0.0.0.0"}):
        reason = f"{next(iter(given))} cannot change while the server runs"
        refused("INVALID_PARAMETER_VALUE", reason, client.update_deployment, "a", config=given)
    same = {"trust_remote_code": False, "workers": "3", "host": "127.0.0.1", "timeout": 600}
    assert client.update_deployment("a", config=same) == made


def test_changes_made_through_the_server_are_shown(client: Any, models: Path) -> None:
    """URI and settings changed through the server are shown, also after it has ended."""
    made = client.create_deployment("a", str(models / "one"), config={"max_num_seqs": 2})
    remote = get_deploy_client(made["url"].replace("http", "llm"))
    remote.update_deployment("a", str(models / "two"), config={"prefix_caching": False})
    assert client.get_deployment("a") == made | {
        "model_uri": str(models / "two"),
        "config": {"max_num_seqs": 2, "prefix_caching": False},
    }
    kill(made)
    assert client.get_deployment("a")["status"] == "STOPPED"
    again = client.update_deployment("a")
    assert (again["model_uri"], again["status"]) == (str(models / "two"), "RUNNING")
    assert again["config"] == {"max_num_seqs": 2, "prefix_caching": False}


def test_an_endpoint_deleted_through_the_server(client: Any, models: Path) -> None:
    """An endpoint deleted through the server is shown as deleted; create names the remedy, and update restores it."""
    made = client.create_deployment("a", str(models / "one"), config={"max_num_seqs": 2})
    get_deploy_client(made["url"].replace("http", "llm")).delete_deployment("a")
    assert client.list_deployments() == [made | {"status": "DELETED"}]
    refused("RESOURCE_ALREADY_EXISTS", "DELETED .*`update`", client.create_deployment, "a", str(models / "one"))
    assert client.update_deployment("a") == made


def test_an_interrupted_update(client: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update whose caller is interrupted goes on, is shown, and is not rolled back by the next start. An update that
    the server refuses changes nothing."""
    made = client.create_deployment("a", str(models / "one"))
    bad = str(models / "bad")
    refused("INVALID_PARAMETER_VALUE", "no good", client.update_deployment, "a", bad, config={"max_num_seqs": 9})
    assert client.get_deployment("a") == made
    interrupted_update(client, models / "two", monkeypatch)
    kill(made)  # before the state is read
    assert client.update_deployment("a")["model_uri"] == str(models / "two")


def interrupted_update(client: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an update whose caller gets Ctrl-C while the server works on it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(endpoint_calls, "await_config", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.update_deployment("a", str(model))


def test_an_update_during_another(client: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update during another is a conflict, and the served model is the one shown."""
    made = client.create_deployment("a", str(models / "one"))
    interrupted_update(client, models / "slow", monkeypatch)
    refused("RESOURCE_CONFLICT", "in progress", client.update_deployment, "a", str(models / "two"))
    assert client.get_deployment("a") == made


def test_relative_paths(client: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of directory, database and MLflow's stores still hold when the server is restarted from
    elsewhere."""
    monkeypatch.chdir(models)
    with own_stores("sqlite:///tracking.db"):
        made = client.create_deployment("a", "./one", config={"database": "sqlite:///x.db"})
    assert made["model_uri"] == str(models / "one")
    assert made["config"] == {"database": f"sqlite:///{models}/x.db"}
    reported = started(made)
    assert reported["MLFLOW_LLM_DATABASE"] == f"sqlite:///{models}/x.db"
    assert reported["MLFLOW_TRACKING_URI"] == made["tracking_uri"] == f"sqlite:///{models}/tracking.db"


def test_a_password_is_not_shown(client: Any, models: Path) -> None:
    """The server gets the database's password, but get and list do not show it."""
    url = "postgresql://me:secret@host/db"
    made = client.create_deployment("a", str(models / "one"), config={"database": url, "require_keys": "true"})
    assert made["config"]["database"] == "postgresql://me:***@host/db"
    assert started(made)["MLFLOW_LLM_DATABASE"] == url
    assert "--require-keys" in started(made)["words"]
