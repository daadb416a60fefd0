"""Prepares a chat for its template: checks the turns and converts the messages to the form that templates read.

A variable that the template does not read would have no effect, so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interface.errors import InvalidField
from ...interface.request import ChatEnd, MediaPart, Message, RawChat, TextPart, Thinking, ToolCall
from .rendering import TemplateReads


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates read them (transformers' form).

    Text parts are joined without a separator, but those beside images are a list with a place for each image."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _template_content(message)}
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _template_content(message: Message) -> Any:
    content = message.content
    if isinstance(content, str) or not any(isinstance(part, MediaPart) for part in content):
        return message.text
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in content
    ]


def _template_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def with_system(messages: tuple[Message, ...], prompt: str | None) -> tuple[Message, ...]:
    """Return ``messages`` with the endpoint's own system prompt in front, if they have no system message."""
    if not prompt or messages[0].role == "system":
        return messages
    return (Message(role="system", content=prompt), *messages)


def check_turns(messages: tuple[Message, ...], end: ChatEnd = "generation_prompt") -> None:
    """Check the order of turns: at most one system message, as the first one, then user and assistant in turn.

    The last message is the user's if a generation prompt follows (``end``). An assistant message with tool calls is
    followed by tool messages (``tool_messages`` checks which), and then by the assistant or the user. Raises
    ``InvalidField``.
    """
    if end != "generation_prompt" and messages[-1].role == "assistant":
        messages = messages[:-1]
        if not messages:
            raise InvalidField("messages[0].role", "assistant", "user at this place")
    turns = messages[1:] if messages[0].role == "system" else messages
    start = len(messages) - len(turns)
    expected: tuple[str, ...] = ("user",)
    for i, message in enumerate(turns, start):
        role = message.role
        if role not in expected:
            raise InvalidField(f"messages[{i}].role", role, " or ".join(expected) + " at this place")
        if role == "tool":
            expected = ("tool", "assistant", "user")
        elif message.tool_calls:
            expected = ("tool",)
        else:
            expected = ("user",) if role == "assistant" else ("assistant",)
    if not turns or turns[-1].role not in ("user", "tool"):
        last = messages[-1].role
        raise InvalidField(f"messages[{len(messages) - 1}].role", last, "user: the last message is the user's")


# Parameters of rendering itself; a template's own variables have other names.
RESERVED = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
    )
)


def template_variables(given: dict[str, Any] | None, reads: TemplateReads) -> dict[str, Any]:
    """Return the request's ``chat_template_kwargs``. Raises ``InvalidField`` for a name the template does not read."""
    for name, value in (given or {}).items():
        if not name.isidentifier() or name in RESERVED:
            raise InvalidField(f"chat_template_kwargs.{name[:64]}", value, "variables of the template, by their names")
        if reads.variables is not None and name not in reads.variables:
            names = ", ".join(sorted(reads.variables - RESERVED)) or "none"
            raise InvalidField(
                f"chat_template_kwargs.{name[:64]}", value, f"variables that this template reads: {names}"
            )
    return given or {}


EFFORT = "reasoning_effort"


def effort_variables(raw: RawChat, reads: TemplateReads, *, reasons: bool) -> dict[str, Any]:
    """Return the variables that say how much the model should reason: ``reasoning_effort``, or the switch of reasoning.

    The switch is for the effort "none". Templates that have none get that word too, if they read the variable. Raises
    ``InvalidField`` if the template reads no effort, or ``chat_template_kwargs`` has another.
    """
    asked, given = raw.reasoning_effort, raw.chat_template_kwargs or {}
    if asked is None:
        return {}
    if given.get(EFFORT, asked) != asked:
        raise InvalidField(EFFORT, asked, f"{given[EFFORT]!r}, which chat_template_kwargs.reasoning_effort is, or null")
    if asked == "none" and (switched := thinking_variables("disabled", reads, reasons=reasons)):
        return switched
    if reads.variables is None or EFFORT in reads.variables:
        return {EFFORT: asked}
    if asked == "none":
        return {}
    raise InvalidField(EFFORT, asked, "none or null: this model's chat template does not read reasoning_effort")


THINKING = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5 and most; DeepSeek V3.1, Granite 3


def thinking_variables(asked: Thinking | None, reads: TemplateReads, *, reasons: bool) -> dict[str, Any]:
    """Return the template's variable that switches reasoning on or off; {} if there is none.

    ``reasons`` says whether the model may reason even without such a variable. Raises ``InvalidField`` if reasoning is
    requested but the model has none.
    """
    if asked is None:
        return {}
    for name in THINKING:
        if name in (reads.variables or ()):
            return {name: asked != "disabled"}
    if asked != "disabled" and not reasons:
        raise InvalidField("thinking.type", asked, "disabled: this model's chat template does not support reasoning")
    return {}
