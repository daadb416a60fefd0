"""The request fields that a model was logged with, for requests that do not have them (``tasks.defaults``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..request import RawRequest, Task
from .decode import decode
from .tables import MLFLOW

_CONTENT: Mapping[Task, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": ""}]},
    "completions": {"prompt": ""},
    "embeddings": {"input": ""},
}


def defaults_of(values: Mapping[str, Any]) -> Callable[[Task], RawRequest | None]:
    """``values`` as they would be read in a request of each task, whose own content means nothing; fields that a task
    does not have are left out. What is returned raises ``InvalidField`` for a value that the task does not take."""

    @functools.cache
    def read(task: Task) -> RawRequest | None:
        own = {name: value for name, value in values.items() if name in MLFLOW[task].fields}
        return decode(MLFLOW, _CONTENT[task] | own, task) if own else None

    return read
