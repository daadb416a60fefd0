"""Who answers a batch's rows: a server, or a model in this process."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import click

from ..dialects.errors import OPENAI_ERRORS, openai_error
from ..errors import InvalidField, ServingError, Unavailable
from .batch_rows import Row
from .http import Client, first_model

BUSY = (429, 502, 503)  # statuses that say nothing of the row: it is asked again
KEY_REFUSED = (401, 403)


class RowAnswer(NamedTuple):
    """As the line in the output has it."""

    status: int
    body: dict[str, Any]


class Retry(Exception):
    """The row was not answered for no fault of its own; ``after`` seconds, where it was said."""

    def __init__(self, told: str, after: float | None = None) -> None:
        super().__init__(told)
        self.after = after


class Backend(Protocol):
    concurrency: int

    def ask(self, row: Row) -> RowAnswer:
        """Raises ``Retry``, and ``ClickException`` where no row will be answered."""
        ...

    def close(self) -> None: ...


class ServerBackend:
    concurrency = 32

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._client = Client(url, key)
        self._model = model or first_model(self._client)

    def ask(self, row: Row) -> RowAnswer:
        try:
            path, body = row.asked
        except InvalidField as error:
            return refused(error)
        try:
            status, found, after = self._client.ask(path, {"model": self._model, **body})
        except click.ClickException as error:
            raise Retry(error.message) from None
        if status in BUSY:
            raise Retry(f"{status}: {_message(found)}", after)
        if status in KEY_REFUSED:
            raise click.ClickException(f"{status}: {_message(found)}")
        return RowAnswer(status, found)

    def close(self) -> None:
        """Connections go with their threads."""


class ModelBackend:
    """``uri`` is a logged model's, or of a source that is logged on the way, as ``serve`` does. ``settings`` are engine
    settings, which replace the saved ones."""

    def __init__(self, uri: str, settings: dict[str, Any], stop: threading.Event) -> None:
        from mlflow_llm.flavors.llm.bundle_reader import configured
        from mlflow_llm.flavors.llm.model_cache import logged_root
        from mlflow_llm.flavors.llm.session import Session

        bundle, config = configured(logged_root(uri), settings)
        self._session = Session(bundle, config.settings, config.request_defaults)
        self._stop = stop
        self.concurrency = config.settings.max_num_seqs
        self._session.connect()

    def ask(self, row: Row) -> RowAnswer:
        try:
            _, body = row.asked
            request = self._session.valid(body)
            return RowAnswer(200, self._session.encode(request, self._session.reply(request, self._stop)))
        except Unavailable as error:
            raise Retry(error.message, error.retry_after) from None
        except ServingError as error:
            return refused(error)

    def close(self) -> None:
        self._session.close()


def refused(error: ServingError) -> RowAnswer:
    return RowAnswer(error.status, openai_error(error))


def line_of(row: Row, answered: RowAnswer) -> dict[str, Any]:
    """OpenAI's line of output. Of a row that failed ``error`` says it again, where few would look for a status."""
    failed = answered.status >= 400
    told: dict[str, Any] | None = None
    if failed:
        error = answered.body.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        told = {"code": code or OPENAI_ERRORS["internal"][0], "message": _message(answered.body)}
    response = {"status_code": answered.status, "request_id": answered.body.get("id", ""), "body": answered.body}
    return {"id": row.key, "custom_id": row.custom_id, "response": response, "error": told}


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
