"""The public errors of the flavor: each of the server's errors has a twin that is an ``MlflowException``.

The two trees have the same classes (a test walks both), and each twin inherits from its original. ``except
MlflowException``, ``except llm.errors.RequestError`` and ``except
mlflow_llm.serving.interface.errors.RequestError`` thus all catch an ``InvalidField`` from the object API or
``predict``. Errors keep ``kind``, ``param``, ``retry_after`` and the
status that an HTTP caller gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

from ...serving.dialects.openai.mlflow import ERROR_CODES
from ...serving.interface import errors

P = ParamSpec("P")
R = TypeVar("R")


class ServingError(errors.ServingError, MlflowException):
    """Base class of the errors of requests and engines. Only ``mlflow_error`` creates them.

    ``message`` is read-only: MLflow's scoring server would otherwise prefix it with the whole input, prompts included.
    """

    _message = ""

    @property
    def message(self) -> str:
        return self._message

    @message.setter
    def message(self, value: str) -> None:
        pass

    def get_http_status_code(self) -> int:
        return self.status

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.__dict__ | {"json_kwargs": {}}, self._message)


class RequestError(errors.RequestError, ServingError):
    pass


class InvalidField(errors.InvalidField, RequestError):
    pass


class ContextTooLong(errors.ContextTooLong, RequestError):
    pass


class Unauthenticated(errors.Unauthenticated, RequestError):
    pass


class PermissionDenied(errors.PermissionDenied, RequestError):
    pass


class NotFound(errors.NotFound, RequestError):
    pass


class MethodNotAllowed(errors.MethodNotAllowed, RequestError):
    pass


class RequestTimeout(errors.RequestTimeout, RequestError):
    pass


class AlreadyExists(errors.AlreadyExists, RequestError):
    pass


class Conflict(errors.Conflict, RequestError):
    pass


class PayloadTooLarge(errors.PayloadTooLarge, RequestError):
    pass


class UriTooLong(errors.UriTooLong, RequestError):
    pass


class UnsupportedMediaType(errors.UnsupportedMediaType, RequestError):
    pass


class ExpectationFailed(errors.ExpectationFailed, RequestError):
    pass


class PoisonRequest(errors.PoisonRequest, RequestError):
    pass


class LimitExceeded(errors.LimitExceeded, RequestError):
    pass


class HeadersTooLarge(errors.HeadersTooLarge, RequestError):
    pass


class Unavailable(errors.Unavailable, ServingError):
    pass


class Overloaded(errors.Overloaded, Unavailable):
    pass


class ShuttingDown(errors.ShuttingDown, Unavailable):
    pass


class EngineDied(errors.EngineDied, Unavailable):
    pass


class DeadlineExceeded(errors.DeadlineExceeded, ServingError):
    pass


class Aborted(errors.Aborted, ServingError):
    pass


class InternalError(errors.InternalError, ServingError):
    pass


class PackagingError(errors.PackagingError, MlflowException):
    """INVALID_PARAMETER_VALUE, status 400."""

    code: ClassVar[int] = INVALID_PARAMETER_VALUE

    def __init__(self, message: str) -> None:
        MlflowException.__init__(self, message, error_code=self.code)


class ModelNotFound(errors.ModelNotFound, PackagingError):
    """RESOURCE_DOES_NOT_EXIST, status 404."""

    code = RESOURCE_DOES_NOT_EXIST


def _mirrored(cls: type[ServingError]) -> dict[type[errors.ServingError], type[ServingError]]:
    """Map classes of ``serving.errors`` to their twins here, for ``cls`` and its subclasses."""
    found: dict[type[errors.ServingError], type[ServingError]] = {cls.__mro__[1]: cls}
    for child in cls.__subclasses__():
        found |= _mirrored(child)
    return found


CLASSES = _mirrored(ServingError)


def mlflow_error(error: errors.ServingError | errors.PackagingError) -> MlflowException:
    """Convert ``error`` to its ``MlflowException`` twin, with the error code that the MLflow dialect gives it."""
    if isinstance(error, MlflowException):
        return error
    if isinstance(error, errors.PackagingError):
        return (ModelNotFound if isinstance(error, errors.ModelNotFound) else PackagingError)(str(error))
    cls = CLASSES[type(error)]
    code = ERROR_CODES[error.kind]
    found = _rebuilt(cls, {}, error.message)
    MlflowException.__init__(found, error.message, error_code=ErrorCode.Value(code))
    found.__dict__.update({name: value for name, value in vars(error).items() if name != "message"})
    return found


@contextmanager
def as_mlflow() -> Iterator[None]:
    """Convert a ``ServingError`` or ``PackagingError`` raised in the block to its ``MlflowException`` twin."""
    try:
        yield
    except (errors.ServingError, errors.PackagingError) as error:
        raise mlflow_error(error) from None


def raises_mlflow(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that each call is wrapped in ``as_mlflow``."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with as_mlflow():
            return function(*args, **kwargs)

    return wrapped


def _rebuilt(cls: type[ServingError], values: dict[str, Any], message: str) -> ServingError:
    found = cls.__new__(cls, message)
    found.__dict__.update(values)
    found._message = message
    return found
