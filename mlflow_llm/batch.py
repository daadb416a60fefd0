"""Ask a model once per row of a table, with the arguments of Databricks' SQL function ``ai_query``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Literal

import click
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from .serving.cli.batch.backends import Backend, ModelBackend, Retry, RowAnswer, ServerBackend
from .serving.cli.batch.rows import Row
from .serving.cli.http import URL_VARIABLE
from .serving.cli.key_options import VARIABLE as KEY_VARIABLE
from .serving.cli.key_options import Secret
from .serving.interface.errors import PackagingError, ServingError, shown
from .serving.system.backoff import Backoff

__all__ = ["ai_query"]

RETURN_TYPES = ("text", "json", "embedding")
RETRIES = 8
FIRST_WAIT, MAX_WAIT = 0.5, 60.0  # seconds before a row is asked again


def ai_query(
    df: pd.DataFrame,
    endpoint: str,
    request: str,
    *,
    return_type: Literal["text", "json", "embedding"] = "text",
    fail_on_error: bool = True,
    model_parameters: dict[str, Any] | None = None,
    response_format: dict[str, Any] | None = None,
    output: str = "response",
    url: str | None = None,
    key: str | None = None,
    concurrency: int | None = None,
) -> pd.DataFrame:
    """Return ``df`` with a further column: the answer to the request of each row.

    Args:
        df: a DataFrame of pandas. For Spark there is ``llm.spark_udf``.
        endpoint: an endpoint, or endpoint:adapter, of the server at ``url``; or a model for this process: a URI such
            as ``models:/assistant/1``, or a directory.
        request: the column with the requests: texts, lists of messages, or whole request bodies as dicts. Nulls have no
            answer.
        return_type: "text" gives texts, "embedding" vectors, "json" whole replies as JSON.
        fail_on_error: raise at a row that is refused or fails. If False, the column has dicts with ``result`` and
            ``errorMessage``, one of which is None.
        model_parameters: request fields for all rows, such as ``{"max_tokens": 32}``.
        response_format: OpenAI's ``response_format``, which answers must follow.
        output: name of the new column.
        url: the server; MLFLOW_LLM_URL, or port 8000 of this machine, if it is None.
        key: an API key; MLFLOW_LLM_KEY if it is None.
        concurrency: rows that are asked at once; by default 32 of a server, and what the engine runs of a model.

    Raises:
        MlflowException: an argument is not allowed, no row can be answered, or, with ``fail_on_error``, one was not.
    """
    if not isinstance(df, pd.DataFrame):
        raise _refused("df", df, "a DataFrame of pandas; for Spark there is llm.spark_udf")
    if return_type not in RETURN_TYPES:
        raise _refused("return_type", return_type, "one of " + ", ".join(RETURN_TYPES))
    if request not in df.columns:
        raise _refused("request", request, f"a column: {', '.join(map(str, df.columns))}")
    if output in df.columns:
        raise _refused("output", output, "a name that no column has")
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise _refused("concurrency", concurrency, "an integer of at least 1")
    fields = {**(model_parameters or {}), **({} if response_format is None else {"response_format": response_format})}
    ask = partial(
        _ask_all,
        endpoint=endpoint,
        fields=fields,
        return_type=return_type,
        fail_on_error=fail_on_error,
        url=url or os.environ.get(URL_VARIABLE) or "http://127.0.0.1:8000",
        key=key,
        concurrency=concurrency,
    )
    return df.assign(**{output: pd.Series(ask(df[request].tolist()), index=df.index, dtype=object)})


def _ask_all(
    requests: list[Any],
    *,
    endpoint: str,
    fields: dict[str, Any],
    return_type: str,
    fail_on_error: bool,
    url: str,
    key: str | None,
    concurrency: int | None,
) -> list[Any]:
    """Return the answers to ``requests`` in their order."""
    rows = [None if _is_null(one) else _row(i, one, fields, return_type) for i, one in enumerate(requests)]
    stop = threading.Event()
    try:
        with closing(_backend(endpoint, url, key, stop)) as backend:
            maximum = min(concurrency or backend.concurrency, max(len(rows), 1))
            with ThreadPoolExecutor(maximum) as pool:
                answers = pool.map(partial(_answer, backend, return_type, fail_on_error, stop), rows)
                try:
                    return list(answers)
                except BaseException:
                    stop.set()
                    pool.shutdown(cancel_futures=True)
                    raise
    except click.ClickException as error:
        raise MlflowException(error.message) from None
    except (ServingError, PackagingError) as error:
        raise MlflowException(str(error)) from None


def _backend(endpoint: str, url: str, key: str | None, stop: threading.Event) -> Backend:
    if ":/" in endpoint or os.path.isdir(endpoint):
        return ModelBackend(endpoint, {}, stop)
    said = os.environ.get(KEY_VARIABLE)
    if not key and said:
        key = Secret().convert(said, None, None)  # the key, or @FILE
    return ServerBackend(url, key, endpoint)


def _is_null(value: Any) -> bool:
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _row(number: int, value: Any, fields: dict[str, Any], return_type: str) -> Row:
    """Return the request of a row. Raises ``MlflowException`` for a value that is none."""
    if isinstance(value, dict):
        body = {**fields, **value}
    elif return_type == "embedding":
        body = {**fields, "input": value}
    elif isinstance(value, str):
        body = {**fields, "messages": [{"role": "user", "content": value}]}
    elif hasattr(value, "__iter__") and all(isinstance(message, Mapping) for message in value):
        body = {**fields, "messages": [dict(message) for message in value]}
    else:
        raise _refused(f"request, row {number}", value, "a text, a list of messages or a request body")
    return Row(number, str(number), str(number), None, body)


def _answer(backend: Backend, return_type: str, fail_on_error: bool, stop: threading.Event, row: Row | None) -> Any:
    if row is None:
        return None if fail_on_error else {"result": None, "errorMessage": None}
    answered = _patiently(backend, stop, row)
    error = None if answered.status < 400 else _message(answered.body)
    if fail_on_error:
        if error is not None:
            raise MlflowException(f"row {row.line}: {error}", error_code=INVALID_PARAMETER_VALUE)
        return _result(answered.body, return_type)
    result = None if error is not None else _result(answered.body, return_type)
    return {"result": result, "errorMessage": error}


def _patiently(backend: Backend, stop: threading.Event, row: Row) -> RowAnswer:
    """Return the row's answer, asked again while the server is busy. Raises ``ClickException``."""
    backoff = Backoff(FIRST_WAIT, MAX_WAIT, jitter=(0.5, 1.0))
    for attempt in range(RETRIES):
        try:
            return backend.ask(row)
        except Retry as again:
            why, wait = str(again), again.after or backoff.failed()
        if attempt == RETRIES - 1 or stop.wait(wait):
            break
    raise click.ClickException(f"row {row.line} was not answered: {why}")


def _result(body: dict[str, Any], return_type: str) -> Any:
    if return_type == "json":
        return json.dumps(body)
    if return_type == "embedding":
        return body["data"][0]["embedding"]
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _refused(name: str, value: Any, allowed: str) -> MlflowException:
    text = f"{name}: {shown(value)} is not allowed; expected {allowed}"
    return MlflowException(text, error_code=INVALID_PARAMETER_VALUE)
