"""Tools, calls and results as plain text, for chat templates that know none of them.

The words are what Hermes' models and Qwen's were trained with, which small models have met most often; the calls are
written in any format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..request import ToolCall
from .composed import Composed, Own
from .formats import ToolFormat
from .written import written_calls

_EXAMPLE = ToolCall(id="", name="function-name", arguments={"argument-name": "value"})


def tools_text(format: ToolFormat, tools: Sequence[dict[str, Any]]) -> Composed:
    """What a system message says of ``tools``, which are in transformers' form. Same tools, same text."""
    several = "one or more functions" if format.parallel else "a function"
    return Composed(
        Own(f"# Tools\n\nYou may call {several} to assist with the user query.\n\n"),
        Own("You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"),
        "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools),
        Own("</tools>\n\nFor each function call, write its name and its arguments in this form:\n"),
        written_calls(format, (_EXAMPLE,)),
    )


def result_text(content: str) -> Composed:
    """The result of a call, as a part of a user's message."""
    return Composed(Own("<tool_response>\n"), content, Own("\n</tool_response>"))
