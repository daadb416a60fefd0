"""The forms in which ``predict`` gives a reply: the whole object, its text alone, or its vector alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ....serving.interface.errors import InvalidField
from ....serving.interface.reply import Reply
from ....serving.interface.request import ValidRequest
from ..model.model_config import REPLY

TEXT, EMBEDDING, JSON = "text", "embedding", "json"
EMBEDDING_JSON = "embedding_json"  # for spark_udf, which has texts alone
MARK = "mark"  # likewise, a value of on_error: texts begin with MARKER, and "" stands for a failed request
MARKER = "+"
TASKS = {TEXT: ("chat", "completions"), EMBEDDING: ("embeddings",), EMBEDDING_JSON: ("embeddings",)}
FIELD = "params.output"


def check_output(request: ValidRequest, output: str) -> None:
    """Raise ``InvalidField`` for a request whose reply is not one text, or not one vector."""
    if output in (REPLY, JSON):
        return
    if request.task not in TASKS[output]:
        raise InvalidField(FIELD, output, f"'reply' for a request of {request.task}")
    if len(request.sequences) != 1:
        raise InvalidField(FIELD, output, f"'reply' for a request with {len(request.sequences)} results")


def output_of(reply: Reply, output: str) -> Any:
    """Return the text or the vector of a reply whose request ``check_output`` has passed."""
    if output == TEXT:
        return reply.choices[0].text
    vector = np.frombuffer(reply.vectors[0], dtype="<f4").tolist()
    return json.dumps(vector) if output == EMBEDDING_JSON else vector
