"""Databricks' SQL function ``ai_query`` as a function of Spark's columns. Needs pyspark.

The tasks of Spark ask the server, or load the model; all tasks of a host share one engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pandas as pd

from .queries import EMBEDDING, Query, is_model, query_of, refused

__all__ = ["ai_query"]


def ai_query(
    endpoint: str,
    request: Any,
    return_type: Literal["text", "json", "embedding"] = "text",
    fail_on_error: bool = True,
    model_parameters: dict[str, Any] | None = None,
    response_format: dict[str, Any] | str | None = None,
    *,
    url: str | None = None,
    key: str | None = None,
    concurrency: int | None = None,
) -> Any:
    """Return the answers to a column of requests: ``frame.withColumn("answer", ai_query("assistant", "question"))``.

    Arguments and answers are those of ``mlflow_llm.batch.ai_query``: texts and replies are strings, vectors arrays of
    floats, and without ``fail_on_error`` answers are structs of ``result`` and ``errorMessage``. The key goes to the
    executors, which must reach ``url``.

    Args:
        endpoint: an endpoint, or endpoint:adapter, of the server; or a model's URI, whose alias is resolved here, once
            for all rows.
        request: a column, or the name of one.
        return_type: "text", "json" or "embedding".
        fail_on_error: fail the job at a row that is refused or fails, instead of naming its error in the answer.
        model_parameters: request fields for all rows.
        response_format: OpenAI's ``response_format``, as a dict or as JSON.
        url: the server; MLFLOW_LLM_URL of this process, or port 8000 of each executor's machine, if it is None.
        key: an API key; MLFLOW_LLM_KEY of this process if it is None.
        concurrency: rows that a task asks at once.

    Raises:
        MlflowException: an argument is not allowed.
    """
    from pyspark.sql import Column, functions

    if isinstance(request, str):
        request = functions.col(request)
    if not isinstance(request, Column):
        raise refused("request", request, "a column of Spark, or the name of one")
    query = query_of(endpoint, return_type, fail_on_error, model_parameters, response_format, url, key, concurrency)
    return answer_column(query, request)


def answer_column(query: Query, request: Any) -> Any:
    """Return the column of answers to the column ``request``."""
    from pyspark.sql import functions

    if is_model(query.endpoint):
        from .flavors.llm.model.model_registry import pinned

        query = replace(query, endpoint=pinned(query.endpoint))
    result = "array<float>" if query.return_type == EMBEDDING else "string"
    returned = result if query.fail_on_error else f"result {result}, errorMessage string"
    asks = _frames(query) if not query.fail_on_error else _series(query)
    ask = functions.pandas_udf(asks, returned).asNondeterministic()  # or Spark asks twice for two uses of a column
    return ask(functions.to_json(functions.struct(request.alias("request"))))  # a struct is no pandas value otherwise


def _series(query: Query) -> Any:
    """Return what a task runs where answers are values."""

    def ask(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for answers in answered(query, batches):
            yield pd.Series(answers, dtype=object)

    return ask


def _frames(query: Query) -> Any:
    """Return what a task runs where answers are structs."""

    def ask(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        for answers in answered(query, batches):
            yield pd.DataFrame(answers, columns=["result", "errorMessage"], dtype=object)

    return ask


def answered(query: Query, batches: Iterator[pd.Series]) -> Iterator[list[Any]]:
    """Yield the answers to each batch of a task's rows."""
    from pyspark import TaskContext

    task = TaskContext.get()
    place = "row" if task is None else f"partition {task.partitionId()}, row"
    first = 0
    with query.answering() as answering:
        for batch in batches:
            requests = [json.loads(one).get("request") for one in batch]
            yield answering.answers(requests, first, place)
            first += len(requests)
