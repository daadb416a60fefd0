"""MLflow's deployments target ``llm``: servers on this machine, or one that runs elsewhere.

The target of a server elsewhere is ``llm://host:port`` or ``llm:https://host:port``. MLflow loads this module by entry
point and requires exactly one client class in it, besides ``run_local`` and ``target_help``.
"""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors.llm.model.names import FLAVOR_NAME
from mlflow_llm.serving.system.files import STATE_VARIABLE

from . import endpoint_calls as endpoints
from . import http_calls, model_uris, records
from . import local_config as configs
from . import local_servers as servers
from .predict_inputs import requests_of


def run_local(name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None) -> None:
    """Serve ``model_uri`` as endpoint ``name`` in the foreground until interrupted.

    MLflow's documentation gives this function a first argument ``target``, but MLflow calls it without one.
    """
    _check_flavor(flavor)
    given = configs.cleaned(config)
    configs.check(given, others=())
    words = configs.command(records.check_name(name), model_uris.absolute(model_uri), given)
    ended = subprocess.call(words, env=configs.environment(given, model_uris.stores()))
    if ended not in (0, -2, 130):
        raise MlflowException(f"the server ended with exit status {ended}")


def target_help() -> str:
    """Return the text that ``mlflow deployments help -t llm`` prints."""
    return (
        "Target llm serves a model logged with the llm flavor from this machine:\n"
        "  mlflow deployments create -t llm --name assistant -m models:/assistant@champion [-C workers=2]\n"
        "The server listens on loopback, on a free port unless you set -C port=…; `get` shows its URL.\n"
        f"-C accepts the options of `mlflow-llm serve`\n{_listed(configs.SERVER_KEYS)},\n"
        f"every engine setting, and these settings of an endpoint: {', '.join(endpoints.ENTITY_KEYS)}.\n"
        "`update` warms the new version in the running server, moves callers to it, and drains the old one. URL and\n"
        "port stay the same, and no request is dropped. If the new version fails, the old one keeps serving.\n"
        "Target llm://host:port, or llm:https://host:port, is a server that is already running. The same commands\n"
        f"manage its endpoints (-C: {', '.join(endpoints.ENTITY_KEYS)}, and every engine setting).\n"
        f"The API key is read from {http_calls.KEY_VARIABLE}. {http_calls.CA_VARIABLE} names a PEM file with CA\n"
        f"certificates, {http_calls.CERT_VARIABLE} one with the client's certificate and key.\n"
        f"State is kept in {STATE_VARIABLE}, or in the user's state directory (XDG)."
    )


