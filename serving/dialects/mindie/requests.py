"""Requests of MindIE's chat completions: the fields of its document with their bounds, and this server's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...interface.errors import InvalidField
from ...interface.readers import (
    INT32_MAX,
    UINT64_MAX,
    Entry,
    any_of,
    boolean,
    integer,
    list_of,
    number,
    one_of,
    reader,
    record,
    short_text,
    string,
)
from ...interface.request import RawChat, Task
from ..fields.decode import decode
from ..fields.fields import Field, Table
from ..fields.tables import OPENAI
from ..fields.text_readers import TOKEN
from ..fields.tool_fields import Bounds, tools_reader
from .messages import messages

FLOAT_MAX = 3.4e38
MAX_STOP = 32 * 2**10  # characters of all stop strings together
INT32_MIN = -INT32_MAX - 1
# this server's own fields, which do not change the form of the document's replies
_EXTENSION_FIELDS = (
    "user",
    "cache_salt",
    "timeout",
    "min_p",
    "typical_p",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "no_repeat_ngram_size",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "parallel_tool_calls",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)
_SHARED_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_p",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_STOPS = list_of(short_text(MAX_STOP), "a string or a list of strings")


@reader(type="integer", anyOf=[{"const": -1}, {"minimum": 1}], maximum=INT32_MAX)
def _top_k(value: Any, path: str) -> int:
    """Read ``top_k``; -1 means the whole vocabulary."""
    if value == -1 and not isinstance(value, bool):
        return 0
    if isinstance(value, int) and value < 1:
        raise InvalidField(path, value, f"-1, or an integer in [1, {INT32_MAX}]")
    return _POSITIVE(value, path)


@reader(**any_of(short_text(MAX_STOP).schema, _STOPS.schema))
def _stop(value: Any, path: str) -> tuple[str, ...] | None:
    """Read a string or a list of strings, of at most ``MAX_STOP`` characters together; an empty list means none."""
    found = (short_text(MAX_STOP)(value, path),) if isinstance(value, str) else _STOPS(value, path)
    if (size := sum(map(len, found))) > MAX_STOP:
        raise InvalidField(path, f"{size} characters", f"at most {MAX_STOP} in total")
    return tuple(dict.fromkeys(found)) or None


@reader(type="array", items={"type": "integer"})
def _stop_token_ids(value: Any, path: str) -> tuple[int, ...]:
    """Read token ids. Those beyond 32 bits are ignored, as the document says; null in the list is refused."""
    if not isinstance(value, list | tuple):
        raise InvalidField(path, value, "a list of token ids")
    found = []
    for i, entry in enumerate(value):
        if isinstance(entry, float) and entry.is_integer():
            entry = int(entry)
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise InvalidField(f"{path}[{i}]", entry, "a token id, an integer")
        if INT32_MIN <= entry <= INT32_MAX:
            found.append(TOKEN(entry, f"{path}[{i}]"))
    return tuple(found)


def _shared(name: str) -> Field:
    """Return the field as OpenAI's chats have it."""
    return OPENAI["chat"].fields[name]


_POSITIVE = integer(1, INT32_MAX)
_STREAM_OPTIONS = record(include_usage=Entry(boolean))
_FIELDS = (
    Field(name="model", read=string, target="model", description="the endpoint; required"),
    Field(
        name="messages",
        read=messages,
        target="messages",
        description="a non-empty list of messages; content has at most 4 MiB of characters and 20 media together",
    ),
    _shared("stream"),
    _shared("temperature").replace(read=number(0, FLOAT_MAX)),
    _shared("top_k").replace(read=_top_k, description="the k most probable tokens; -1: all"),
    _shared("seed").replace(read=integer(0, UINT64_MAX)),
    _shared("stop").replace(read=_stop),
    _shared("stop_token_ids").replace(
        read=_stop_token_ids,
        description="tokens that end the text; ids beyond 32 bits are ignored",
    ),
    _shared("max_tokens").replace(
        description="maximum number of tokens to generate; reduced to maxIterTimes and the rest of the context",
        default_words="maxIterTimes, or the rest of the context",
    ),
    _shared("tools").replace(read=tools_reader(Bounds(custom=False))),
    _shared("tool_choice").replace(description="none, auto (the default), required, or the tool to call"),
    _shared("n").replace(read=integer(1, 1), description="only one choice is supported"),
    Field(
        name="stream_options",
        read=_STREAM_OPTIONS,
        target=None,
        note="usage is always in the last chunk with choices",
    ),
    Field(name="logprobs", read=one_of(False, why="replies have no log probabilities"), target=None),
)


TABLE: Table = Table(
    required="messages",
    fields={
        **{field.name: field for field in _FIELDS},
        **{name: _shared(name) for name in (*_SHARED_FIELDS, *_EXTENSION_FIELDS)},
    },
)
TABLES: Mapping[Task, Table] = {"chat": TABLE}


def request_schema() -> dict[str, Any]:
    """Return the JSON schema of the bodies that ``read_chat`` accepts."""
    found = TABLE.schema()
    found["properties"]["model"] = dict(string.schema) | {"description": TABLE.fields["model"].description}
    return {**found, "required": ["model", "messages"]}


def read_chat(body: dict[str, Any]) -> RawChat:
    """Read a body. Raises ``InvalidField``."""
    if body.get("model") is None:
        raise InvalidField("model", None, "the name of an endpoint")
    raw = decode(TABLES, body, "chat")
    assert isinstance(raw, RawChat)
    sampling = msgspec.structs.replace(raw.sampling, clip_max_tokens=True)
    return msgspec.structs.replace(raw, sampling=sampling, timings=not raw.stream)
