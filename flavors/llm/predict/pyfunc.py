"""The model that ``mlflow.pyfunc.load_model`` returns: ``predict`` and ``predict_stream`` over one engine."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ....serving.dialects.errors import openai_error
from ....serving.dialects.fields.fields import unknown_field
from ....serving.interface.bundle import Bundle
from ....serving.interface.errors import (
    InternalError,
    InvalidField,
    PackagingError,
    RequestError,
    ServingError,
    ShuttingDown,
)
from ....serving.interface.readers import one_of
from ....serving.interface.reply import Reply
from ....serving.interface.request import ValidRequest
from ....serving.interface.settings import EngineSettings
from ....serving.tasks.prompt.endpoint import Profile
from ....serving.tasks.reply_size import MAX_REPLY_BYTES
from .. import errors
from ..model.model_config import OUTPUTS, REPLY
from ..model.names import FLAVOR_NAME
from ..model.request_fields import request_fields
from ..model.signature import ON_ERROR, OUTPUT
from . import scoring_server, signature_enforcement
from .language_model import LanguageModel
from .outputs import EMBEDDING_JSON, JSON, MARK, MARKER, check_output, output_of
from .predict_input import Row, plain, requests_of
from .session import Session
from .signature_enforcement import Given

logger = logging.getLogger(__name__)

CONTENT = ("messages", "prompt", "input", "query", "documents", "text_1", "text_2")  # each row has its own
OWN = (ON_ERROR, OUTPUT)  # params that are not request fields
PROGRESS_ROWS = 9  # rows
PROGRESS = "MLFLOW_LLM_PROGRESS"


class PyfuncModel:
    """A loaded model as MLflow calls it. Thread-safe: the scoring server's threads and workers share an engine's batch.

    The engine starts at the first request; under ``mlflow models serve`` it starts at load, so that the server is ready
    when it says so. It ends with the last object that uses it. Copies, including pickled ones, are separate clients.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: EngineSettings,
        defaults: Mapping[str, Any] | None = None,
        *,
        name: str = FLAVOR_NAME,
        output: str = REPLY,
    ) -> None:
        self.output = output
        is_server = scoring_server.is_scoring_server()
        profile = Profile(max_reply_bytes=MAX_REPLY_BYTES) if is_server else None  # no limit in a notebook's process
        self.session = Session(bundle, settings, defaults, profile, name=name)
        if is_server:
            scoring_server.admit(settings.max_num_seqs)
            with _mlflow_errors():
                self.session.connect()

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Answer one request or many.

        Args:
            model_input: a request in OpenAI's form (``messages``, ``prompt`` or ``input``) or a text; a list of these;
                or a DataFrame with one request per row (``predict_input``).
            params: request fields for all rows, used if a row leaves a field out; ``output``, which is "reply" for
                whole objects, "text" for the text of each, "embedding" for the vector of each, or "json" for whole
                objects as JSON; and ``on_error``, which says what happens if a request is refused or fails. "raise"
                (the default) ends the call; "null" returns None in its place; "return" returns ``{"error":
                {"message", "type", "param", "code"}}`` in its place. With the last two, the other requests are
                answered.

        Returns:
            One reply object for one request or text; for a list or a DataFrame (even of one row), a list in order.
            With many rows, a progress bar with the tokens/s is shown on a terminal or in a notebook;
            ``MLFLOW_LLM_PROGRESS=0`` hides it.

        Raises:
            MlflowException: with the status that an HTTP caller gets; for many rows, the first wrong one is named.
                Input without requests, wrong ``params``, and a model that was closed or cannot be loaded always raise.
        """
        with _mlflow_errors():
            bodies, single = self._requests(model_input)
            on_error = check_params(params)
            output = str((params or {}).get(OUTPUT) or self.output)
            rows = [with_params(body, params) for body in bodies]
            if on_error != "raise":
                found = self._predict_each(rows, on_error, output)
                return found[0] if single else found
            if single:
                request = self._valid(rows[0], output)
                asked = _body(rows[0])
                return self._returned(request, self.session.reply(request, asked=asked), output)
            return self._predict_rows(rows, output)

    def _returned(self, request: ValidRequest, reply: Reply, output: str) -> Any:
        if output not in (REPLY, JSON):
            return output_of(reply, output)
        encoded = self.session.encode(request, reply)
        return encoded if output == REPLY else json.dumps(encoded, ensure_ascii=False)

    def _predict_each(self, rows: list[Row], on_error: str, output: str) -> list[Any]:
        """Return a reply, an error or None for each row, independently of the others."""
        if rows:
            self.session.connect()
        asked = [self._valid_or_error(body, output) for body in rows]
        requests = [request for request in asked if isinstance(request, ValidRequest)]
        outcomes = iter(self.session.outcomes(requests, _progress if _shows_progress(len(rows)) else None))
        answers: list[Any] = []
        failed: list[str] = []
        for row, request in enumerate(asked):
            outcome = next(outcomes) if isinstance(request, ValidRequest) else request
            if isinstance(outcome, ShuttingDown):
                raise outcome
            if isinstance(request, ValidRequest) and isinstance(outcome, Reply):
                answers.append(self._returned(request, outcome, output))
            else:
                assert isinstance(outcome, ServingError)
                failed.append(f"row {row}: {outcome.logged}")
                answers.append(openai_error(outcome) if on_error == "return" else None)
        if failed:
            logger.warning("predict: %d of %d requests failed; %s", len(failed), len(rows), failed[0])
        if on_error == MARK:
            return ["" if answer is None else f"{MARKER}{answer}" for answer in answers]
        return answers

    def _valid(self, row: Row, output: str) -> ValidRequest:
        request = self.session.valid(_unstreamed(_body(row)))
        check_output(request, output)
        return request

    def _valid_or_error(self, row: Row, output: str) -> ValidRequest | RequestError:
        try:
            return self._valid(row, output)
        except RequestError as error:
            return error

    def _predict_rows(self, rows: list[Row], output: str) -> list[Any]:
        requests = []
        for row, body in enumerate(rows):
            try:
                requests.append(self._valid(body, output))
            except RequestError as error:
                raise _in_row(error, row) from None
        try:
            replies = self.session.replies(requests, _progress if _shows_progress(len(rows)) else None)
        except ServingError as error:
            raise _in_row(error, getattr(error, "failed_at", 0)) from None
        return [self._returned(request, reply, output) for request, reply in zip(requests, replies, strict=True)]

    def predict_stream(self, model_input: Any, params: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Stream one reply as chunk objects in OpenAI's form.

        Args:
            model_input: one request, in any form that ``predict`` takes.
            params: request fields, used if the request leaves one out.

        Returns:
            An iterator over chunks; the last one with choices carries ``usage``. Closing it aborts the request.

        Raises:
            MlflowException: as ``predict``, when the iteration reaches the error.
        """
        with _mlflow_errors():
            bodies, _ = self._requests(model_input)
            if check_params(params) != "raise":
                raise RequestError("params.on_error: it is for predict; a stream raises its error where it occurs")
            if (params or {}).get(OUTPUT) not in (None, REPLY):
                raise InvalidField(f"params.{OUTPUT}", (params or {})[OUTPUT], "'reply': a stream has chunks")
            if len(bodies) != 1:
                raise RequestError(f"body: {len(bodies)} requests cannot be streamed; expected one")
            asked = _body(with_params(bodies[0], params))
            yield from self.session.chunks(self.session.valid(asked, stream=True), asked)

    def _requests(self, model_input: Any) -> tuple[list[Row], bool]:
        given = model_input.data if isinstance(model_input, Given) else model_input
        return requests_of(given, self.session.bundle.tasks[0])

    def get_raw_model(self) -> LanguageModel:
        """Return the object API over the same model, for ``PyFuncModel.get_raw_model``."""
        return LanguageModel.over(self.session)

    def close(self) -> None:
        """Release the engine; its process ends when it has no other client. Closing twice is harmless."""
        self.session.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in a process that may have loaded no model yet."""
        signature_enforcement.install()
        self.__dict__.update(state)

    def __enter__(self) -> PyfuncModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_params(params: Any) -> str:
    """Check ``params`` and return its ``on_error``. Raises ``InvalidField``."""
    if params is not None and not isinstance(params, dict):
        raise InvalidField("params", params, "an object of request fields")
    known = [name for name in (*request_fields(), *OWN) if name not in CONTENT]
    for name, value in (params or {}).items():
        if name not in known:
            raise unknown_field(name, value, known, "params.")
    if (output := (params or {}).get(OUTPUT)) is not None:
        one_of(*OUTPUTS, JSON, EMBEDDING_JSON)(output, f"params.{OUTPUT}")
    on_error = (params or {}).get(ON_ERROR)
    return "raise" if on_error is None else str(one_of("raise", "null", "return", MARK)(on_error, f"params.{ON_ERROR}"))


def with_params(row: Row, params: dict[str, Any] | None) -> Row:
    """Return ``row`` with those fields of ``params`` that it leaves out or gives as null, in JSON's types."""
    if isinstance(row, InvalidField):
        return row
    fields = {name: plain(value) for name, value in (params or {}).items() if name not in OWN}
    added = {name: value for name, value in fields.items() if value is not None and row.get(name) is None}
    return {**row, **added}


