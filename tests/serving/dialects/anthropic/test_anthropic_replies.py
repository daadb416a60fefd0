"""Replies of the Messages API: objects, streams and errors, byte for byte where a client reads them so."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorType
from pydantic import TypeAdapter

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidField,
    RequestError,
    ServingError,
    walk,
)
from mlflow_llm.serving.interface.reply import CallDelta, Choice, Delta, Done, Ended, Piece, Reply, ReplyCall, Usage
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

CODEC = DIALECTS["anthropic"]
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
CALL = ReplyCall(id="call_1", name="weather", arguments='{"city":"Oslo"}')


def request(**fields: Any) -> ValidRequest:
    return ValidRequest(
        request_id="r1",
        task="chat",
        model="m",
        sequences=(Sequence(prompt_token_ids=(1, 2, 3, 4, 5)),),
        sampling=Sampling(max_tokens=9),
        stop=("END",),
        created=1700000000,
        **fields,
    )


def whole(usage: Usage = USAGE, **choice: Any) -> dict[str, Any]:
    reply = Reply(choices=(Choice(index=0, **{"text": "", "finish_reason": "stop"} | choice),), usage=usage)
    body: dict[str, Any] = json.loads(CODEC.encode(request(), reply).body)
    Message.model_validate(body)
    return body


def streamed(*pieces: Piece) -> list[dict[str, Any]]:
    """Return the data of the events, checking that each is named by its type and known to the client."""
    encoder = CODEC.stream(request())
    wire = b"".join(map(encoder.encode, pieces)).decode()
    events = []
    for event in wire.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        TypeAdapter(RawMessageStreamEvent).validate_python(events[-1])
    return events


def test_a_message() -> None:
    """A message has the documented fields, and its input tokens exclude the cached ones."""
    assert whole(text="Hé") == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hé"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 3,
            "service_tier": "standard",
        },
    }


def test_blocks() -> None:
    """Thinking, text and calls are separate blocks, and thinking tokens are counted separately."""
    found = whole(
        msgspec.structs.replace(USAGE, reasoning_tokens=1),
        reasoning="hm",
        text="look:",
        calls=(CALL, msgspec.structs.replace(CALL, id="call_2", arguments="")),
        finish_reason="tool_calls",
    )
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "r1"},
        {"type": "text", "text": "look:"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
    ]
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    assert whole()["content"] == []


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_reason": "END"}, "stop_sequence", "END"),
        ({"stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "abort"}, "max_tokens", None),
        ({"finish_reason": "tool_calls", "calls": (CALL,)}, "tool_use", None),
        ({"finish_reason": "stop", "calls": (CALL,)}, "tool_use", None),
        ({"stop_reason": "END", "calls": (CALL,)}, "stop_sequence", "END"),  # it may be half a call
        ({"finish_reason": "length", "calls": (CALL,)}, "max_tokens", None),
    ],
)
def test_stop_reasons(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    """Each finish reason has its stop_reason, streamed or not, and calls give tool_use even after a plain stop."""
    found = whole(**choice)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    calls = [CallDelta(index=0, id="call_1", name="weather")] if "calls" in choice else []
    ended = Ended(index=0, finish_reason=choice.get("finish_reason", "stop"), stop_reason=choice.get("stop_reason"))
    delta = streamed(Delta(index=0, text="", calls=tuple(calls)), ended, Done(usage=USAGE))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "block"),
    [
        ('{"city":"Os', {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Os"}}),
        ("[1]", {"type": "text", "text": "[1]"}),
        ("never mind", {"type": "text", "text": "never mind"}),
        ("[" * 100_000, {"type": "text", "text": "[" * 100_000}),
    ],
    ids=["cut off", "no object", "no JSON", "deep"],
)
def test_arguments_that_are_not_an_object(arguments: str, block: dict[str, Any]) -> None:
    """Arguments that were cut off are returned as far as they go; arguments that are not an object become text."""
    found = whole(calls=(msgspec.structs.replace(CALL, arguments=arguments),), finish_reason="length")
    assert found["content"] == [block]


def test_a_stream() -> None:
    """A stream has its events in the documented order: blocks one after the other, and usage again at the end."""
    usage = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    text_delta = {"type": "content_block_delta", "index": 0}
    assert streamed(
        Delta(index=0, text="", num_tokens=1),
        Delta(index=0, text="H", num_tokens=1),
        Delta(index=0, text="é", num_tokens=1),
        Ended(index=0, finish_reason="length"),
        Done(usage=USAGE),
    ) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_r1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**usage, "service_tier": "standard"},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        text_delta | {"delta": {"type": "text_delta", "text": "H"}},
        text_delta | {"delta": {"type": "text_delta", "text": "é"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": usage | {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def test_blocks_of_a_stream() -> None:
    """Every change of kind ends a block and begins the next; thinking ends with its signature."""
    events = streamed(
        Delta(index=0, text="", reasoning="h"),
        Delta(index=0, text="", reasoning="m"),
        Delta(index=0, text="look:"),
        Delta(index=0, text="", calls=(CallDelta(index=0, id="a", name="f"),)),
        Delta(index=0, text="", calls=(CallDelta(index=0, arguments='{"x":'), CallDelta(index=0, arguments="1}"))),
        Delta(index=0, text="", calls=(CallDelta(index=1, id="b", name="g"), CallDelta(index=1, arguments="{}"))),
        Delta(index=0, text="done"),
        Ended(index=0, finish_reason="tool_calls"),
        Done(usage=USAGE),
    )
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3, 4]
    assert [event["content_block"] for event in starts] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        {"type": "text", "text": ""},
    ]
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas[2] == (0, {"type": "signature_delta", "signature": "r1"})
    assert [delta["partial_json"] for index, delta in deltas if index == 2] == ['{"x":', "1}"]
    assert [delta["partial_json"] for index, delta in deltas if index == 3] == ["{}"]


def test_an_empty_stream() -> None:
    """A reply without a text is a message all the same."""
    types = [event["type"] for event in streamed(Ended(index=0, finish_reason="stop"), Done(usage=USAGE))]
    assert types == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize("error_class", walk(), ids=lambda cls: cls.__name__)
def test_every_error_is_rendered(error_class: type[ServingError]) -> None:
    """Every class of the tree has a body that the API knows, alone and within a stream."""
    error = error_class.__new__(error_class)
    ServingError.__init__(error, "what happened", param="field")
    alone = CODEC.error(error)
    body = json.loads(alone.body)
    assert alone.status == error_class.status
    jsonschema.validate(body, CODEC.error_schema)
    if body["error"]["type"] not in ("request_too_large", "conflict_error"):
        ErrorResponse.model_validate(body)
    assert body["error"]["type"] in (*ErrorType.__args__, "request_too_large")  # type: ignore[attr-defined]
    wire = CODEC.stream(request()).error(error).decode()
    assert wire == f"event: error\ndata: {json.dumps(body, separators=(',', ':'))}\n\n"


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("stop", "stop_sequences"),
        ("tools[3].function.parameters.properties.a", "tools[3].input_schema.properties.a"),
        ("tools[3].function.name", "tools[3].name"),
        ("temperature", "temperature"),
        ("stopped", "stopped"),
    ],
)
def test_fields_have_the_callers_names(field: str, named: str) -> None:
    """Errors from below the dialect name the field that the caller sent."""
    message = json.loads(CODEC.error(InvalidField(field, 1, "2")).body)["error"]["message"]
    assert message == f"{named}: 1 is not allowed; expected 2"
    parallel = json.loads(CODEC.error(InvalidField("parallel_tool_calls", False, "null")).body)["error"]["message"]
    assert parallel == "tool_choice.disable_parallel_tool_use: True is not allowed; expected null"


def test_a_context_that_is_full() -> None:
    """A text that ended because the context did, before max_tokens, says so; a prompt over it is named in the API's
    words."""
    reply = Reply(choices=(Choice(index=0, text="a", finish_reason="length"),), usage=USAGE)
    assert json.loads(CODEC.encode(request(clipped=True), reply).body)["stop_reason"] == "model_context_window_exceeded"
    refused = json.loads(CODEC.error(ContextTooLong("messages: 9 tokens", param="messages")).body)
    assert refused["error"]["message"] == "prompt is too long: messages: 9 tokens"


def test_retry_after() -> None:
    """A temporary error has a Retry-After header."""
    assert CODEC.error(RequestError("no", retry_after=1.2)).headers == {"Retry-After": "2"}
    assert CODEC.error(DeadlineExceeded("late")).headers == {}
