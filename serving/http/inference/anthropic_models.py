"""The list of models in the form of Anthropic's API, for callers that send its header ``anthropic-version``.

Source of the format: the API reference of ``/v1/models``. Models here have no capabilities, lines or retirements.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...dialects import DIALECTS
from ...dialects.anthropic.reply_types import ModelInfo
from ...dialects.anthropic.requests import VERSION_HEADER, check_headers
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request
from ...interface.errors import InvalidField
from ...routing.served_endpoints import ServedEntity

BY_HEADER = {VERSION_HEADER: DIALECTS["anthropic"]}
LIFECYCLES = ("active", "deprecated", "retired")
MAX_LIMIT = 1000


class Named(NamedTuple):
    """A model as callers name it: an endpoint, or an adapter of it."""

    name: str
    entity: ServedEntity


def is_meant(request: Request) -> bool:
    """Return whether the caller speaks Anthropic's API. Raises ``InvalidField`` for an unknown version of it."""
    if request.dialect is not DIALECTS["anthropic"]:
        return False
    check_headers(request.headers)
    return True


def one_model(request: Request, model: Named) -> Answer:
    _check_names(request.single_parameters(), ())
    return json_answer(_info(model))


def page_of(request: Request, models: list[Named]) -> Answer:
    """Return the page that the query asks for. Raises ``InvalidField``."""
    given = {name.removesuffix("[]"): values for name, values in request.parameters().items()}
    _check_names(given, ("limit", "after_id", "before_id", "lifecycle"))
    wanted = [stage for text in given.pop("lifecycle", ["active"]) for stage in text.split(",")]
    for stage in wanted:
        if stage not in LIFECYCLES:
            raise InvalidField("lifecycle", stage, "one of " + ", ".join(LIFECYCLES))
    for name, values in given.items():
        if len(values) > 1:
            raise InvalidField(name, values, "one value")
    found = models if "active" in wanted else []
    limit = _limit(given.get("limit", ["20"])[0])
    first, last = 0, len(found)
    if "after_id" in given:
        first = _place("after_id", given["after_id"][0], found) + 1
    if "before_id" in given:
        last = _place("before_id", given["before_id"][0], found)
    backward = "before_id" in given and "after_id" not in given
    shown = found[first:last][-limit:] if backward else found[first:last][:limit]
    names = [model.name for model in shown]
    return json_answer(
        {
            "data": [_info(model) for model in shown],
            "has_more": len(shown) < len(found[first:last]),
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    )


def _info(model: Named) -> ModelInfo:
    length = model.entity.engine.info.max_model_len
    created = datetime.datetime.fromtimestamp(model.entity.created, datetime.UTC)
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def _check_names(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise InvalidField(name[:80], given[name], f"only {', '.join(known)}" if known else "no parameters")


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidField("limit", text, f"an integer from 1 to {MAX_LIMIT}")
    return limit


def _place(field: str, name: str, models: list[Named]) -> int:
    for place, model in enumerate(models):
        if model.name == name:
            return place
    raise InvalidField(field, name, "the id of a listed model")