def _body(row: Row) -> dict[str, Any]:
    if isinstance(row, InvalidField):
        raise row
    return row


def _unstreamed(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("stream") not in (None, False):
        raise InvalidField("stream", body["stream"], "false: predict gives whole replies, predict_stream gives chunks")
    return body


def _in_row(error: ServingError, row: int) -> ServingError:
    error.message = f"row {row}: {error.message}"
    return error


@contextmanager
def _mlflow_errors() -> Iterator[None]:
    """Convert every error inside to a short ``MlflowException``; the stack trace of an unknown one goes to the log."""
    try:
        yield
    except ServingError as error:
        raise errors.mlflow_error(error) from None
    except PackagingError as error:
        raise errors.mlflow_error(InternalError(str(error))) from None
    except Exception:
        mark = uuid.uuid4().hex[:12]
        logger.exception("predict failed (%s)", mark)
        raise errors.mlflow_error(
            InternalError(f"internal error {mark}; the log of the server has the details")
        ) from None


def _shows_progress(rows: int) -> bool:
    asked = os.environ.get(PROGRESS)
    if rows < PROGRESS_ROWS or asked == "0":
        return False
    return asked == "1" or sys.stderr.isatty() or "ipykernel" in sys.modules


def _progress(outcomes: Iterator[Any], total: int) -> Iterator[Any]:
    """Yield what became of each request, with a bar that counts them, and their new tokens per second."""
    from tqdm.auto import tqdm

    began, tokens = time.monotonic(), 0
    with tqdm(total=total, unit="request", desc="predict") as bar:
        for outcome in outcomes:
            if isinstance(outcome, Reply) and outcome.usage.completion_tokens:
                tokens += outcome.usage.completion_tokens
                speed = tokens / max(time.monotonic() - began, 1e-3)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
            bar.update()
            yield outcome
