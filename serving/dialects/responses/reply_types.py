"""The objects of the Responses API, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..base import Exchange

Status = Literal["in_progress", "completed", "incomplete"]


class ResponseAlternative(TypedDict):
    """A token and its log probability; events leave the bytes out."""

    token: str
    logprob: float | None
    bytes: NotRequired[list[int]]


class ResponseToken(ResponseAlternative):
    top_logprobs: list[ResponseAlternative]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ResponseToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class OutputFunctionCall(TypedDict):
    """A call of a function; ``namespace`` is that of the request's tools."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str
    status: Status


class OutputCustomToolCall(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ResponseTokensDetails(TypedDict):
    reasoning_tokens: int
    draft_tokens: NotRequired[int]
    accepted_draft_tokens: NotRequired[int]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseTokensDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens", "content_filter"] | None


class ResponseObject(TypedDict):
    """The reply, with the fields of the request as they were used. Nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: Any
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str] | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """The beginning or the end of a response."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int
    response: ResponseObject


class OutputItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ContentPartEvent(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class OutputTextDelta(TypedDict):
    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ResponseToken]


class OutputTextDone(TypedDict):
    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ResponseToken]


class ReasoningTextDelta(TypedDict):
    type: Literal["response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(TypedDict):
    type: Literal["response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class CallDelta(TypedDict):
    """A piece of a call's arguments or input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class FunctionCallDone(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomToolCallDone(TypedDict):
    type: Literal["response.custom_tool_call_input.done"]
    sequence_number: int
    item_id: str
    output_index: int
    input: str


class ErrorEvent(TypedDict):
    """A stream that breaks off; ``response.failed`` follows it."""

    type: Literal["error"]
    sequence_number: int
    code: str | None
    message: str
    param: str | None


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


EXAMPLE: dict[str, Any] = {"model": "assistant", "input": "Say hello.", "max_output_tokens": 16}
COUNT_EXAMPLE = {name: value for name, value in EXAMPLE.items() if name != "max_output_tokens"}
RESPONSE = Exchange(
    example=EXAMPLE,
    whole=ResponseObject,
    event=ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallDelta
    | FunctionCallDone
    | CustomToolCallDone
    | ErrorEvent,
    ends="Each event has the type of its data; the stream ends with `response.completed`, `response.incomplete` or"
    " `response.failed`.",
)
