"""Requests of every kind, and what may be compared of their answers."""

from __future__ import annotations

import json
from typing import Any

from server_calls import asking
from serving_process import Running

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
COMMON = {"model": "assistant", "max_tokens": 300, "ignore_eos": True}
SAYS_HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED = {"temperature": 1.0, "seed": 7}


def answer_to(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status and the comparable parts of a reply: choices or vectors, and usage."""
    with asking(server, body, path) as answer:
        data = answer.read()
        if not body.get("stream") or answer.status != 200:
            whole = json.loads(data)
            return answer.status, (whole.get("choices") or whole.get("data"), whole.get("usage"))
    *events, done = [line[6:] for line in data.decode().split("\n\n") if line]
    assert done == "[DONE]", events[-1]
    return answer.status, joined([json.loads(event) for event in events])


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[int, tuple[str, list[Any], set[Any]]], dict[str, int]]:
    """Return text, log probabilities and finish reasons of each choice of a stream, and its usage."""
    choices: dict[int, tuple[str, list[Any], set[Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, scores, reasons = choices.get(choice["index"], ("", [], set()))
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            scores = scores + ((choice.get("logprobs") or {}).get("content") or [])
            choices[choice["index"]] = text, scores, reasons | {choice["finish_reason"]}
    return choices, next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
