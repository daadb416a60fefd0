"""Bypass MLflow's signature enforcement for models of this flavor, so that input reaches ``predict`` whole.

MLflow drops any field, column or parameter that a signature does not list, with no more than a line in its log, and no
signature can prevent it: a schema of inputs lets only its own columns through, one without inputs loses ``params``, and
one "from type hints" is still enforced when an answer is streamed, and breaks ``dataframe_split``. A mistyped
``max_tokens`` would thus be a run to the end of the context.

The functions through which MLflow passes input are therefore replaced in this process. The replacements behave
differently only for models of this flavor with ``signature.lossless_signature``: their input is passed on as it came,
and checked by the tables of request fields. A signature of the caller's own is enforced by MLflow. ``install`` proves
with a model that answers with its input that nothing is lost on any path, and raises if another version of MLflow
behaves otherwise. Of the modules that pass input on, only this one and ``scoring_server`` use MLflow's private names.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlflow
from mlflow.models import Model

from ....serving.interface.errors import PackagingError
from ..model.names import LOADER_MODULE
from ..model.signature import is_lossless, lossless_signature
from . import scoring_server

pyfunc: Any = importlib.import_module("mlflow.pyfunc")  # ``from mlflow import pyfunc`` may give a lazy stand-in
mlflow_server: Any = importlib.import_module("mlflow.pyfunc.scoring_server")

_lock = threading.Lock()
installed = False


@dataclass(frozen=True, slots=True)
class Given:
    """A caller's input, wrapped so that MLflow does not convert its frames, arrays or lists."""

    data: Any


def install() -> None:
    """Replace MLflow's functions, once per process. Raises ``PackagingError`` if they are not as expected."""
    global installed
    with _lock:
        if installed:
            return
        names = (
            (pyfunc, "_validate_prediction_input", _validating),
            (mlflow_server, "_parse_json_data", scoring_server.parsing),
            (mlflow_server, "parse_csv_input", scoring_server.parsing_csv),
        )
        for module, name, replacing in names:
            if (plain := getattr(module, name, None)) is None:
                raise _unknown(f"{module.__name__}.{name}")
            setattr(module, name, functools.wraps(plain)(replacing(plain)))
        prove()
        installed = True


def _validating(plain: Any) -> Any:
    def validate(data: Any, params: Any, input_schema: Any, params_schema: Any, flavor: Any = None) -> Any:
        if flavor == LOADER_MODULE and is_lossless(input_schema):
            return Given(data), params
        return plain(data, params, input_schema, params_schema, flavor)

    return validate


PROBE = {"prompt": "x", "no such field": 1}


class _Echo:
    """A model that returns the input that reached it."""

    def predict(self, model_input: Any, params: Any = None) -> Any:
        return [getattr(model_input, "data", None), params]

    def predict_stream(self, model_input: Any, params: Any = None) -> Iterator[Any]:
        yield self.predict(model_input, params)


def prove() -> None:
    """Prove that this MLflow passes requests on whole. Raises ``PackagingError`` if it does not."""
    meta = Model(signature=lossless_signature(), flavors={pyfunc.FLAVOR_NAME: {pyfunc.MAIN: LOADER_MODULE}})
    given = {"no such parameter": [1]}
    expected = [PROBE, given]
    try:
        model = pyfunc.PyFuncModel(model_meta=meta, model_impl=_Echo(), predict_stream_fn="predict_stream")
        ways = {
            "predict": model.predict(PROBE, params=given),
            "predict_stream": next(iter(model.predict_stream(PROBE, params=given))),
            "models serve": _served(model, {"inputs": PROBE, "params": given}),
        }
    except Exception as error:
        raise _unknown(f"{type(error).__name__}: {error}"[:200]) from error
    for way, found in ways.items():
        if found != expected:
            raise _unknown(way)


def _served(model: Any, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    answer = mlflow_server.invocations(data, "application/json", model, model.metadata.get_input_schema())
    return json.loads(answer.response)["predictions"]


def _unknown(what: str) -> PackagingError:
    return PackagingError(
        f"MLflow {mlflow.__version__} hands requests to models in a way that this release of mlflow-llm does not know "
        f"({what}): what a request misspells would be dropped unseen. Use mlflow 3.17, or a later mlflow-llm"
    )
