"""Backends of a batch: a server, or a model in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import click

from ...dialects.errors import OPENAI_ERRORS, openai_error
from ...interface.errors import InvalidField, ServingError, Unavailable
from ...system.backoff import Backoff
from ..http import Client, first_model
from .rows import Row

R = TypeVar("R")
A = TypeVar("A")
BUSY = (429, 502, 503)  # statuses that say nothing of the row: it is asked again
KEY_REFUSED = (401, 403)
MAX_RETRIES = 7
FIRST_WAIT, MAX_WAIT = 0.5, 60.0  # seconds before a row is asked again


class RowAnswer(NamedTuple):
    """The answer to a row: HTTP status and body, as its line in the output has them. ``request_id`` is the server's id
    of the request, by which its log has a refused one."""

    status: int
    body: dict[str, Any]
    request_id: str = ""


class Retry(Exception):
    """A row was not answered, through no fault of its own: try it again, ``after`` seconds where that is known."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Backend(Protocol):
    """A thread-safe backend that answers rows."""

    concurrency: int

    def ask(self, row: Row) -> RowAnswer:
        """Answer a row. Raises ``Retry``, or ``ClickException`` where no row can be answered."""
        ...

    def close(self) -> None: ...


class ServerBackend:
    """A server, asked over HTTP."""

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
            status, found, headers = self._client.ask(path, {"model": self._model, **body})
        except click.ClickException as error:
            raise Retry(error.message) from None
        if status in BUSY and not _is_spent(found):
            after = headers.get("Retry-After", "")
            raise Retry(f"{status}: {_message(found)}", float(after) if after.isdecimal() else None)
        if status in (*BUSY, *KEY_REFUSED):
            raise click.ClickException(f"{status}: {_message(found)}")
        return RowAnswer(status, found, headers.get("X-Request-Id", ""))

    def close(self) -> None:
        """Do nothing: connections are closed with their threads."""


class ModelBackend:
    """A model with an engine of this process.

    The model at ``uri`` is logged first where it is not yet, as by ``serve``. ``settings`` replace saved engine
    settings.
    """

    def __init__(self, uri: str, settings: dict[str, Any], stop: threading.Event) -> None:
        from mlflow_llm.flavors.llm.load.draft import with_draft
        from mlflow_llm.flavors.llm.load.model_cache import logged_root
        from mlflow_llm.flavors.llm.model.bundle_reader import configured
        from mlflow_llm.flavors.llm.predict.session import Session

        bundle, config = configured(logged_root(uri), settings)
        self._session = Session(with_draft(bundle, config.settings), config.settings, config.request_defaults)
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


class GivenUp(click.ClickException):
    """The rows are no longer wanted, so one that waited is not asked again."""


def patiently(backend: Backend, stop: threading.Event, row: Row, name: str, *, retries: int = MAX_RETRIES) -> RowAnswer:
    """Return the row's answer, asked again while the server is busy.

    Raises ``ClickException``, by the row's ``name``, after the last retry, and ``GivenUp`` if ``stop`` is set before.
    """
    backoff = Backoff(FIRST_WAIT, MAX_WAIT, jitter=(0.5, 1.0))
    for attempt in range(retries + 1):
        try:
            return backend.ask(row)
        except Retry as again:
            why = str(again)
            pause = backoff.failed()
            wait = again.after or pause
        if attempt < retries and stop.wait(wait):
            raise GivenUp(f"{name} was not answered: {why}")
    raise click.ClickException(f"{name} was not answered: {why}")


def answer_all(ask: Callable[[R], A], rows: Sequence[R], stop: threading.Event, *, concurrency: int) -> list[A]:
    """Return what ``ask`` does for each of ``rows``, in their order. The first error sets ``stop`` and is raised."""
    with ThreadPoolExecutor(max(1, min(concurrency, len(rows)))) as pool:
        answers = pool.map(ask, rows)
        try:
            return list(answers)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def refused(error: ServingError) -> RowAnswer:
    return RowAnswer(error.status, openai_error(error))


def line_of(row: Row, answered: RowAnswer) -> dict[str, Any]:
    """Return a line of output in OpenAI's form; ``error`` of a failed row repeats what its status and body say."""
    failed = answered.status >= 400
    summary: dict[str, Any] | None = None
    if failed:
        error = answered.body.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        summary = {"code": code or OPENAI_ERRORS["internal"][0], "message": _message(answered.body)}
    request_id = answered.body.get("id") or answered.request_id or row.key
    response = {"status_code": answered.status, "request_id": request_id, "body": answered.body}
    return {"id": row.key, "custom_id": row.custom_id, "response": response, "error": summary}


def _is_spent(body: dict[str, Any]) -> bool:
    """Return whether a refusal says that a budget is spent, which no row of this batch can wait for."""
    error = body.get("error")
    return isinstance(error, dict) and error.get("code") == "insufficient_quota"


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
