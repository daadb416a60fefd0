"""MLflow's deployments target ``llm``: servers on this machine, or one that runs elsewhere (``llm://host:port``).

MLflow loads this module by entry point and wants exactly one client class in it, beside ``run_local`` and
``target_help``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException

from . import calls
from . import local_servers as servers

FLAVOR = "llm"


def run_local(name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None) -> None:
    """Serve ``model_uri`` as endpoint ``name`` in the foreground until interrupted.

    MLflow's documentation names ``target`` first; what it calls has no such argument.
    """
    _check_flavor(flavor)
    ended = subprocess.call(servers.command(servers.check_name(name), model_uri, config or {}))
    if ended not in (0, -2, 130):
        raise MlflowException(f"the server ended with exit status {ended}")


def target_help() -> str:
    """What ``mlflow deployments help -t llm`` prints."""
    return (
        "Target llm serves a model logged with the llm flavor from this machine:\n"
        "  mlflow deployments create -t llm -n assistant -m models:/assistant@champion [-C workers=2]\n"
        "The server listens on loopback, on a free port unless -C port=… says otherwise; `get` shows its URL.\n"
        f"-C keys: {', '.join(servers.SERVER_KEYS)}, require_keys, and every engine setting.\n"
        "`update` starts the new version, waits for its first token, moves callers over, then drains the old.\n"
        "Target llm://host:port is a server that runs already: list, get and predict work there.\n"
        f"An API key is read from {calls.KEY_VARIABLE}; the state is in {servers.STATE_VARIABLE} or XDG's folder."
    )


def _check_flavor(flavor: str | None) -> None:
    if flavor not in (None, FLAVOR):
        raise MlflowException.invalid_parameter_value(f"flavor: {flavor!r}; this target serves {FLAVOR!r} only")


class LlmDeploymentClient(BaseDeploymentClient):
    """Deployments and endpoints are the same here: a deployment is a server with one endpoint of its name."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        parts = urlsplit(target_uri)
        self._remote = f"http://{parts.netloc}" if parts.scheme == "llm" and parts.netloc else None

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Start a server for ``model_uri``; returns when it has generated a token."""
        self._local_only()
        _check_flavor(flavor)
        servers.must_be_new(name)
        with servers.locked(name):
            servers.must_be_new(name)
            record = servers.start(name, model_uri, config or {})
            servers.write(record)
        return servers.read(name)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Swap in a new version without dropping a request: the new server warms, callers move, the old one drains.

        The new server has a port of its own (a fixed ``port`` can only be moved after the old one has gone).
        """
        self._local_only()
        _check_flavor(flavor)
        with servers.locked(servers.check_name(name)):
            old = servers.read(name)
            merged = {**old["config"], **(config or {})}
            fresh = {key: value for key, value in merged.items() if key != "port"}
            record = servers.start(name, model_uri or old["model_uri"], fresh)
            servers.write(record)
            servers.stop(old)
        return servers.read(name)

    def delete_deployment(self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None) -> None:
        """Drain and end the server. A deployment that does not exist is no error."""
        self._local_only()
        with servers.locked(servers.check_name(name)):
            if name in servers.names():
                servers.stop(servers.read(name))
                servers.remove(name)

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        if self._remote is not None:
            listed = calls.ask("GET", f"{self._remote}/api/2.0/endpoints/").json()["endpoints"]
            return [{**entry, "flavor": FLAVOR, "url": self._remote} for entry in listed]
        return [servers.read(name) for name in servers.names()]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        if self._remote is not None:
            entry = calls.ask("GET", f"{self._remote}/api/2.0/endpoints/{name}").json()
            return {**entry, "flavor": FLAVOR, "url": self._remote}
        return servers.read(name)

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """The reply to a dict; of several rows ``{"predictions": [reply, …]}``."""
        url = self._url(deployment_name or endpoint)
        bodies, single = calls.requests_of(inputs)
        replies = [calls.ask("POST", url, body).json() for body in bodies]
        return PredictionsResponse(replies[0] if single else {"predictions": replies})

    def predict_stream(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The chunks of the reply to one request."""
        bodies, _ = calls.requests_of(inputs)
        if len(bodies) != 1:
            raise MlflowException.invalid_parameter_value("inputs: predict_stream takes one request")
        return calls.chunks(self._url(deployment_name or endpoint), bodies[0])

    def create_endpoint(self, name: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """``config`` holds ``model_uri`` and what ``create_deployment`` takes as config."""
        given = dict(config or {})
        model_uri = given.pop("model_uri", None)
        if not model_uri:
            raise MlflowException.invalid_parameter_value("config: expected model_uri, such as models:/a@champion")
        return self.create_deployment(name, model_uri, config=given)

    def update_endpoint(self, endpoint: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        given = dict(config or {})
        return self.update_deployment(endpoint, given.pop("model_uri", None), config=given)

    def delete_endpoint(self, endpoint: str) -> None:
        self.delete_deployment(endpoint)

    def list_endpoints(self) -> list[dict[str, Any]]:
        return self.list_deployments()

    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        return self.get_deployment(endpoint)

    def _local_only(self) -> None:
        if self._remote is not None:
            raise MlflowException(f"{self.target_uri} is a running server; only target llm can do that")

    def _url(self, name: str | None) -> str:
        if not name:
            raise MlflowException.invalid_parameter_value("deployment_name or endpoint: name one")
        base = self._remote or servers.read(name)["url"]
        return f"{base}/endpoints/{name}/invocations"
