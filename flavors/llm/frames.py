"""What MLflow hands to ``predict``, turned back into requests.

With the lossless signature MLflow makes a DataFrame of everything (``mlflow.models.utils._enforce_schema``):

==========================================  ==================================================================
given                                       arrives as
==========================================  ==================================================================
a dict, ``inputs`` an object, an LLM body   one row; absent fields are no columns, null is None, NaN stays NaN
a list of dicts, ``dataframe_*``            a row a request; absent fields are NaN, their integers become floats
``instances``                               one row, in each cell a numpy array over all requests
a string, a list of strings                 no rows and no columns: nothing of it was in the signature
==========================================  ==================================================================

A dict and a list of one dict arrive alike, so one row in is one object out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ...serving.errors import InvalidField, RequestError

MAX_DEPTH = 128  # more than any field may have: that field is then refused by its own name
FORMS = "an object with messages, prompt or input; a list of them; or a DataFrame with a row for each"


def requests_of(model_input: Any) -> tuple[list[dict[str, Any]], bool]:
    """``(requests, single)``: plain dicts in order, and whether one object is to be answered with one object.

    Raises ``RequestError`` for anything else.
    """
    if isinstance(model_input, dict):
        return [_plain(model_input)], True
    if isinstance(model_input, pd.DataFrame):
        return _of_frame(model_input)
    if isinstance(model_input, list | tuple):
        for row, entry in enumerate(model_input):
            if not isinstance(entry, dict):
                raise InvalidField(f"row {row}", entry, "an object with messages, prompt or input")
        return [_plain(entry) for entry in model_input], False
    raise InvalidField("body", model_input, FORMS)


def _of_frame(frame: pd.DataFrame) -> tuple[list[dict[str, Any]], bool]:
    if not len(frame.columns):
        raise RequestError(f"body: no field of a request found; expected {FORMS}")
    records = [dict(zip(map(str, frame.columns), row, strict=True)) for row in frame.itertuples(index=False, name=None)]
    if len(records) == 1:
        return _one_row(records[0])
    return [_plain({k: v for k, v in record.items() if not _is_missing(v)}) for record in records], False


def _one_row(record: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """A single row holds what its caller gave: a NaN in it is no gap, it is kept and refused where it is read."""
    if not _is_instances(record):
        return [_plain({k: v for k, v in record.items() if v is not pd.NA and v is not pd.NaT})], True
    columns = {name: _plain(cells) for name, cells in record.items()}
    count = len(next(iter(columns.values())))
    return [{name: cells[row] for name, cells in columns.items()} for row in range(count)], False


def _is_instances(record: dict[str, Any]) -> bool:
    """Whether each cell is an array over requests. A Parquet file also has arrays for lists, but not in all cells:
    a conversation there is an array of messages, not of conversations."""
    cells = list(record.values())
    if not all(isinstance(cell, np.ndarray) and cell.ndim > 0 for cell in cells):
        return False
    if len({len(cell) for cell in cells}) != 1 or not len(cells[0]):
        return False
    messages = record.get("messages")
    return messages is None or messages.ndim > 1 or isinstance(messages[0], list | np.ndarray)


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value)


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON's own types all the way down, where pandas, numpy and Parquet put theirs."""
    if depth > MAX_DEPTH:
        raise InvalidField("body", "a deep nest of objects and lists", f"at most {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: _plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(entry, depth + 1) for entry in value.tolist()]
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return value
