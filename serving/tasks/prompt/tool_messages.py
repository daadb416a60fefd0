"""Tools, calls and results in a chat: which of them a conversation may have, and how its template receives them.

A template that reads tools gets them in transformers' form. For a template that does not, or whose format is unknown,
they are put into the text of the messages.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Sequence
from typing import Any

from ...interface.errors import InvalidField
from ...interface.request import ChatEnd, Message, RawChat, Tool, ToolCall
from ...interface.tool_format import CUSTOM_INPUT, ToolFormat
from ...tool_calls.call_writer import written_calls
from ...tool_calls.generic import result_text
from ...tool_calls.trusted_text import ComposedText, TrustedText

_ALNUM = string.ascii_letters + string.digits
_NO_PARAMETERS = {"type": "object", "properties": {}}
_CUSTOM = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}


def check_tool_messages(messages: Sequence[Message], end: ChatEnd = "generation_prompt") -> None:
    """Check that each call of an assistant message is answered by one tool message, before any other message.

    Raises ``InvalidField`` for an id that is unknown, duplicated or not answered. The calls of the last message need no
    answer if no generation prompt follows (``end``).
    """
    calling, waiting, answered = 0, dict[str, None](), set[str]()
    for i, message in enumerate(messages):
        if message.role == "tool":
            _check_answer(message, f"messages[{i}].tool_call_id", waiting, answered)
            continue
        if waiting:
            raise InvalidField(f"messages[{i}].role", message.role, _unanswered(calling, waiting))
        calling, waiting, answered = i, _ids(message, i), set()
    if waiting and not (end != "generation_prompt" and calling == len(messages) - 1):
        allowed = _unanswered(calling, waiting)
        raise InvalidField(f"messages[{len(messages) - 1}].role", messages[-1].role, allowed)


def _check_answer(message: Message, path: str, waiting: dict[str, None], answered: set[str]) -> None:
    asked = message.tool_call_id
    if asked in answered:
        raise InvalidField(path, asked, "one answer to each call: this one is answered already")
    if asked not in waiting:
        ids = ", ".join(map(repr, waiting)) or "no call waits for an answer here"
        raise InvalidField(path, asked, f"the id of an open tool call: {ids}")
    del waiting[asked]
    answered.add(asked)


def _unanswered(calling: int, waiting: dict[str, None]) -> str:
    ids = ", ".join(map(repr, waiting))
    return f"tool: the calls of messages[{calling}] are to be answered first, which are {ids}"


def _ids(message: Message, i: int) -> dict[str, None]:
    found: dict[str, None] = {}
    for j, call in enumerate(message.tool_calls):
        if call.id in found:
            raise InvalidField(f"messages[{i}].tool_calls[{j}].id", call.id, "an id that no earlier call has")
        found[call.id] = None
    return found


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools in transformers' form. A custom tool becomes a function with one string parameter."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    # many templates iterate over properties without checking that there are any
    parameters = _CUSTOM if tool.kind == "custom" else {**_NO_PARAMETERS, **(tool.parameters or {})}
    return {"name": tool.name, "description": tool.description or "", "parameters": parameters}


def shown_tools(raw: RawChat) -> tuple[Tool, ...]:
    """Return the tools that the prompt shows to the model: none if it may call none."""
    if not raw.tools or (raw.tool_choice is not None and raw.tool_choice.mode == "none"):
        return ()
    return raw.tools


def with_names_and_ids(messages: list[dict[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Return ``messages`` with the tool's name in each tool message, and with call ids in the form that the format's
    templates expect. Changes the messages in place."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            call["id"] = _id(call["id"], format)
        if (asked := message.get("tool_call_id")) is not None:
            if asked in names:
                message.setdefault("name", names[asked])
            message["tool_call_id"] = _id(asked, format)
    return messages


def _id(given: str, format: ToolFormat) -> str:
    """Return the id in the format's form; equal ids give equal results."""
    if format.ids != "alnum9" or (len(given) == 9 and given.isascii() and given.isalnum()):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode(errors="surrogatepass")).digest(), "big")
    return "".join(_ALNUM[number // len(_ALNUM) ** i % len(_ALNUM)] for i in range(9))


def with_message_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], format: ToolFormat
) -> list[dict[str, Any]]:
    """Return ``messages`` with the tools in the system message, for a template that reads them there.

    Phi's template takes the functions as JSON text, others take a list of tools.
    """
    given: Any = tools
    if format.name == "phi4_mini":
        given = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    system = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    return [{**system, "tools": given}, *messages[messages[0]["role"] == "system" :]]


def calls_as_text(
    messages: Sequence[dict[str, Any]], given: Sequence[Message], format: ToolFormat, *, results: bool
) -> list[dict[str, Any]]:
    """Return ``messages`` with the calls of ``given`` written into their texts.

    With ``results``, the results of the calls become user messages too. A user message that follows results is joined
    to the same turn, because some templates require user and assistant to alternate.
    """
    found: list[dict[str, Any]] = []
    for message, original in zip(messages, given, strict=True):
        role = message["role"]
        if original.tool_calls:
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append({**plain, "content": _called(message["content"], original.tool_calls, format)})
        elif role == "tool" and results:
            part = result_text(message["content"])
            if found and found[-1].get("_results"):
                found[-1]["content"] = ComposedText(found[-1]["content"], TrustedText("\n"), part)
            else:
                found.append({"role": "user", "content": part, "_results": True})
        elif role == "user" and found and found[-1].pop("_results", False):
            found[-1]["content"] = _before(ComposedText(found[-1]["content"], TrustedText("\n\n")), message["content"])
        else:
            found.append(message)
    return [{key: value for key, value in message.items() if key != "_results"} for message in found]


def _called(content: str, calls: Sequence[ToolCall], format: ToolFormat) -> ComposedText:
    return ComposedText(content, TrustedText("\n" if content else ""), written_calls(format, calls))


def with_system_text(messages: list[dict[str, Any]], text: str, *, system: bool) -> list[dict[str, Any]]:
    """Return ``messages`` with ``text`` at the end of the system message, which is added if there is none.

    Without ``system``, for templates that accept no system message, the text is put before the first message's text.
    """
    first = messages[0]
    if first["role"] == "system":
        content = first["content"]
        return [
            {**first, "content": ComposedText(content, TrustedText("\n\n" if content else ""), text)},
            *messages[1:],
        ]
    if system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _before(ComposedText(text, TrustedText("\n\n")), first["content"])}, *messages[1:]]


def _before(text: ComposedText, content: Any) -> Any:
    """Return ``content``, a text or parts with images, with ``text`` before it."""
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else ComposedText(text, content)
