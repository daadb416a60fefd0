"""The deployments plugin as MLflow loads it."""

from __future__ import annotations

import pytest
from mlflow.deployments import get_deploy_client
from mlflow.deployments.base import BaseDeploymentClient
from mlflow.exceptions import MlflowException

from mlflow_llm.plugin import deployments, endpoint_calls, http_calls, local_config
from mlflow_llm.serving.cli.serve.command import serve
from mlflow_llm.serving.system.files import STATE_VARIABLE


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))


def test_module_has_one_client():
    """The module has exactly one client class beside its base, as MLflow demands."""
    found = [
        value
        for value in vars(deployments).values()
        if isinstance(value, type) and issubclass(value, BaseDeploymentClient) and value is not BaseDeploymentClient
    ]
    assert found == [deployments.LlmDeploymentClient]
    assert "models:/" in deployments.target_help()


def test_unknown_deployment():
    """Getting an unknown deployment is an MlflowException, deleting it is not, and the list is empty."""
    client = deployments.LlmDeploymentClient("llm")
    with pytest.raises(MlflowException, match="no deployment is called 'nobody'"):
        client.get_deployment("nobody")
    client.delete_deployment("nobody")
    assert client.list_deployments() == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", "we ird", ".b", "a" * 64, None])
def test_bad_names(name):
    """Names that the management API does not allow, such as ones that leave the state directory, are refused."""
    with pytest.raises(MlflowException, match="name"):
        deployments.LlmDeploymentClient("llm").create_deployment(name, "models:/a/1")


def test_a_server_that_does_not_answer():
    """Every call on a target without a server is an MlflowException that says so."""
    client = deployments.LlmDeploymentClient("llm://127.0.0.1:1")
    for call in (
        lambda: client.create_deployment("a", "models:/a/1"),
        lambda: client.update_deployment("a", "models:/a/1"),
        lambda: client.delete_deployment("a"),
        lambda: client.list_deployments(),
    ):
        with pytest.raises(MlflowException, match="no server answers"):
            call()


@pytest.mark.parametrize(
    ("uri", "entity"),
    [
        ("models:/a/3", {"entity_name": "a", "entity_version": "3"}),
        ("models:/a@champion", {"entity_name": "a", "entity_version": "@champion"}),
        ("models:/m-0123", {"entity_name": "models:/m-0123"}),
        ("runs:/x/model", {"entity_name": "runs:/x/model"}),
        ("models:/a/latest", {"entity_name": "models:/a/latest"}),
        ("/srv/chat", {"entity_name": "/srv/chat"}),
    ],
)
def test_a_model_uri_is_an_entity_and_back(uri, entity):
    """A model URI becomes the API's entity, and the entity becomes the same URI."""
    assert endpoint_calls.entity_of(uri) == entity
    assert endpoint_calls.uri_of(entity) == uri


def test_the_latest_version_of_a_command_line():
    """A model given as latest is shown as a version called ``latest``, which is not an alias."""
    assert endpoint_calls.uri_of({"entity_name": "a", "entity_version": "latest"}) == "models:/a/latest"


def test_config_is_engine_settings():
    """Values of the command line are read as JSON, and an unknown key is refused by name."""
    config = endpoint_calls.config_of("models:/a/1", {"max_num_seqs": "4", "dtype": "bfloat16"})
    (entity,) = config["served_entities"]
    assert entity["engine_settings"] == {"max_num_seqs": 4, "dtype": "bfloat16"}
    with pytest.raises(MlflowException, match="'port' cannot be set here"):
        endpoint_calls.config_of("models:/a/1", {"port": 1})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"workers": "0"}, "workers: 0 is not allowed; expected an integer from 1 to 64"),
        ({"port": "abc"}, "port: 'abc' is not allowed; expected an integer from 0 to 65535"),
        ({"threads": 0}, "threads: 0 is not allowed; expected an integer from 1 to 1024, or null"),
        ({"in_process": "true"}, "in_process: True is not allowed; expected false"),
        ({"require_keys": "yes"}, "require_keys: 'yes' is not allowed; expected true or false"),
        ({"require_keys": 1}, "require_keys: 1 is not allowed; expected true or false"),
        ({"require_keys": True}, "require_keys: True is not allowed; expected false without --database"),
        ({"profile": "x"}, "profile: 'x' is not allowed; expected one of 'open'"),
        ({"colour": 1}, "'colour' is unknown; expected host"),
        ({"max_conections": 1}, "'max_conections' is unknown; did you mean 'max_connections'?"),
        ({"socket": "a.sock"}, "'socket' is not for deployments: a deployment is found by its port"),
        ({"tls_key": "server.key"}, "tls_key: '.*server.key' is not allowed; expected null without tls_cert"),
        ({"probe_port": 70000}, "probe_port: 70000 is not allowed"),
        ({"allowed_host": "a b"}, "allowed_hosts: .* is not allowed"),
        ({"timeout": "NaN"}, "timeout: 'NaN' is not allowed"),
        ("workers=1", "config: expected a dict, not str"),
    ],
)
def test_config_that_is_refused(config, reason):
    """A configuration with which the server could not start is refused at once by field and value."""
    with pytest.raises(MlflowException, match=reason) as refused:
        deployments.LlmDeploymentClient("llm").create_deployment("a", "models:/a/1", config=config)
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"


def test_every_option_of_the_server_is_known():
    """Each option of ``mlflow-llm serve`` is a key of ``-C``, or refused with an alternative, or the name of an engine
    setting too."""
    names = {option.lstrip("-").replace("-", "_") for one in serve.params for option in one.opts if option[:2] == "--"}
    assert names - {"engine"} == {*local_config.SERVER_KEYS, *local_config.REFUSED_KEYS}
    assert "engine" in local_config.ENGINE_KEYS


def test_a_key_in_a_file(monkeypatch, tmp_path):
    """MLFLOW_LLM_KEY may be @FILE, as for the commands; an invalid key is refused and not sent."""
    (tmp_path / "ops.key").write_text("sk-abc\n")
    monkeypatch.setenv("MLFLOW_LLM_KEY", f"@{tmp_path / 'ops.key'}")
    assert http_calls.auth_headers() == {"Authorization": "Bearer sk-abc"}
    monkeypatch.setenv("MLFLOW_LLM_KEY", f"@{tmp_path / 'nothing'}")
    with pytest.raises(MlflowException, match=r"MLFLOW_LLM_KEY: .*nothing: No such file"):
        http_calls.auth_headers()


def test_entry_point():
    """MLflow finds the target by its entry point."""
    from importlib.metadata import entry_points

    if not [e for e in entry_points(group="mlflow.deployments") if e.name == "llm"]:
        pytest.skip("the project's metadata is older than its entry points: install it again")
    assert isinstance(get_deploy_client("llm"), deployments.LlmDeploymentClient)


def test_a_key_that_does_not_manage_changes_nothing(monkeypatch):
    """A key without management rights is told so, and not that the endpoint serves no model."""
    brief = {"name": "chat", "state": {"ready": "READY", "config_update": "NOT_UPDATING"}}
    monkeypatch.setattr(endpoint_calls, "get", lambda *_: brief | {"permission_level": "CAN_QUERY"})
    client = deployments.LlmDeploymentClient("llm://127.0.0.1:1")
    with pytest.raises(MlflowException, match="lacks the scope 'manage'") as refused:
        client.update_deployment("chat")
    assert refused.value.error_code == "PERMISSION_DENIED"
