"""The objects of MindIE's replies to chats, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from ..base import Exchange
from ..openai.reply_types import CHAT_EXAMPLE, ENDS, CalledFunction, CalledFunctionDelta, Finish, FunctionCall


class MindieMessage(TypedDict):
    """A message of the assistant. ``tool_calls`` is there if the request has tools, and null without a call."""

    role: Literal["assistant"]
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCall] | None]


class MindieChoice(TypedDict):
    index: int
    message: MindieMessage
    finish_reason: Finish


class MindieUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class MindieCompletion(TypedDict):
    """The reply to a chat. Times are in milliseconds: to the first token, then of each step that gave more."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[MindieChoice]
    usage: MindieUsage
    prefill_time: float
    decode_time_arr: list[float]


class MindieCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction | CalledFunctionDelta


class MindieDelta(TypedDict):
    """A piece of the reply; with ``fullTextEnabled`` it has the whole text so far."""

    role: Literal["assistant"]
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MindieCallDelta]]


class MindieChunkChoice(TypedDict):
    index: int
    delta: MindieDelta
    finish_reason: Finish | None


class MindieChunk(TypedDict):
    """The data of an event; the last one has ``usage`` and, with ``fullTextEnabled``, ``full_text``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[MindieChunkChoice]
    full_text: NotRequired[str]
    usage: NotRequired[MindieUsage]


CHAT = Exchange(example=CHAT_EXAMPLE, whole=MindieCompletion, event=MindieChunk, ends=ENDS)
