"""Request fields that a model was logged with: the defaults of requests without these fields (``tasks.prepare``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from ...interface.errors import InvalidField
from ...interface.request import RawChat, RawCompletion, RawRequest, Task
from ...structured.grammar import grammar_of
from .decode import decode
from .fields import CONTENT, unknown_field
from .tables import FIELDS, MLFLOW, REFUSED_FIELDS

_CONTENT: Mapping[Task, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": ""}]},
    "completions": {"prompt": ""},
    "embeddings": {"input": ""},
    "score": {"query": "", "documents": ""},
}


def request_defaults(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several sets of defaults; a later value wins, and a null removes an earlier value."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    return {name: value for name, value in merged.items() if value is not None}


# Only the caller runs tools: a tool call would be of no use to a caller that did not send the tools.
_TOOLS = ("tools", "tool_choice")
_SIDES = ("documents", "text_2")
_OF_ONE_REQUEST = ("model", "adapter", "stream", "stream_options", "databricks_options")
NO_DEFAULT = (*CONTENT, *_SIDES, *_OF_ONE_REQUEST, *_TOOLS, *REFUSED_FIELDS)


def check_defaults(values: Mapping[str, Any], parent: str = "defaults") -> None:
    """Raise ``InvalidField`` for a name that is not a request field or cannot have a default, and for a value that is
    not valid in every task with this field."""
    known = [name for name in dict.fromkeys(chain(*FIELDS.values())) if name not in NO_DEFAULT]
    for name, value in values.items():
        if name not in known:
            raise unknown_field(name, value, known, f"{parent}.")
    for task in MLFLOW:
        try:
            _check_form(defaults_of(values)(task))
        except InvalidField as error:
            error.rename(f"{parent}.{error.param}")
            raise


def _check_form(raw: RawRequest | None) -> None:
    """Raise ``InvalidField`` for a constraint that is invalid or not supported."""
    constraint = raw.sampling.constraint if isinstance(raw, RawChat | RawCompletion) else None
    if constraint is not None and constraint.kind != "text":
        grammar_of(constraint)


def defaults_of(values: Mapping[str, Any]) -> Callable[[Task], RawRequest | None]:
    """Return a function that reads ``values`` as the fields of a request of a given task.

    Fields that the task does not have are left out; if none remain, it returns None. The content of the request that it
    returns has no meaning. It raises ``InvalidField`` for a value that the task does not accept.
    """

    @functools.cache
    def read(task: Task) -> RawRequest | None:
        own = {name: value for name, value in values.items() if name in MLFLOW[task].fields}
        return decode(MLFLOW, _CONTENT[task] | own, task) if own else None

    return read


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_tokens", "min_tokens",
)  # fmt: skip


def own_sampling(defaults: Callable[[Task], RawRequest | None], task: Task = "chat") -> dict[str, Any]:
    """Return the sampling values that a request of ``task`` gets where it sets none, as far as a model or an endpoint
    has its own. ``defaults`` is made by ``defaults_of``."""
    raw = defaults(task)
    if not isinstance(raw, RawChat | RawCompletion):
        return {}
    values = ((name, getattr(raw.sampling, name)) for name in SAMPLING)
    return {name: value for name, value in values if value is not None}
