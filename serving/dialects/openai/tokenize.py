"""The objects of ``/tokenize`` and ``/detokenize``, in vLLM's form (its ``entrypoints/serve/tokenize/protocol.py``).

In vLLM's form ``chat_template`` may be the source of a template; here it names one of the model's, as in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import Entry, Reader, any_of, boolean, list_of, one_of, record, string
from ...interface.request import Raw, RawChat
from ..fields.chat_end import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, chat_end
from ..fields.messages import read_messages
from ..fields.text_readers import TOKEN, template_variables
from ..fields.tool_fields import tools_reader
from .reply_types import Detokenized, Tokenized

MAX_TOKENS = 2**20  # of one detokenize request


class RawTokenize(Raw, frozen=True, kw_only=True):
    """A chat to tokenize or, if ``chat`` is None, a text. ``add_special_tokens`` None means as in a request."""

    prompt: str = ""
    chat: RawChat | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class RawDetokenize(Raw, frozen=True, kw_only=True):
    tokens: tuple[int, ...]


_COMMON = {
    "model": Entry(string, "endpoint, served entity, or endpoint:adapter"),
    "return_token_strs": Entry(boolean, "the tokens' strings too, as the vocabulary has them"),
}
_PROMPT = record(
    **_COMMON,
    prompt=Entry(string, "a text", required="a string, or messages"),
    add_special_tokens=Entry(boolean, "true, false: of the text as it stands; default: as a request with this prompt"),
)
_CHAT = record(
    **_COMMON,
    messages=Entry(read_messages, "the messages of a chat", required="a non-empty list of messages"),
    add_generation_prompt=Entry(boolean, ADD_GENERATION_PROMPT),
    continue_final_message=Entry(boolean, CONTINUE_FINAL_MESSAGE),
    add_special_tokens=Entry(one_of(False, why="the template writes the special tokens")),
    tools=Entry(tools_reader(), "functions that the model may call"),
    chat_template=Entry(string, "name of one of the model's templates"),
    chat_template_kwargs=Entry(template_variables, "variables for the chat template"),
)


def _tokenize(value: Any, path: str) -> RawTokenize:
    if isinstance(value, dict) and value.get("messages") is not None:
        if value.get("prompt") is not None:
            raise InvalidField("prompt", value["prompt"], "null beside messages")
        return _of_chat(_CHAT({name: entry for name, entry in value.items() if name != "prompt"}, path))
    return RawTokenize(**_PROMPT(value, path))


def _of_chat(found: dict[str, Any]) -> RawTokenize:
    common = {name: found.pop(name) for name in ("model", "return_token_strs") if name in found}
    found.pop("add_special_tokens", None)
    end = chat_end(found)
    return RawTokenize(**common, chat=RawChat(**found, end=end))


read_tokenize = Reader(_tokenize, any_of(_PROMPT.schema, _CHAT.schema))

_DETOKENIZE = record(
    model=_COMMON["model"],
    tokens=Entry(
        list_of(TOKEN, f"a list of at most {MAX_TOKENS} token ids", maximum=MAX_TOKENS),
        "token ids",
        required="a list of token ids",
    ),
)
read_detokenize = Reader(lambda value, path: RawDetokenize(**_DETOKENIZE(value, path)), _DETOKENIZE.schema)


def tokenized(tokens: Sequence[int], max_model_len: int, names: list[str] | None) -> Tokenized:
    """Return the response of ``/tokenize``; ``names`` are the tokens' strings, if they were asked for."""
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": names}


def detokenized(text: str) -> Detokenized:
    """Return the response of ``/detokenize``."""
    return {"prompt": text}
