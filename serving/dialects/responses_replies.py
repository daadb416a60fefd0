"""The response object of the Responses API and the items of its output.

Source of the format: the API reference of ``/v1/responses``; the types of OpenAI's client are its tests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..reply import Choice, ReplyCall, TextLogprob, Usage
from ..request import ValidRequest
from .openai_replies import draft_details, model_name
from .responses_tools import shown_text

# What a response says of a request that did not say it; the types require many of them.
_UNSAID: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "text": shown_text({}),
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # of what is repeated, as bytes: tools may be megabytes


def response_head(request: ValidRequest, echoed: bytes) -> dict[str, Any]:
    """The response before it has any output: in progress."""
    asked = _FIELDS.decode(echoed) if echoed else {}
    sampling = request.sampling
    assert sampling is not None
    return {
        "id": f"resp_{request.request_id}",
        "object": "response",
        "created_at": request.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": model_name(request),
        "output": [],
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **_UNSAID,
        **asked,
        "usage": None,
    }


def ended(request: ValidRequest, reason: str, usage: Usage, *, is_cut: bool = False) -> dict[str, Any]:
    """What a response has at its end: status, and why it is incomplete. ``is_cut``: see ``cuts``."""
    if reason in ("stop", "tool_calls") and not is_cut:
        return {"status": "completed", "usage": response_usage(usage)}
    assert request.sampling is not None
    # a prompt or a call that was cut, and time that ran out, have no word in this API
    used_up = not is_cut and usage.completion_tokens >= request.sampling.max_tokens
    details = {"reason": "max_output_tokens" if used_up else None}
    return {"status": "incomplete", "incomplete_details": details, "usage": response_usage(usage)}


def cuts(stop: str | int | None, arguments: str) -> bool:
    """Whether ``stop``, which ended the reply, did so within the ``arguments`` of a call. A custom tool's are a text,
    whose end nothing tells."""
    if stop is None:
        return False
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def response_usage(usage: Usage) -> dict[str, Any]:
    """Writing to the prefix cache costs nothing, and is not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens} | draft_details(usage),
        "total_tokens": usage.total_tokens,
    }


def response(request: ValidRequest, choice: Choice, usage: Usage, echoed: bytes) -> dict[str, Any]:
    """The response object of a whole reply: reasoning, then the text, then calls."""
    last = choice.calls[-1] if choice.calls else None
    is_cut = last is not None and not last.custom and cuts(choice.stop_reason, last.arguments)
    end = ended(request, choice.finish_reason, usage, is_cut=is_cut)
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(item_id(request, "reasoning", 0), choice.reasoning))
    if choice.text or not (items or choice.calls):
        part = text_part(choice.text, logprobs(choice.text_logprobs))
        items.append(message_item(item_id(request, "message", len(items)), part))
    for call in choice.calls:
        items.append(call_item(item_id(request, call_type(call.custom), len(items)), call))
    if end["status"] == "incomplete":
        items[-1] = incomplete(items[-1])
    return response_head(request, echoed) | end | {"output": items}


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


def item_id(request: ValidRequest, kind: str, index: int) -> str:
    """The id of item ``index`` of the output."""
    return f"{_PREFIXES[kind]}_{request.request_id}_{index}"


def reasoning_item(item: str, text: str) -> dict[str, Any]:
    """What the model thought, as it is."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def text_part(text: str, found: Any) -> dict[str, Any]:
    """The part of a message that has its text, with the list of its log probabilities."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}


def message_item(item: str, *content: dict[str, Any]) -> dict[str, Any]:
    """What the model said."""
    return {"id": item, "type": "message", "role": "assistant", "status": "completed", "content": list(content)}


def call_type(custom: bool) -> str:
    """The type of the item of a call."""
    return "custom_tool_call" if custom else "function_call"


def call_item(item: str, call: ReplyCall) -> dict[str, Any]:
    """A call; its id is not the item's."""
    head = {"id": item, "type": call_type(call.custom), "call_id": call.id, "name": call.name}
    if call.custom:
        return head | {"input": call.arguments}
    return head | {"arguments": call.arguments, "status": "completed"}


def incomplete(item: dict[str, Any]) -> dict[str, Any]:
    """``item`` where the reply ended before it did; a custom tool's call has no status."""
    return item | {"status": "incomplete"} if "status" in item else item


def logprobs(found: tuple[TextLogprob, ...], *, with_bytes: bool = True) -> list[dict[str, Any]]:
    """An entry a token, each with its alternatives; those in events have no bytes."""
    return [
        {**_logprob(entry, with_bytes), "top_logprobs": [_logprob(top, with_bytes) for top in entry.top]}
        for entry in found
    ]


def _logprob(entry: TextLogprob, with_bytes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"token": entry.token, "logprob": entry.logprob}
    return found | {"bytes": list(entry.bytes)} if with_bytes else found
