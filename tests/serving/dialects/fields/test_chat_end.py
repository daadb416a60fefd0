"""How a chat's prompt ends, in the two fields of OpenAI's dialect and those with its fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import RawChat

HI = [{"role": "user", "content": "hi"}]
NAMES = ("openai", "databricks", "openvino")


def _end(dialect: str, **fields: Any) -> str:
    body = json.dumps({"model": "m", "messages": HI, **fields}).encode()
    codec = DIALECTS[dialect]
    route = next(route for route in codec.routes if route.task in ("chat", None))
    raw = codec.decode(Head(route, {}), body)
    assert isinstance(raw, RawChat)
    return raw.end


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "generation_prompt"),
        ({"add_generation_prompt": True}, "generation_prompt"),
        ({"add_generation_prompt": None, "continue_final_message": None}, "generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "generation_prompt"),
        ({"add_generation_prompt": False}, "closed"),
        ({"continue_final_message": True}, "open"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "open"),
    ],
)
def test_ends(dialect: str, fields: dict[str, Any], end: str) -> None:
    """The reply begins a turn, continues the last one, or follows it as it stands, as in vLLM."""
    assert _end(dialect, **fields) == end


@pytest.mark.parametrize("dialect", NAMES)
def test_not_both(dialect: str) -> None:
    """A reply cannot both begin and continue a message."""
    with pytest.raises(InvalidField, match="add_generation_prompt: True is not allowed; expected false or null"):
        _end(dialect, add_generation_prompt=True, continue_final_message=True)
