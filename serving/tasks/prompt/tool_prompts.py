"""Puts the tools of a request into its prompt: by the chat template, or as text if the template knows no tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interface.request import Message, RawChat
from ...tool_calls.detect import GENERIC
from ...tool_calls.generic import tools_text
from .conversation import template_messages
from .text import TextModel
from .tool_messages import (
    calls_as_text,
    shown_tools,
    template_tools,
    with_message_tools,
    with_names_and_ids,
    with_system_text,
)

TOOL_TEMPLATE = "tool_use"  # transformers' name for the template of chats with tools, if a model has a separate one


def template_name(raw: RawChat, text: TextModel) -> str | None:
    """Return the name of a chat's template: the one that the request names, or else the one that transformers uses."""
    if raw.chat_template is None and raw.tools and TOOL_TEMPLATE in text.templates:
        return TOOL_TEMPLATE
    return raw.chat_template


def with_tools(
    messages: Sequence[Message], raw: RawChat, text: TextModel
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return ``messages`` as the template reads them, with the tools of ``raw``, and the variables for the template."""
    given = template_messages(messages)
    tools = template_tools(shown_tools(raw))
    calling = any(message.tool_calls for message in messages)
    if not tools and not calling:
        return given, {}
    template = template_name(raw, text)
    format, reads = text.tool_format(template), text.reads(template)
    way = None if format.name == GENERIC.name else reads.tools
    if calling and not (reads.tool_calls and (way is not None or not tools)):
        given = calls_as_text(given, messages, format, results=way is None)
    given = with_names_and_ids(given, format)
    if way == "variable" or not tools:
        return given, {"tools": tools} if tools else {}
    if way == "message":
        return with_message_tools(given, tools, format), {}
    return with_system_text(given, tools_text(format, tools), system=text.takes_system(template)), {}
