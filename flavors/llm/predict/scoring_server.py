"""MLflow's scoring server: whether this process is one, how many callers it admits at once, and how it parses a body.

The scoring server's private names are used only here, and replaced in ``signature_enforcement``. The server answers
each request in the event loop's default executor, which asyncio creates at the first request with four more threads
than there are cores: on two cores six callers enter ``predict`` and the others wait, although the engine has room. The
loop is not running yet when the model is loaded, and neither MLflow nor uvicorn has a setting for the executor.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
from mlflow.pyfunc import FLAVOR_NAME as PYFUNC
from mlflow.pyfunc import MAIN, scoring_server

from ....serving.dialects.fields.fields import CONTENT, unknown_field
from ....serving.dialects.fields.label_fields import DATABRICKS_LABELS, NO_TRACE, RETURN_TRACE, databricks_options
from ....serving.interface.errors import InvalidField, RequestError
from ..errors import raises_mlflow
from ..model.names import LOADER_MODULE
from ..model.signature import is_lossless

FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")
LLM_FORM = tuple(CONTENT)  # a body with one of these is itself a request; MLflow's own list lacks query and text_1
BESIDE = ("params", *(field.name for field in DATABRICKS_LABELS))


def is_scoring_server() -> bool:
    """Return whether this process is a worker of ``mlflow models serve``."""
    return scoring_server._SERVER_MODEL_PATH in os.environ


def admit(callers: int) -> None:
    """Let ``callers`` requests into ``predict`` at once, by setting the size of asyncio's default executor.

    This replaces, in this process, the class that asyncio looks up. Only its default executor is affected.
    """
    plain = concurrent.futures.ThreadPoolExecutor

    class Executor(plain):  # type: ignore[misc, valid-type]
        def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", *rest: Any) -> None:
            if max_workers is None and thread_name_prefix == "asyncio":
                max_workers = callers
            super().__init__(max_workers, thread_name_prefix, *rest)

    concurrent.futures.ThreadPoolExecutor = Executor  # type: ignore[misc, assignment]


def parsing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_parse_json_data`` so that it leaves the body of a request to this flavor whole.

    MLflow's own moves fields that the signature lists as ``params`` out of the request and holds them to its types (its
    refusals repeat the whole prompt), casts rows by the signature, and drops other keys beside ``inputs``.
    """

    def parse(data: Any, metadata: Any, input_schema: Any) -> Any:
        loader = metadata.flavors.get(PYFUNC, {}).get(MAIN)
        if loader != LOADER_MODULE or not is_lossless(metadata.get_input_schema()):
            return plain(data, metadata, input_schema)
        rows, params, whole = read_body(data)
        return scoring_server.ParsedJsonInput(rows, params, whole)

    return parse


def parsing_csv(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``parse_csv_input`` so that it reads numbers as numbers: by the signature, all columns would be texts."""

    def parse(csv_input: Any, schema: Any = None) -> Any:
        return plain(csv_input, None if is_lossless(schema) else schema)

    return parse


@raises_mlflow
def read_body(data: Any) -> tuple[Any, dict[str, Any] | None, bool]:
    """Parse a JSON body to ``(input, params, whether it is a request in OpenAI's form)``. Raises ``RequestError``."""
    body = _decoded(data)
    if any(name in body for name in LLM_FORM):
        return body, None, True
    forms = [name for name in body if name in FORMS]
    if len(forms) != 1:
        raise InvalidField("body", sorted(body)[:8], f"exactly one of {', '.join((*LLM_FORM, *FORMS))}")
    for name in body:
        if name not in (*FORMS, *BESIDE):
            raise unknown_field(name, body[name], (*FORMS, "params"))
    if (options := body.get("databricks_options")) is not None and databricks_options(options, "databricks_options"):
        raise InvalidField(RETURN_TRACE, True, NO_TRACE)
    rows = body[forms[0]]
    return _split(rows) if forms == ["dataframe_split"] else rows, body.get("params"), False


def _decoded(data: Any) -> dict[str, Any]:
    try:
        body = data if isinstance(data, dict) else json.loads(data)
    except RecursionError:
        raise RequestError("body: objects and lists are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"body: invalid JSON at character {error.pos}: {error.msg}") from None
    except UnicodeDecodeError:
        raise RequestError("body: invalid JSON: not UTF-8") from None
    except ValueError:
        raise RequestError(f"body: an integer has more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(body, dict):
        raise InvalidField("body", body, "a JSON object")
    return body


def _split(value: Any) -> pd.DataFrame:
    """Read ``{"columns": […], "data": [[…], …]}``, as pandas writes it."""
    allowed = "an object of columns and data, a row a list with a value for each column"
    if not isinstance(value, dict) or not {"columns", "data"} <= value.keys() <= {"columns", "data", "index"}:
        raise InvalidField("dataframe_split", value, allowed)
    columns, rows = value["columns"], value["data"]
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise InvalidField("dataframe_split", value, allowed)
    for place, row in enumerate(rows):  # pandas fills a short row with nulls
        if not isinstance(row, list) or len(row) != len(columns):
            raise InvalidField(f"dataframe_split.data[{place}]", row, f"a list of {len(columns)} values")
    try:
        return pd.DataFrame(rows, columns=columns, dtype=object)
    except (ValueError, TypeError, AssertionError):
        raise InvalidField("dataframe_split", value, allowed) from None
