"""Every error that a caller can get, in one tree.

::

    ServingError                 kind, status; ``message`` is safe to show to any caller
    ├── RequestError             the caller's mistake: never retried with the same body
    │   ├── InvalidField         400  a field, its value and what is allowed
    │   ├── ContextTooLong       400  prompt (+ max_tokens) over the context length
    │   ├── Unauthenticated      401
    │   ├── PermissionDenied     403
    │   ├── NotFound             404  endpoint, model, adapter or route
    │   ├── MethodNotAllowed     405
    │   ├── RequestTimeout       408  head or body arrives too slowly (Slowloris)
    │   ├── AlreadyExists        409
    │   ├── Conflict             409  legal in another state (an update while one runs)
    │   ├── PayloadTooLarge      413
    │   ├── UriTooLong           414
    │   ├── UnsupportedMediaType 415  a Content-Type that the route does not take
    │   ├── ExpectationFailed    417
    │   ├── PoisonRequest        422  one engine after another died while running it
    │   ├── LimitExceeded        429  a rate, token or money limit; names it and says until when
    │   └── HeadersTooLarge      431
    ├── Unavailable              503  try again after ``retry_after`` seconds
    │   ├── Overloaded           503  the queue is full
    │   ├── ShuttingDown         503  draining
    │   └── EngineDied           503  the engine process ended and could not be restarted
    ├── DeadlineExceeded         504  the request's own time limit passed
    ├── Aborted                  499  the caller went away or asked for the abort
    └── InternalError            500  the server's own fault; details are in the log under the request id
    PackagingError               raised when a model is logged, saved or loaded (never over the wire)
    └── ModelNotFound            no model has that name; says where it was looked for, and which names are near

A class carries its ``kind`` and HTTP ``status``, which no other code names; dialects render them
(``dialects/base.py``). Tests check that the classes are those of this tree and that each dialect renders them all.
Errors that only HTTP distinguishes (408, 414, 415, 417, 431) have the kind ``bad_request``. Messages are short and
never repeat a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar

MAX_SHOWN_VALUE = 80
_SECRETS = (r"^((?:[^:/@]+://)?[^:/@]*:)(?!//).*(?=@)", r"([?&]password=)[^&]*")


def shown(value: Any) -> str:
    """Return a caller's value as it may appear in a message: repr, cut to ``MAX_SHOWN_VALUE`` characters."""
    try:
        text = repr(_beginning(value))
    except Exception:  # a caller's object may have a repr that raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 1] + "…"


def _beginning(value: Any) -> Any:
    """Return the part of a value that its first ``MAX_SHOWN_VALUE`` characters need: its repr may be megabytes."""
    if isinstance(value, str | bytes):
        return value[: MAX_SHOWN_VALUE + 1]
    if isinstance(value, list | tuple):
        entries = map(_beginning, value[:MAX_SHOWN_VALUE])
        return list(entries) if isinstance(value, list) else tuple(entries)
    if isinstance(value, dict):
        return {_beginning(key): _beginning(entry) for key, entry in islice(value.items(), MAX_SHOWN_VALUE)}
    return value


def reason(error: BaseException) -> str:
    """Return the reason in one short line, for another library's error, whose message may be pages long or empty.

    A line that only introduces the next one (it ends in ``:``, or is a heading between ``#``) is joined with it.
    """
    said: list[str] = []
    for line in islice(filter(str.strip, str(error).splitlines()), 3):
        said.append(line.strip()[:200])
        if not line.rstrip().endswith((":", "#")):
            break
    return " ".join(said) or type(error).__name__


def without_password(url: str) -> str:
    """Return a store's URL as it may appear in a message."""
    for secret in _SECRETS:
        url = re.sub(secret, r"\1***", url)
    return url


