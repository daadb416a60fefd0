"""The few HTTP calls that the commands make, on the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click


class Client:
    """One server. ``url`` is ``http://host:port`` or ``https://…``, with or without a path prefix."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise click.BadParameter(f"{url!r} is no http(s) URL")
        self._secure = parts.scheme == "https"
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        connection = self._connection()
        try:
            return json.loads(self._ask(connection, "GET", path, None).read())
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        connection = self._connection()
        try:
            return json.loads(self._ask(connection, "POST", path, body).read())
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON chunks of a streamed reply, up to ``[DONE]``. Raises ``ClickException`` for an error in it."""
        connection = self._connection()
        try:
            for line in self._ask(connection, "POST", path, body):
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                chunk = json.loads(line[6:])
                if "choices" not in chunk:
                    raise click.ClickException(_message(chunk))
                yield chunk
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, data, self._headers)
            answer = connection.getresponse()
        except OSError as error:
            raise click.ClickException(f"no server answers at {self._host}:{self._port} ({error})") from None
        if answer.status >= 400:
            text = answer.read()
            try:
                message = _message(json.loads(text))
            except ValueError:
                message = text.decode(errors="replace")[:200]
            raise click.ClickException(f"{answer.status}: {message}")
        return answer


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def url_options(command: Any) -> Any:
    """``--url`` and ``--key`` (also from MLFLOW_LLM_URL and MLFLOW_LLM_KEY)."""
    command = click.option("--key", envvar="MLFLOW_LLM_KEY", help="API key.")(command)
    return click.option(
        "--url", envvar="MLFLOW_LLM_URL", default="http://127.0.0.1:8000", show_default=True, help="The server."
    )(command)
