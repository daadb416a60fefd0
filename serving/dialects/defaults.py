"""The request fields that a model was logged with, for requests that do not have them (``tasks.prepare``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from ..errors import InvalidField
from ..request import RawChat, RawCompletion, RawRequest, Task
from ..structured.grammar import grammar_of
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
    """One set of defaults from several; a later one wins, and a null in it takes an earlier one away."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    return {name: value for name, value in merged.items() if value is not None}


# What tools there are is for who calls them: a reply with a call to a caller that knows none would be of no use.
_TOOLS = ("tools", "tool_choice")
_SIDES = ("documents", "text_2")
NO_DEFAULT = (*CONTENT, *_SIDES, "model", "adapter", "stream", "stream_options", *_TOOLS, *REFUSED_FIELDS)


def check_defaults(values: Mapping[str, Any], parent: str = "defaults") -> None:
    """Raises ``InvalidField`` for what is no request field, cannot have a default, or is a value that no task takes."""
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
    """Raises ``InvalidField`` for a form that no text can be held to."""
    constraint = raw.sampling.constraint if isinstance(raw, RawChat | RawCompletion) else None
    if constraint is not None and constraint.kind != "text":
        grammar_of(constraint)


def defaults_of(values: Mapping[str, Any]) -> Callable[[Task], RawRequest | None]:
    """``values`` as they would be read in a request of each task, whose own content means nothing; fields that a task
    does not have are left out. What is returned raises ``InvalidField`` for a value that the task does not take."""

    @functools.cache
    def read(task: Task) -> RawRequest | None:
        own = {name: value for name, value in values.items() if name in MLFLOW[task].fields}
        return decode(MLFLOW, _CONTENT[task] | own, task) if own else None

    return read
