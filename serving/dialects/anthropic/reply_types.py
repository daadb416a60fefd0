"""The objects of the Messages API, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..base import Exchange

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class ThinkingBlock(TypedDict):
    """The text between the model's reasoning markers; ``signature`` is opaque."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class EndUsage(TypedDict):
    """The counted tokens: the prompt has ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class MessageUsage(EndUsage):
    service_tier: Literal["standard"]


class Message(TypedDict):
    """The reply of the assistant. In a stream's ``message_start`` it has no content yet."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: Message


class Ping(TypedDict):
    type: Literal["ping"]


class ContentBlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ThinkingBlock | TextBlock | ToolUseBlock


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class InputJsonDelta(TypedDict):
    """A piece of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: ThinkingDelta | SignatureDelta | TextDelta | InputJsonDelta


class ContentBlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: EndUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class TokenCount(TypedDict):
    input_tokens: int


class ModelInfo(TypedDict):
    """An endpoint or adapter, as Anthropic's API lists models."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


EXAMPLE: dict[str, Any] = {
    "model": "assistant",
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Say hello."}],
}
COUNT_EXAMPLE = {name: value for name, value in EXAMPLE.items() if name != "max_tokens"}
MESSAGE = Exchange(
    example=EXAMPLE,
    whole=Message,
    event=MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop,
    ends="Each event has the type of its data; the stream ends with `message_stop`.",
)
