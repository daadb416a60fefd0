"""The process that runs MLflow's scorers for the guardrails of one worker.

``python -m mlflow_llm.serving.control.mlflow_processes.scorer_process FD SCORER…`` imports the scorers
(``module:name``), and then answers questions, each a JSON object in a line, on the socket ``FD`` until its other end
closes. A process of its own keeps MLflow, and what a scorer does, out of the worker.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

YES = ("yes", "pass", "true")  # values of a text by which a judge lets a text pass
MIN_PASSING_SCORE = 0.5  # the least number that does
MAX_TOLD = 300  # characters of an error


def scorer_of(name: str) -> Any:
    """Return the scorer that ``module:name`` names, made if it is a class. Raises what an import may, and
    ``TypeError``."""
    from mlflow.genai.scorers import Scorer

    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, type) and issubclass(found, Scorer):
        found = found()
    if not isinstance(found, Scorer):
        raise TypeError(f"{name} is not a scorer of MLflow's")
    return found


def passes(value: Any) -> bool:
    """Return whether what a scorer has returned lets a text pass. Raises ``ValueError`` if it says neither."""
    if isinstance(value, list):
        return all(passes(one) for one in value)
    value = getattr(value, "value", value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value >= MIN_PASSING_SCORE
    if isinstance(value, str):
        return value.strip().lower() in YES
    raise ValueError(f"it returned {type(value).__name__}, neither yes nor no")


def answer(scorers: Mapping[str, Any], question: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"passes": …}``, or ``{"error": …}``."""
    found = scorers[question["scorer"]]
    if isinstance(found, Exception):
        return {"error": _told(found)}
    try:
        return {"passes": passes(found.run(inputs=question["inputs"], outputs=question["outputs"]))}
    except Exception as error:  # a scorer may fail in any way
        return {"error": _told(error)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TOLD]


def main(words: list[str]) -> int:
    connection = socket.socket(fileno=int(words[0]))
    connection.setblocking(True)  # gevent, which has made it, never leaves it so
    scorers: dict[str, Any] = {}
    for name in words[1:]:
        try:
            scorers[name] = scorer_of(name)
        except Exception as error:  # a module may fail in any way, and the others still work
            scorers[name] = error
    with connection, connection.makefile("rb") as lines:
        connection.sendall(b"\n")  # the scorers are there
        for line in lines:
            connection.sendall(json.dumps(answer(scorers, json.loads(line))).encode() + b"\n")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # threads of a scorer may still run
