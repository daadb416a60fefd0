"""Turn the input of ``predict`` into requests.

==================================================  ===================================================
input                                               requests
==================================================  ===================================================
a dict or a text                                    one request, answered with one object
a list, tuple, array or Series of dicts or texts    one request per entry, answered with a list (even of one)
a DataFrame with request fields for columns         one request per row; a pandas null means no value
a DataFrame of one other column that holds texts    one request per row
a DataFrame with a column ``inputs``, and fields    one request per row, as MLflow's evaluation names it
… and a column ``image`` or ``images``              images of the row's last message of a user
==================================================  ===================================================

Depending on the model's first task, a text is a chat with one user message, a prompt, an input to embed, or a query.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ....serving.dialects.fields.fields import CONTENT, nearest, unknown_field
from ....serving.interface.errors import InvalidField
from ....serving.interface.request import Task
from ..model.request_fields import request_fields
from ..model.signature import ROW_MARKER
from .image_values import IMAGE_COLUMNS, data_url, with_images

SIDES = ("query", "documents", "text_1", "text_2")  # the sides of a comparison, which needs more than one column
INPUTS = "inputs"  # the name that MLflow's evaluation gives the column of prompts
MAX_DEPTH = 128  # more than any field may have, so that a deep field is refused by its own name
Row = dict[str, Any] | InvalidField
"""A request of JSON types, or what is wrong with an entry that is none."""
FORMS = "an object with messages, prompt, input or query; a text; a list of either; or a DataFrame with a row for each"
ENTRY = "a text, or an object with messages, prompt or input"
NAMED = "columns by name: in Spark, one column struct('prompt', …) instead of 'prompt', …"
SPARK = "a Spark DataFrame goes through mlflow.pyfunc.spark_udf, or .toPandas()"


def requests_of(model_input: Any, task: Task) -> tuple[list[Row], bool]:
    """Return ``(requests, single)``: the requests in order, and whether the answer is one object instead of a list.

    ``task`` is the model's first. An entry that is not a request is replaced by its error. Raises ``InvalidField`` for
    input of another form, or for a column that is not a field.
    """
    given = model_input.item() if isinstance(model_input, np.ndarray) and model_input.ndim == 0 else model_input
    if isinstance(given, str | Mapping):
        return [_request(given, task)], True
    if isinstance(given, pd.DataFrame):
        return _of_frame(given, task), False
    if isinstance(given, pd.Series | np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return [_request(entry, task) for entry in given], False
    raise InvalidField("body", model_input, SPARK if type(given).__module__.startswith("pyspark.") else FORMS)


def _request(given: Any, task: Task) -> Row:
    if isinstance(given, Mapping):
        return _object(dict(given))
    return of_text(given, task) if isinstance(given, str) else InvalidField("body", given, ENTRY)


def _object(fields: dict[Any, Any]) -> Row:
    try:
        found: dict[str, Any] = plain(fields)
    except InvalidField as error:
        return error
    return found


def of_text(text: str | None, task: Task) -> dict[str, Any]:
    """Return the request for a bare text. A null is passed on, to be refused under its field's name."""
    if task == "chat":
        return {"messages": text if text is None else [{"role": "user", "content": text}]}
    return {{"completions": "prompt", "score": "query"}.get(task, "input"): text}


def _of_frame(frame: pd.DataFrame, task: Task) -> list[Row]:
    columns = list(frame.columns)
    if len(columns) == 1 and _holds_texts(frame.iloc[:, 0], columns[0], task):
        return [of_text(None if _is_missing(cell) else cell, task) for cell in frame.iloc[:, 0]]
    if INPUTS in columns and columns.count(INPUTS) == 1 and not set(columns).intersection(CONTENT):
        return _of_inputs(frame, task)
    _check(columns, frame)
    rows = (dict(zip(columns, row, strict=True)) for row in frame.itertuples(index=False, name=None))
    return [_row({name: cell for name, cell in row.items() if not _is_missing(cell)}) for row in rows]


def _row(cells: dict[Any, Any]) -> Row:
    found = _object(cells)
    if isinstance(found, InvalidField):
        return found
    try:
        return with_images(found)
    except InvalidField as error:
        return error


def _of_inputs(frame: pd.DataFrame, task: Task) -> list[Row]:
    """Return the requests of a frame whose column ``inputs`` holds texts, lists of messages or requests."""
    inputs = list(frame[INPUTS])
    fields = frame.drop(columns=INPUTS)
    _check(list(fields.columns), fields)
    names = list(fields.columns)
    found: list[Row] = []
    for cell, row in zip(inputs, fields.itertuples(index=False, name=None), strict=True):
        own = {name: value for name, value in zip(names, row, strict=True) if not _is_missing(value)}
        if isinstance(cell, np.ndarray):
            cell = cell.tolist()
        if isinstance(cell, Mapping):
            found.append(_row(own | dict(cell)))
        elif isinstance(cell, list) and task == "chat":
            found.append(_row(own | {"messages": cell}))
        elif isinstance(cell, str):
            found.append(_row(own | of_text(cell, task)))
        else:
            found.append(InvalidField(INPUTS, None if _is_missing(cell) else cell, ENTRY))
    return found


def _holds_texts(column: pd.Series, name: Hashable, task: Task) -> bool:
    """Return whether a frame's only column holds texts under a name of the caller's own, not that of a (misspelt)
    field.

    If the model does not compare texts, names such as ``query`` and ``text`` count as the caller's own.
    """
    if name == INPUTS:
        return False  # see _of_inputs
    known = [field for field in request_fields() if task == "score" or field not in SIDES]
    if name in known or (isinstance(name, str) and nearest(name, known) is not None):
        return False
    return all(isinstance(cell, str) or _is_missing(cell) for cell in column)


def _check(columns: list[Any], frame: pd.DataFrame) -> None:
    """Raise ``InvalidField`` for a column that is not a field, or that appears twice.

    ``spark_udf`` takes columns without names for those of the signature, by position, and adds all of its other ones.
    """
    if ROW_MARKER in columns:
        raise InvalidField("body", "columns without names", NAMED)
    known = request_fields()
    for place, name in enumerate(columns):
        if name not in known and name not in IMAGE_COLUMNS:
            raise unknown_field(name, plain(frame.iloc[0, place]) if len(frame) else None, known)
        if name in columns[:place]:
            raise InvalidField(str(name), "a second column", "one column of a name")


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or value is pd.NA
        or value is pd.NaT
        or (isinstance(value, float | np.floating) and bool(value != value))
    )


def plain(value: Any, depth: int = 0) -> Any:
    """Convert the types of pandas, numpy and Parquet to JSON's at every level, and images to ``data:`` URLs.

    Raises ``InvalidField``.
    """
    if depth > MAX_DEPTH:
        raise InvalidField("body", "a deep nest of objects and lists", f"at most {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), depth)
    if isinstance(value, list | tuple):
        return [plain(entry, depth + 1) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is pd.NA or value is pd.NaT:
        return None
    found = data_url(value)
    return value if found is None else found
