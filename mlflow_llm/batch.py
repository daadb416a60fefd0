"""Ask a model once per row of a table, with the arguments of Databricks' SQL function ``ai_query``."""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd

from .queries import query_of, refused

__all__ = ["ai_query"]


def ai_query(
    df: Any,
    endpoint: str,
    request: str,
    *,
    return_type: Literal["text", "json", "embedding"] = "text",
    fail_on_error: bool = True,
    model_parameters: dict[str, Any] | None = None,
    response_format: dict[str, Any] | str | None = None,
    output: str = "response",
    url: str | None = None,
    key: str | None = None,
    concurrency: int | None = None,
) -> Any:
    """Return ``df`` with a further column: the answer to the request of each row.

    Args:
        df: a DataFrame of pandas or of Spark, whose rows the executors ask (``mlflow_llm.spark.ai_query``).
        endpoint: an endpoint, or endpoint:adapter, of the server at ``url``; or a model for the process that asks: a
            URI such as ``models:/assistant/1``, or a directory.
        request: the column with the requests: texts, lists of messages, or whole request bodies (dicts of pandas,
            structs of Spark). Nulls have no answer.
        return_type: "text" gives texts, "embedding" vectors, "json" whole replies as JSON.
        fail_on_error: raise at a row that is refused or fails. If False, the column has dicts (structs) with
            ``result`` and ``errorMessage``, one of which is None.
        model_parameters: request fields for all rows, such as ``{"max_tokens": 32}``.
        response_format: OpenAI's ``response_format``, which answers must follow, as a dict or as JSON.
        output: name of the new column.
        url: the server; MLFLOW_LLM_URL, or port 8000 of this machine, if it is None.
        key: an API key; MLFLOW_LLM_KEY if it is None.
        concurrency: rows that are asked at once; by default 32 of a server, and what the engine runs of a model. In
            Spark, per task.

    Raises:
        MlflowException: an argument is not allowed, no row can be answered, or, with ``fail_on_error``, one was not.
    """
    is_spark = type(df).__module__.startswith("pyspark.sql.")
    if not is_spark and not isinstance(df, pd.DataFrame):
        raise refused("df", df, "a DataFrame of pandas or of Spark")
    query = query_of(endpoint, return_type, fail_on_error, model_parameters, response_format, url, key, concurrency)
    if request not in df.columns:
        raise refused("request", request, f"a column: {', '.join(map(str, df.columns))}")
    if output in df.columns:
        raise refused("output", output, "a name that no column has")
    if is_spark:
        from .spark import answer_column

        return df.withColumn(output, answer_column(query, df[request]))
    with query.answering() as answering:
        answers = answering.answers(df[request].tolist())
    return df.assign(**{output: pd.Series(answers, index=df.index, dtype=object)})
