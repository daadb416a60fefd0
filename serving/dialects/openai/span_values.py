"""Values of MLflow's spans: an answer in OpenAI's form, which its UI shows as a conversation, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...interface.reply import Choice
from .replies import message

SPAN_TYPES = {"chat": "CHAT_MODEL", "completions": "LLM", "embeddings": "EMBEDDING", "score": "RERANKER"}


def choices_of(task: str, choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Return the choices of a reply as objects with ``index`` and ``message`` (of a chat) or ``text``."""
    return [
        {"index": place, **({"message": message(choice)} if task == "chat" else {"text": choice.text})}
        for place, choice in enumerate(choices)
    ]


def token_usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """Return the value of ``mlflow.chat.tokenUsage``."""
    found = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
    return found | ({"cache_read_input_tokens": cached} if cached else {})