def _listed(names: tuple[str, ...]) -> str:
    return textwrap.fill(", ".join(names), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _named(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise MlflowException.invalid_parameter_value(f"name: {name!r:.80}; expected the name of an endpoint")
    return name


def _check_flavor(flavor: str | None) -> None:
    if flavor not in (None, FLAVOR_NAME):
        raise MlflowException.invalid_parameter_value(f"flavor: {flavor!r}; this target serves {FLAVOR_NAME!r} only")


def _one_name(name: str | None, endpoint: str | None) -> Any:
    if name is not None and endpoint not in (None, name):
        raise MlflowException.invalid_parameter_value(
            f"endpoint: {endpoint!r:.80} beside the deployment {name!r:.80}; they are the same here: name one"
        )
    return endpoint if name is None else name


def _server_of(target: str) -> str | None:
    """Return the URL of the server that ``target`` names, or None.

    ``llm://host:port`` is plain HTTP; ``llm:https://host:port`` (or ``llm:http://…``) is used as written.
    """
    parts = urlsplit(target)
    if parts.scheme != "llm":
        return None
    if parts.netloc:
        return f"http://{parts.netloc}"
    written = urlsplit(parts.path)
    return f"{written.scheme}://{written.netloc}" if written.scheme in ("http", "https") and written.netloc else None


class LlmDeploymentClient(BaseDeploymentClient):
    """MLflow's deployments client for the target ``llm``; a deployment and an endpoint are the same thing here.

    If the target has a URL, they are endpoints of that server; otherwise they are servers on this machine with one
    endpoint each. Every method raises ``MlflowException``.
    """

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        self._remote = _server_of(target_uri)

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Serve ``model_uri`` as ``name``; return once it has generated a token."""
        _check_flavor(flavor)
        name = _one_name(name, endpoint)
        if self._remote is not None:
            uri, given = model_uris.absolute(model_uri), configs.cleaned(config)
            return self._shown(endpoints.create(self._remote, _named(name), uri, given))
        servers.create(name, model_uri, config)
        return servers.get(name)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Roll over to a new version without dropping a request.

        The new version warms up, callers move to it, and the old one drains. ``config`` changes engine settings; those
        that it does not name stay, as do URL and port. If the new version fails, this raises an error and the old
        version keeps serving.
        """
        _check_flavor(flavor)
        name = _one_name(name, endpoint)
        if self._remote is not None:
            return self._shown(endpoints.update(self._remote, _named(name), *self._merged(name, model_uri, config)))
        servers.update(name, model_uri, config)
        return servers.get(name)

    def delete_deployment(self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None) -> None:
        """Drain and delete a deployment. It is not an error if there is none."""
        name = _one_name(name, endpoint)
        if config:
            raise MlflowException.invalid_parameter_value(f"config: {', '.join(map(str, config))}; delete takes none")
        if self._remote is None:
            servers.delete(name)
        elif any(found["name"] == name for found in endpoints.list_all(self._remote)):
            endpoints.delete(self._remote, name)

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        if self._remote is not None:
            found = [self._shown(one) for one in endpoints.list_all(self._remote)]
        else:
            found = servers.list_all()
        return [one for one in found if endpoint in (None, one["name"])]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        name = _one_name(name, endpoint)
        if self._remote is not None:
            return self._shown(endpoints.get(self._remote, _named(name)))
        return servers.get(name)

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """Answer one request (a dict) with its reply, or several with ``{"predictions": [reply, …]}``.

        ``inputs`` is a dict, a list of dicts, or a DataFrame with one request per row.
        """
        bodies, single = requests_of(inputs)
        if any(body.get("stream") for body in bodies):
            raise MlflowException.invalid_parameter_value("stream: True is not allowed; predict_stream streams")
        url = self._url(_one_name(deployment_name, endpoint))
        replies = [http_calls.request_json("POST", url, body) for body in bodies]
        return PredictionsResponse(replies[0] if single else {"predictions": replies})

    def predict_stream(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Stream the reply to one request: chunk objects as they are generated."""
        bodies, _ = requests_of(inputs)
        if len(bodies) != 1:
            raise MlflowException.invalid_parameter_value("inputs: predict_stream takes one request")
        if bodies[0].get("stream") is False:
            raise MlflowException.invalid_parameter_value("stream: False is not allowed; predict does not stream")
        return http_calls.stream_chunks(self._url(_one_name(deployment_name, endpoint)), bodies[0])

    def create_endpoint(self, name: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Create an endpoint, like ``create_deployment``; ``config`` holds ``model_uri`` and the settings."""
        given = configs.mapping(config)
        model_uri = given.pop("model_uri", None)
        if not model_uri:
            raise MlflowException.invalid_parameter_value("config: expected model_uri, such as models:/a@champion")
        return self.create_deployment(name, model_uri, config=given)

    def update_endpoint(self, endpoint: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        given = configs.mapping(config)
        return self.update_deployment(endpoint, given.pop("model_uri", None), config=given)

    def delete_endpoint(self, endpoint: str) -> None:
        self.delete_deployment(endpoint)

    def list_endpoints(self) -> list[dict[str, Any]]:
        return self.list_deployments()

    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        return self.get_deployment(endpoint)

    def _shown(self, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "flavor": FLAVOR_NAME, "url": self._remote}

    def _merged(self, name: str, model_uri: str | None, config: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        """Return the model URI and config for an update; anything that the caller leaves out stays unchanged."""
        assert self._remote is not None
        given = configs.cleaned(config)
        named = None if model_uri is None else model_uris.absolute(model_uri)
        endpoint = endpoints.get(self._remote, _named(name))
        if endpoint.get("permission_level") in ("CAN_QUERY", "CAN_VIEW"):
            raise MlflowException(
                f"the key lacks the scope 'manage': it may not change {name!r}", error_code=int(http_calls.CODES[403])
            )
        served = endpoints.entities(endpoint)
        if len(served) == 1:
            return named or endpoints.uri_of(served[0]), {**endpoints.settings_of(served[0]), **given}
        if named is None:
            raise MlflowException.invalid_parameter_value(f"model_uri: {name!r} serves {len(served)} models")
        return named, given

    def _url(self, name: str | None) -> str:
        if not name:
            raise MlflowException.invalid_parameter_value("deployment_name or endpoint: name one")
        base = self._remote or servers.url_of(name)
        return f"{base}/endpoints/{quote(name, safe='')}/invocations"
