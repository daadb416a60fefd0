"""Giving a loaded model's engine up by name, whatever object the model was loaded as."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from mlflow.exceptions import MlflowException

if TYPE_CHECKING:
    from mlflow.pyfunc import PyFuncModel

    from .model import LanguageModel
    from .pyfunc import PyfuncModel

M = TypeVar("M", bound="LanguageModel | PyfuncModel | PyFuncModel")


def close(model: LanguageModel | PyfuncModel | PyFuncModel) -> None:
    """Give up the engine of what ``load_model`` or ``mlflow.pyfunc.load_model`` returned.

    What runs on this object ends with an error; the engine process ends when no other client uses it. Closing twice is
    harmless. An object that nobody holds any more gives its engine up by itself.

    Raises:
        MlflowException: ``model`` is no model of this flavor.
    """
    _own(model).close()


@contextlib.contextmanager
def closing(model: M) -> Iterator[M]:
    """``with closing(mlflow.pyfunc.load_model(uri)) as model:`` closes the model at the end of the block."""
    own = _own(model)
    try:
        yield model
    finally:
        own.close()


def _own(model: object) -> LanguageModel | PyfuncModel:
    from mlflow.pyfunc import PyFuncModel

    from .model import LanguageModel
    from .pyfunc import PyfuncModel

    raw: object = model
    if isinstance(model, PyFuncModel):
        with contextlib.suppress(NotImplementedError):
            raw = model.get_raw_model()
    if not isinstance(raw, LanguageModel | PyfuncModel):
        raise MlflowException.invalid_parameter_value(
            f"model: a {type(model).__name__} is not allowed; expected what llm.load_model, or mlflow.pyfunc.load_model"
            " for a model of the flavor llm, returned"
        )
    return raw
