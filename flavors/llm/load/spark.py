"""A column function of Spark that asks a logged model: ``mlflow.pyfunc.spark_udf`` with the parts that it leaves open.

All executors of a host share one engine process, as all programs of a user do that load the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import mlflow

from ....serving.interface.errors import PackagingError, shown
from ..errors import raises_mlflow
from ..model.model_config import OUTPUTS, REPLY
from ..model.model_registry import pinned
from ..model.signature import ON_ERROR, OUTPUT
from ..predict.outputs import EMBEDDING, EMBEDDING_JSON, JSON, MARK, MARKER, TEXT

FORMS = {REPLY: JSON, TEXT: TEXT, EMBEDDING: EMBEDDING_JSON}  # texts all: MLflow makes "nan" of a missing text
ERRORS = ("raise", "null")


@raises_mlflow
def spark_udf(
    spark: Any,
    model_uri: str,
    output: Literal["text", "reply", "embedding"] = "text",
    on_error: Literal["raise", "null"] = "raise",
    *,
    env_manager: str = "local",
    model_config: dict[str, Any] | None = None,
    **params: Any,
) -> Callable[..., Any]:
    """Return a function of columns, one request per row, for ``frame.withColumn("answer", ask("prompt"))``.

    Columns are request fields by their names; one column of any other name holds texts (docs/predict.md).

    Args:
        spark: the Spark session.
        model_uri: any URI that MLflow can download. An alias is resolved here, once for all rows.
        output: "text" gives a column of texts, "embedding" of arrays of floats, and "reply" of whole replies as JSON.
        on_error: "raise" fails the job at a request that is refused or fails; "null" leaves a null in its place.
        env_manager: as for ``mlflow.pyfunc.spark_udf``; "local" uses the environment of the executors.
        model_config: settings that replace saved ones, such as ``{"max_num_seqs": 16}``.
        params: request fields for all rows, such as ``max_tokens=32``.

    Raises:
        MlflowException: an argument is not allowed, or there is no such model.
    """
    for name, value, allowed in (("output", output, OUTPUTS), ("on_error", on_error, ERRORS)):
        if value not in allowed:
            raise PackagingError(f"{name}: {shown(value)} is not allowed; expected one of {', '.join(allowed)}")
    functions: Any = import_module("pyspark.sql.functions")
    given = {**params, OUTPUT: FORMS[output], ON_ERROR: MARK if on_error == "null" else on_error}
    ask = mlflow.pyfunc.spark_udf(
        spark,
        pinned(model_uri),
        result_type="string",
        env_manager=env_manager,
        params=given,
        model_config=model_config,
    )

    def asked(*columns: Any) -> Any:
        """Return the column of answers. MLflow keeps the names of columns only within a struct."""
        found = ask(functions.struct(*columns))
        if on_error == "null":
            marked = functions.substr(found, functions.lit(len(MARKER) + 1))
            found = functions.when(functions.startswith(found, functions.lit(MARKER)), marked)
        return functions.from_json(found, "array<float>") if output == EMBEDDING else found

    return asked
