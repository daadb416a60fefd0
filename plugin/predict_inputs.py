"""Convert the inputs of ``predict`` to JSON bodies of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException


def requests_of(inputs: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return ``(bodies, single)`` for a dict, a list of dicts or a DataFrame (one request per row).

    ``single`` means that the input is one request, so that one reply is returned. ``mlflow deployments predict -I``
    turns one JSON object into a DataFrame with its lists spread over the rows; they are joined again, also those of a
    frame that was written with ``orient="split"`` or as a body of MLflow's scoring server. Raises ``MlflowException``
    for input without requests, or for values that JSON cannot represent.
    """
    if isinstance(inputs, dict):
        return [_body(inputs)], True
    if isinstance(inputs, pd.DataFrame):
        inputs = _unfolded(inputs)
        rows = [_without_nulls(row) for row in inputs.to_dict(orient="records")]
        if rows and all(isinstance(row.get("messages"), dict) for row in rows):
            return [_joined(rows)], True
        return rows, False
    if isinstance(inputs, list) and all(isinstance(row, dict) for row in inputs):
        return [_body(row) for row in inputs], False
    raise MlflowException.invalid_parameter_value(
        f"inputs: expected a dict, a list of dicts or a DataFrame, not {type(inputs).__name__}"
    )


def _unfolded(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table that ``frame`` holds in one of the forms ``split``, ``dataframe_split`` and
    ``dataframe_records``; else ``frame``."""
    columns = set(frame.columns)
    if columns == {"dataframe_records"}:
        return pd.DataFrame(frame["dataframe_records"].tolist(), dtype=object)
    if columns == {"dataframe_split"}:
        parts = frame["dataframe_split"].to_dict()
    elif {"columns", "data"} <= columns <= {"columns", "data", "index"}:
        parts = {name: frame[name].tolist() for name in ("columns", "data")}
    else:
        return frame
    names, rows = parts.get("columns"), parts.get("data")
    if not isinstance(names, list) or not isinstance(rows, list):
        raise MlflowException.invalid_parameter_value("inputs: a split frame has the lists columns and data")
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise MlflowException.invalid_parameter_value(
                f"inputs: data[{place}] is not allowed; expected a list of {len(names)} values, one for each column"
            )
    return pd.DataFrame(rows, columns=[str(name) for name in names], dtype=object)


def plain(value: Any, where: str) -> Any:
    """Convert ``value`` to JSON's types, including NumPy's numbers and arrays.

    Raises ``MlflowException``, naming ``where``, for a type that JSON does not have.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_key(key, where): plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise MlflowException.invalid_parameter_value(f"{where}: {value} is not allowed; expected a JSON number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MlflowException.invalid_parameter_value(f"{where}: a {type(value).__name__} cannot be sent as JSON")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise MlflowException.invalid_parameter_value(f"{where}: the key {key!r:.80} is not a text")
    return key


def _body(given: dict[Any, Any]) -> dict[str, Any]:
    return {_key(key, "inputs"): plain(value, key) for key, value in given.items()}


def _without_nulls(row: dict[Any, Any]) -> dict[str, Any]:
    """Return a row without the nulls with which pandas fills missing cells and Arrow fills missing fields."""
    return {str(key): _full(plain(value, str(key))) for key, value in row.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    return value is None or bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _full(one) for key, one in value.items() if one is not None}
    return [_full(one) for one in value] if isinstance(value, list) else value


def _joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the request whose messages are spread over ``rows``.

    Any other field has the value of all rows or, if they differ, a list of their values, as ``stop`` may be.
    """
    body: dict[str, Any] = {"messages": [row["messages"] for row in rows]}
    for key in dict.fromkeys(key for row in rows for key in row if key != "messages"):
        if not all(key in row for row in rows):
            raise MlflowException.invalid_parameter_value(
                f"{key}: only some of the rows over which the messages are spread have a value; expected all or none"
            )
        values = [row[key] for row in rows]
        body[key] = values[0] if all(value == values[0] for value in values) else values
    return body
