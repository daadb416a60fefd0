"""Tools, calls and results as plain text, for chat templates that do not support them.

The wording is the one that the Hermes and Qwen models were trained with, which small models have seen most often. The
calls can be in any format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..interface.request import ToolCall
from ..interface.tool_format import ToolFormat
from .call_writer import written_calls
from .trusted_text import ComposedText, TrustedText

_EXAMPLE = ToolCall(id="", name="function-name", arguments={"argument-name": "value"})


def tools_text(format: ToolFormat, tools: Sequence[dict[str, Any]]) -> ComposedText:
    """Return the text about ``tools``, in transformers' form, for a system message. Equal tools give equal texts."""
    several = "one or more functions" if format.parallel else "a function"
    return ComposedText(
        TrustedText(f"# Tools\n\nYou may call {several} to assist with the user query.\n\n"),
        TrustedText("You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"),
        "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools),
        TrustedText("</tools>\n\nFor each function call, write its name and its arguments in this form:\n"),
        written_calls(format, (_EXAMPLE,)),
    )


def result_text(content: str) -> ComposedText:
    """Return the result of a call as a part of a user message."""
    return ComposedText(TrustedText("<tool_response>\n"), content, TrustedText("\n</tool_response>"))
