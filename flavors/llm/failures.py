"""How errors reach a caller of MLflow: as an ``MlflowException`` with one short message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from ...serving.errors import PackagingError, ServingError
from . import errors

FLAVOR_NAME = "llm"
LOADER_MODULE = "mlflow_llm.flavors.llm"

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def told() -> Iterator[None]:
    """A ``ServingError`` or ``PackagingError`` inside becomes the one of ``errors``, which is MLflow's too."""
    try:
        yield
    except (ServingError, PackagingError) as error:
        raise errors.public(error) from None


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what a caller calls: ``told``."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with told():
            return function(*args, **kwargs)

    return wrapped
