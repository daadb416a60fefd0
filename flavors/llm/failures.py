"""How a ``PackagingError`` reaches a caller of MLflow: as an ``MlflowException`` with one short message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from ...serving.errors import PackagingError

FLAVOR_NAME = "llm"

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Raise ``MlflowException`` (INVALID_PARAMETER_VALUE, status 400) for a ``PackagingError`` in ``function``."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PackagingError as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from None

    return wrapped
