"""A chat as the engine gets it: its prompt with the tools, its grammar, and how tool calls are parsed."""

from __future__ import annotations

from typing import NamedTuple

from ..interface.constraint import Grammar
from ..interface.errors import InvalidField
from ..interface.request import RawChat, RequestImage, ToolChoice, ToolUse
from ..interface.tool_format import ToolFormat
from ..tool_calls.argument_types import argument_types
from .grammar_request import chat_grammar, check_choice
from .media.images import UNBOUNDED, ImageRoom
from .media.media import images_of
from .prompt.endpoint import EndpointView
from .prompt.prompts import Prompt, chat_prompt
from .prompt.template_trial import DEFAULT_TEMPLATE
from .prompt.text import TextModel
from .prompt.tool_messages import shown_tools
from .prompt.tool_prompts import template_name

REASONING_MARKER_TOKENS = 16  # tokens at a prompt's end in which the marker of reasoning is looked for


class Chat(NamedTuple):
    """A prepared chat.

    If ``tools`` is None, no tool calls are parsed. ``begins_in_reasoning`` says whether the reply continues reasoning
    that the prompt has opened. ``read_as`` is the template in whose format the reply's calls and reasoning are parsed;
    None if there are none. If ``grammar`` is None, any text is allowed.
    """

    prompt: Prompt
    tools: ToolUse | None
    begins_in_reasoning: bool
    read_as: str | None
    grammar: Grammar | None
    images: tuple[RequestImage, ...] = ()


def prepare_chat(
    raw: RawChat, endpoint: EndpointView, deadline: float | None = None, room: ImageRoom = UNBOUNDED
) -> Chat:
    """Return the prepared chat. Images are fetched until ``deadline``, and kept in ``room``.

    Raises ``InvalidField`` for turns, call ids, variables, tools or formats that the endpoint or the template does not
    accept, and ``ContextTooLong``.
    """
    reads = endpoint.info.capabilities.images and endpoint.text.images is not None
    found = images_of(raw.messages, endpoint.profile.dialects, reads_images=reads, deadline=deadline, room=room)
    tools, template = tool_use(raw), template_name(raw, endpoint.text)
    prompt = chat_prompt(raw, endpoint, tuple((one.width, one.height) for one in found))
    images = tuple(
        RequestImage(width=one.width, height=one.height, data=one.data, num_tokens=count)
        for one, count in zip(found, prompt.images, strict=True)
    )
    format = endpoint.text.tool_format(template)
    if tools is None and format.reasoning is None:
        held_to = chat_grammar(raw, endpoint, format, in_reasoning=False)
        return Chat(prompt, None, begins_in_reasoning=False, read_as=None, grammar=held_to, images=images)
    reasoning = _ends_in_reasoning(prompt.token_ids, raw, endpoint.text, format)
    always = format.layout == "channels"  # such a model reasons even though the prompt does not open reasoning
    if raw.end != "open" and (reasoning or always):
        if raw.thinking == "disabled":
            raise InvalidField("thinking.type", raw.thinking, "enabled: this model always reasons before it answers")
        if raw.reasoning_effort == "none":
            raise InvalidField("reasoning_effort", "none", "another: this model always reasons before it answers")
    held_to = chat_grammar(raw, endpoint, format, in_reasoning=reasoning)
    return Chat(prompt, tools, reasoning, template or DEFAULT_TEMPLATE, held_to, images)


def tool_use(raw: RawChat) -> ToolUse | None:
    """Return which tools may be called and how their calls are parsed; None if no tool may be called.

    Raises ``InvalidField`` for a choice of a tool that does not exist.
    """
    check_choice(raw)
    tools = shown_tools(raw)
    if not tools:
        return None
    choice = raw.tool_choice or ToolChoice(mode="auto")
    called = [tool for tool in tools if not choice.names or tool.name in choice.names]
    return ToolUse(
        names=tuple(tool.name for tool in called),
        custom=tuple(tool.name for tool in called if tool.kind == "custom"),
        types=argument_types(called),
        choice=choice,
        parallel=raw.parallel_tool_calls is not False,
    )


def _ends_in_reasoning(token_ids: tuple[int, ...], raw: RawChat, text: TextModel, format: ToolFormat) -> bool:
    """Return whether the prompt ends by opening the reasoning; for a message to be continued, whether it ends in
    reasoning."""
    reasoning = format.reasoning
    if reasoning is None or raw.end == "closed":
        return False
    begin, end = reasoning.begin.strip(), reasoning.end.strip()
    if raw.end == "open":
        last = raw.messages[-1].text
        return last.rfind(begin) > last.rfind(end)
    return text.decode(token_ids[-REASONING_MARKER_TOKENS:], skip_special_tokens=False).rstrip().endswith(begin)
