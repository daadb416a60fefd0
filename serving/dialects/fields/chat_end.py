"""How the prompt of a chat ends, in transformers' and vLLM's fields ``add_generation_prompt`` and
``continue_final_message``."""

from __future__ import annotations

from typing import Any

from ...interface.errors import InvalidField
from ...interface.request import ChatEnd

ADD_GENERATION_PROMPT = "the beginning of the reply is part of the prompt; default true"
CONTINUE_FINAL_MESSAGE = "the last message is left open, for the model to go on with; the reply is what it adds"


def chat_end(found: dict[str, Any]) -> ChatEnd:
    """Return the end of the chat; its two fields are removed from ``found``. Raises ``InvalidField`` for both."""
    begins, goes_on = found.pop("add_generation_prompt", None), found.pop("continue_final_message", False)
    if goes_on and begins:
        raise InvalidField("add_generation_prompt", True, "false or null with continue_final_message")
    if goes_on:
        return "open"
    return "closed" if begins is False else "generation_prompt"
