"""The response object of the Responses API and the items of its output.

Source of the format: the API reference of ``/v1/responses``; tests check it with the types of OpenAI's client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...interface.reply import Reply, ReplyCall, TextLogprob, Usage
from ...interface.request import ValidRequest
from ..openai.replies import draft_details, model_name
from .tools import shown_text

# Values that a response has for fields that the request did not have; the client's types require many of them.
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
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # keeps values as bytes: tools may be megabytes
NAMESPACES = "namespaces"  # of the repeated fields; a response has no field of this name
Namespaces = Mapping[str, tuple[str, str]]  # namespace and own name of a tool, by the name that the model knows it by
_NAMESPACES = msgspec.json.Decoder(dict[str, tuple[str, str]])


def namespaces_of(echoed: bytes) -> Namespaces:
    """Return the request's tools that are in a namespace."""
    found = _FIELDS.decode(echoed).get(NAMESPACES) if echoed else None
    return {} if found is None else _NAMESPACES.decode(found)


def response_head(request: ValidRequest, echoed: bytes) -> dict[str, Any]:
    """Return the response before it has any output: in progress."""
    asked = _FIELDS.decode(echoed) if echoed else {}
    asked.pop(NAMESPACES, None)
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


def ended(
    request: ValidRequest, reason: str, usage: Usage, completed: int | None, *, is_cut: bool = False
) -> dict[str, Any]:
    """Return the fields of a response at its end: status, usage, and when it was completed or why it is incomplete.

    ``is_cut`` is the result of ``cuts`` for the last call.
    """
    if reason in ("stop", "tool_calls") and not is_cut:
        return {"status": "completed", "completed_at": completed, "usage": response_usage(usage)}
    if reason == "content_filter":
        return {"status": "incomplete", "incomplete_details": {"reason": reason}, "usage": response_usage(usage)}
    assert request.sampling is not None
    # this API has no reason for a truncated prompt, a call that was cut off, or a timeout
    used_up = not is_cut and usage.completion_tokens >= request.sampling.max_tokens
    details = {"reason": "max_output_tokens" if used_up else None}
    return {"status": "incomplete", "incomplete_details": details, "usage": response_usage(usage)}


def cuts(stop: str | int | None, arguments: str) -> bool:
    """Return whether ``stop`` ended the reply within the ``arguments`` of a call. Not for a custom tool, whose input is
    a text: it cannot be seen whether that is complete."""
    if stop is None:
        return False
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return the ``usage`` object. Writing to the prefix cache costs nothing, and is not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens} | draft_details(usage),
        "total_tokens": usage.total_tokens,
    }


def response(request: ValidRequest, whole: Reply, echoed: bytes) -> dict[str, Any]:
    """Return the response object of a whole reply: reasoning, then the text, then calls."""
    choice = whole.choices[0]
    last = choice.calls[-1] if choice.calls else None
    is_cut = last is not None and not last.custom and cuts(choice.stop_reason, last.arguments)
    end = ended(request, choice.finish_reason, whole.usage, whole.completed, is_cut=is_cut)
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(item_id(request, "reasoning", 0), choice.reasoning))
    if choice.text or not (items or choice.calls):
        part = text_part(choice.text, logprobs(choice.text_logprobs))
        items.append(message_item(item_id(request, "message", len(items)), part))
    namespaces = namespaces_of(echoed) if choice.calls else {}
    for call in choice.calls:
        items.append(call_item(item_id(request, call_type(call.custom), len(items)), call, namespaces))
    if end["status"] == "incomplete":
        items[-1] = incomplete(items[-1])
    return response_head(request, echoed) | end | {"output": items}


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


def item_id(request: ValidRequest, kind: str, index: int) -> str:
    """Return the id of item ``index`` of the output."""
    return f"{_PREFIXES[kind]}_{request.request_id}_{index}"


def reasoning_item(item: str, text: str) -> dict[str, Any]:
    """Return the item of the model's reasoning, unchanged."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def text_part(text: str, found: Any) -> dict[str, Any]:
    """Return the part of a message that has its text, with ``found``, the list of its log probabilities."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}


def message_item(item: str, *content: dict[str, Any]) -> dict[str, Any]:
    """Return the item of a message of the model."""
    return {"id": item, "type": "message", "role": "assistant", "status": "completed", "content": list(content)}


def call_type(custom: bool) -> str:
    """Return the item type of a call."""
    return "custom_tool_call" if custom else "function_call"


def call_item(item: str, call: ReplyCall, namespaces: Namespaces) -> dict[str, Any]:
    """Return the item of a call; the call and the item have different ids."""
    head = {"id": item, "type": call_type(call.custom), "call_id": call.id, "name": call.name}
    if (known := namespaces.get(call.name)) is not None:
        namespace, name = known
        head |= {"name": name, "namespace": namespace}
    if call.custom:
        return head | {"input": call.arguments}
    return head | {"arguments": call.arguments, "status": "completed"}


def incomplete(item: dict[str, Any]) -> dict[str, Any]:
    """Return ``item`` as cut off by the end of the reply; a custom tool's call has no status."""
    return item | {"status": "incomplete"} if "status" in item else item


def logprobs(found: tuple[TextLogprob, ...], *, with_bytes: bool = True) -> list[dict[str, Any]]:
    """Return an entry per token with its alternatives; entries in events have no bytes."""
    return [
        {**_logprob(entry, with_bytes), "top_logprobs": [_logprob(top, with_bytes) for top in entry.top]}
        for entry in found
    ]


def _logprob(entry: TextLogprob, with_bytes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"token": entry.token, "logprob": entry.logprob}
    return found | {"bytes": list(entry.bytes)} if with_bytes else found