class ServingError(Exception):
    """Base of every error that may cross a process or the wire.

    ``param`` names the request field at fault; ``retry_after`` is in seconds. Both may be None.
    """

    kind: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    is_as_sent = False  # whether the caller sent a field of this very name, so that no dialect renames it

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without ``__init__``, whose arguments differ by class, so that an error crosses processes whole."""
        return _again, (type(self), self.args), self.__dict__

    def name_as_sent(self, names: Mapping[str, str]) -> None:
        """Name fields as the caller did: ``names`` has those names by the ones that are used below the dialects.

        Words of the message that are also English (prompt, stop) are left, except for the field at fault.
        """
        root = re.match(r"\w*", self.param or "")
        if self.is_as_sent or not names or root is None:
            return
        sent, name = names.get(root[0]), self.param or ""
        begins = sent is not None and self.message.startswith(name)
        message = self.message[len(name) :] if begins else self.message
        for canonical in filter(lambda known: "_" in known, names):
            message = re.sub(rf"\b{canonical}\b", names[canonical], message)
        if sent is not None:
            self.param, self.is_as_sent = sent + name[len(root[0]) :], True
            message = self.param + message if begins else message
        self.message, self.args = message, (message,)

    @property
    def logged(self) -> str:
        """The message for logs and traces, without anything that may come from a prompt."""
        return self.message


@contextmanager
def as_sent() -> Iterator[None]:
    """Mark errors raised inside: they name fields as the caller sent them."""
    try:
        yield
    except ServingError as error:
        error.is_as_sent = True
        raise


def _again(kind: type[ServingError], arguments: tuple[Any, ...]) -> ServingError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class RequestError(ServingError):
    kind = "bad_request"
    status = 400


def _because(allowed: str) -> str:
    return f": {allowed}" if allowed.startswith("no such ") else f"; expected {allowed}"


class InvalidField(RequestError):
    """A field with a value that is not allowed: ``InvalidField("temperature", -1, "a number in [0, 2]")``."""

    kind = "invalid_field"
    _told, _allowed = "", ""  # of an error that came from another process

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field}: {shown(value)} is not allowed{_because(allowed)}", param=field)
        self._told = shown(value) if value is None or isinstance(value, bool | int | float) else "the value"
        self._allowed = allowed

    @property
    def logged(self) -> str:
        """The message for logs and traces: it shows numbers; for texts, lists and objects it names only the field."""
        if not self._allowed:
            return f"{self.param}: not allowed" if self.param else self.kind
        return f"{self.param}: {self._told} is not allowed{_because(self._allowed)}"

    def rename(self, field: str) -> None:
        """Name another field: only the caller of a reader knows where the value came from."""
        self.message = field + self.message.removeprefix(self.param or "")
        self.param, self.args = field, (self.message,)


class ContextTooLong(RequestError):
    kind = "context_too_long"


class Unauthenticated(RequestError):
    kind = "unauthenticated"
    status = 401


class PermissionDenied(RequestError):
    kind = "permission_denied"
    status = 403


class NotFound(RequestError):
    kind = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    kind = "method_not_allowed"
    status = 405


class RequestTimeout(RequestError):
    status = 408


class AlreadyExists(RequestError):
    kind = "already_exists"
    status = 409


class Conflict(RequestError):
    kind = "conflict"
    status = 409


class PayloadTooLarge(RequestError):
    kind = "payload_too_large"
    status = 413


class UriTooLong(RequestError):
    status = 414


class UnsupportedMediaType(RequestError):
    status = 415


class ExpectationFailed(RequestError):
    status = 417


UNPROCESSABLE = 422  # some APIs document this status for every invalid request


class PoisonRequest(RequestError):
    """A request on which engines died. It is not ``Unavailable``: clients would retry it by themselves, and the engine
    that others share would die again."""

    kind = "ends_engines"
    status = UNPROCESSABLE


class LimitExceeded(RequestError):
    """A limit was reached. ``limit`` is its name (``otpm``); ``remaining`` is the amount left, in its unit."""

    kind = "limit_exceeded"
    status = 429
    limit = ""

    def __init__(
        self,
        message: str,
        *,
        limit: str = "",
        allowed: int | None = None,
        remaining: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit
        self.allowed = allowed
        self.remaining = remaining

    @property
    def is_budget(self) -> bool:
        """Whether money has been spent, as opposed to requests that came too fast."""
        return self.limit.startswith("budget")


class HeadersTooLarge(RequestError):
    status = 431


class Unavailable(ServingError):
    kind = "unavailable"
    status = 503


class Overloaded(Unavailable):
    kind = "overloaded"


class ShuttingDown(Unavailable):
    kind = "shutting_down"


class EngineDied(Unavailable):
    kind = "engine_died"


class DeadlineExceeded(ServingError):
    kind = "deadline_exceeded"
    status = 504


class Aborted(ServingError):
    kind = "aborted"
    status = 499


class InternalError(ServingError):
    kind = "internal"
    status = 500


class PackagingError(ValueError):
    """A model cannot be logged, saved or loaded as asked; the message says what to change."""


class ModelNotFound(PackagingError):
    """The error that there is no model with the given name."""


def walk(root: type[ServingError] = ServingError) -> list[type[ServingError]]:
    """Return ``root`` and every class below it, parents first."""
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == root.__module__:  # skips the flavor's twins, which are MLflow exceptions too
            found.extend(walk(child))
    return found


def from_kind(kind: str, message: str, *, param: str | None = None) -> ServingError:
    """Return the error for a ``kind``, to raise again an error that came from another process."""
    cls = next((c for c in walk() if c.kind == kind), InternalError)
    error = cls.__new__(cls)
    ServingError.__init__(error, message, param=param)
    if isinstance(error, LimitExceeded):
        error.limit, error.allowed, error.remaining = "", None, None
    return error
