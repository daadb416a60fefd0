"""Pairs of answers to the same request: one of the version that an alias names, one of the candidate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...interface.errors import shown

PASSING = (408, 429, 499, 502, 503, 504)
"""Statuses that say nothing of a version's answer: the engine was busy or away, or the caller went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of one version to a request: the HTTP status, ``output`` as scorers get it, or the ``error``."""

    status: int
    output: Any = None
    error: str = ""

    @property
    def is_answer(self) -> bool:
        return self.status < 400 and self.output is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A request with the outcomes of both versions. ``name`` says where it comes from: a line, or a request's id."""

    name: str
    inputs: dict[str, Any]
    current: Outcome
    candidate: Outcome
    expectations: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.current.is_answer and self.candidate.is_answer

    @property
    def is_failure(self) -> bool:
        """Whether the candidate failed at a request that the current version answered."""
        return self.current.is_answer and self.candidate.status >= 400 and self.candidate.status not in PASSING


def outcome_of(status: int, body: dict[str, Any]) -> Outcome:
    """Return the outcome of a reply with choices, or of an error."""
    if status >= 400:
        return Outcome(status=status, error=_message(body))
    return Outcome(status=status, output=output_of(body))


def output_of(body: dict[str, Any]) -> Any:
    """Return what scorers get of a reply: the text of its first choice, or its message if that calls tools."""
    choices: Sequence[dict[str, Any]] = body.get("choices") or ()
    if not choices:
        return None
    first = choices[0]
    if "text" in first:
        return first["text"]
    message = first.get("message") or {}
    return message if message.get("tool_calls") else message.get("content")


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    text = error.get("message", error) if isinstance(error, dict) else error
    return text if isinstance(text, str) else shown(json.dumps(text))
