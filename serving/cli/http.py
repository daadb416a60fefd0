"""The HTTP client of the commands, on the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ..system.escape import visible, visible_line
from .http_connection import connector, tls_options
from .key_options import VARIABLE, key_options
from .shared_options import SharedOption

URL_VARIABLE = "MLFLOW_LLM_URL"
NO_KEY = f" (give a key with --key-file or {VARIABLE})"
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
STALE = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)


class _Slot:
    """A connection that is closed when its thread's storage is freed."""

    connection: http.client.HTTPConnection | None = None

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()


class _Kept(threading.local):
    """A slot for each thread."""

    def __init__(self) -> None:
        self.slot = _Slot()


class Client:
    """A client of one server, with a persistent connection for each thread that uses it.

    ``url`` is as in ``connector``. Whatever goes wrong, every method raises ``ClickException``.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 600.0) -> None:
        self._connect, self._place, self._prefix = connector(url)
        self._url = url
        self._timeout = timeout
        self._kept = _Kept()
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def get_text(self, path: str) -> str:
        """Return an answer that is not JSON."""
        with self._answer("GET", path, None) as answer:
            return answer.read().decode(errors="replace")

    def get_bytes(self, path: str) -> bytes:
        """Return an answer that is a file."""
        with self._answer("GET", path, None) as answer:
            return answer.read()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("POST", path, body)

    def post_bytes(self, path: str, body: bytes, content_type: str) -> Any:
        """Post a body that is not JSON, and return the JSON answer."""
        return self._json("POST", path, body, content_type)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("PATCH", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path, None)

    def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        """Return status, JSON object and headers of the answer to a POST, whatever its status."""
        with self._open("POST", path, body) as answer:
            text = answer.read()
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise click.ClickException(
                f"{self._place}{path} does not answer with a JSON object: not an mlflow-llm server?"
            )
        return answer.status, found, answer.headers

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON chunks of a streamed reply, up to ``[DONE]``; an error among them is raised."""
        with self._answer("POST", path, body) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    answer.read()  # what ends the body, so that the connection can be used again
                    return
                chunk = json.loads(line[6:])
                if "choices" not in chunk:
                    raise click.ClickException(_message(chunk))
                yield chunk
            raise click.ClickException("the server closed the connection before the reply was complete")

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Turn errors in reading an answer's JSON into a ``ClickException``: it is of another kind of server."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError):
            raise click.ClickException(f"{self._url} does not answer like an mlflow-llm server") from None

    def close(self) -> None:
        """Close the calling thread's connection."""
        slot = self._kept.slot
        connection, slot.connection = slot.connection, None
        if connection is not None:
            connection.close()

    def _json(self, method: str, path: str, body: Mapping[str, Any] | bytes | None, content_type: str = "") -> Any:
        with self._answer(method, path, body, content_type) as answer:
            text = answer.read()
        try:
            return json.loads(text)
        except ValueError:
            raise click.ClickException(
                f"{self._place}{path} does not answer with JSON: not an mlflow-llm server?"
            ) from None

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, content_type: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the open response, its status checked. Raises ``ClickException``."""
        with self._open(method, path, body, content_type) as answer:
            if answer.status >= 400:
                hint = NO_KEY if answer.status == 401 and "Authorization" not in self._headers else ""
                raise click.ClickException(f"{answer.status}: {_refusal(answer.read())}{hint}")
            yield answer

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, content_type: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the open response. The connection persists only where the response is read to its end."""
        done = False
        try:
            answer = self._ask(method, self._prefix + path, body, content_type)
            yield answer
            done = answer.isclosed() and not answer.will_close
        except (OSError, http.client.HTTPException) as error:
            raise click.ClickException(f"no server answers at {self._place} ({_reason(error)})") from None
        finally:
            if not done:
                self.close()

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, content_type: str
    ) -> http.client.HTTPResponse:
        """Send a body, as JSON if it is not bytes of ``content_type``."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": content_type} if content_type else {})
        kept = self._kept.slot.connection
        if kept is not None:
            with contextlib.suppress(*STALE):  # closed by the server meanwhile: nothing of ours has been taken
                kept.request(method, path, data, headers)
                return kept.getresponse()
            self.close()
        connection = self._kept.slot.connection = self._connect(self._timeout)
        connection.request(method, path, data, headers)
        return connection.getresponse()


def _reason(error: Exception) -> str:
    """Return why the server cannot be reached, and the option that may help."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = visible_line(error.verify_message)
        return f"certificate verify failed: {reason}; --ca names a PEM file with the CA certificates to trust"
    if isinstance(error, ssl.SSLError) and error.reason in NOT_TLS:
        return "it does not speak TLS: write http:// instead of https://"
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return f"{error.strerror}; `mlflow-llm serve` starts one, --url names another"
    return visible_line(getattr(error, "strerror", None) or str(error)) or type(error).__name__


def _refusal(text: bytes) -> str:
    try:
        return _message(json.loads(text))
    except ValueError:
        return visible(text.decode(errors="replace")[:200])


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return visible(str(error.get("message", error) if isinstance(error, dict) else error)[:500])


def first_model(client: Client) -> str:
    """Return the server's first endpoint, named on standard error if there are others. Raises ``ClickException`` for
    none."""
    with client.understood():
        models = client.get("/v1/models")["data"]
        if not models:
            raise click.ClickException("the server has no endpoints")
        name: str = models[0]["id"]
        others = {model["id"].partition(":")[0] for model in models} - {name}
        if others:
            shown = visible_line(", ".join([name, *sorted(others)][:8]))
            click.echo(f"the server has {len(others) + 1} endpoints ({shown}); --model not given: {name}", err=True)
        return name


def url_options(command: Any) -> Any:
    """Add ``--url`` (also from MLFLOW_LLM_URL), ``--key`` and ``--key-file``, ``--ca`` and ``--cert``."""
    command = tls_options(command)
    return click.option(
        "--url",
        cls=SharedOption,
        envvar=URL_VARIABLE,
        default="http://127.0.0.1:8000",
        show_default=True,
        help=f"URL of the server ({URL_VARIABLE}).",
    )(key_options(command))
