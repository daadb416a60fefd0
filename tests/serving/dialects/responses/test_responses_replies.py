"""Response objects and the events of streamed ones, judged by the types of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.errors import (
    DeadlineExceeded,
    EngineDied,
    InvalidField,
    LimitExceeded,
    ServingError,
    walk,
)
from mlflow_llm.serving.interface.reply import (
    CallDelta,
    Choice,
    Delta,
    Done,
    Ended,
    Piece,
    Reply,
    ReplyCall,
    TextLogprob,
    Usage,
)
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.tasks.reply.generate import gather

DIALECT = DIALECTS["responses"]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2, reasoning_tokens=1)
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "does", "strict": False},
    {"type": "function", "name": "g"},
    {"type": "custom", "name": "note", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
]
TOP = TextLogprob(token="H", bytes=(72,), token_id=1, logprob=-0.25)
SCORED = TextLogprob(token="Hé", bytes=(72, 195, 169), token_id=2, logprob=-0.5, top=(TOP,))


def request(*, max_tokens: int = 9, **fields: Any) -> ValidRequest:
    return ValidRequest(
        request_id="r1",
        task="chat",
        model="m",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.5, top_p=0.9),
        created=1700000000,
        **fields,
    )


def echoed(**fields: Any) -> bytes:
    """Return the part of a body with these fields that decoding keeps for the reply."""
    return DIALECT.decode(Head(DIALECT.routes[0], {}), json.dumps({"input": "hi"} | fields).encode()).echoed


def whole(choice: Choice, asked: bytes = b"", **fields: Any) -> dict[str, Any]:
    """Return the body of a whole reply after checking it against the client's type."""
    body = DIALECT.encode(request(**fields), Reply(choices=(choice,), usage=USAGE), asked).body
    check(Response.model_validate_json(body, strict=True))
    found: dict[str, Any] = json.loads(body)
    return found


def check(found: Any) -> None:
    """Check that the type knows every field; only ``store`` and item ids are from the API's reference alone."""
    if isinstance(found, pydantic.BaseModel):
        known = {"store"} if isinstance(found, Response) else set()
        assert set(found.model_extra or ()) <= known, (type(found), found.model_extra)
        for name in type(found).model_fields:
            check(getattr(found, name))
    elif isinstance(found, list):
        for entry in found:
            check(entry)


def streamed(*pieces: Piece, asked: bytes = b"", error: ServingError | None = None) -> list[dict[str, Any]]:
    """Return the events of a stream after checking that they are numbered and of types known to the client."""
    encoder = DIALECT.stream(request(), asked)
    assert encoder.content_type.startswith("text/event-stream")
    wire = b"".join(map(encoder.encode, pieces)) + (encoder.error(error) if error else b"")
    events = []
    for block in wire.decode().removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        data = second.removeprefix("data: ")
        event = json.loads(data)
        assert first == f"event: {event['type']}"
        check(EVENT.validate_json(data, strict=True))
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_response() -> None:
    """A whole response is as expected, byte for byte."""
    body = DIALECT.encode(
        request(),
        Reply(choices=(Choice(index=0, text="Hé", finish_reason="stop"),), usage=USAGE, completed=1700000002),
        echoed(),
    ).body
    assert body.decode() == (
        '{"id":"resp_r1","object":"response","created_at":1700000000,"status":"completed","background":false,'
        '"completed_at":1700000002,"error":null,"incomplete_details":null,"model":"m","output":[{"id":"msg_r1_0",'
        '"type":"message","role":"assistant","status":"completed","content":[{"type":"output_text","text":"Hé",'
        '"annotations":[],"logprobs":[]}]}],"previous_response_id":null,"service_tier":"default","store":false,'
        '"temperature":0.5,"top_p":0.9,"instructions":null,"max_output_tokens":null,"max_tool_calls":null,'
        '"metadata":{},"parallel_tool_calls":true,"prompt_cache_key":null,"prompt_cache_retention":null,'
        '"reasoning":{"effort":null,"summary":null},"safety_identifier":null,'
        '"text":{"format":{"type":"text"},"verbosity":"medium"},"tool_choice":"auto","tools":[],"top_logprobs":0,'
        '"truncation":"disabled","user":null,'
        '"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":0},'
        '"output_tokens":4,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":9}}'
    )


def test_what_a_response_repeats() -> None:
    """The request's own fields replace the defaults in a response; nulls count as left out."""
    asked: dict[str, Any] = {
        "instructions": "be kind", "max_output_tokens": 7, "max_tool_calls": 3, "metadata": {"a": "b"},
        "parallel_tool_calls": False, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "user": "u",
        "reasoning": {"effort": "low"}, "safety_identifier": "s", "truncation": "auto", "top_logprobs": 3,
    }  # fmt: skip
    formed = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    more = {"text": formed | {"verbosity": None}, "tool_choice": choice, "tools": TOOLS}
    include = {"include": ["message.output_text.logprobs"]}
    found = whole(Choice(index=0, text="x", finish_reason="stop"), echoed(**asked, **more, **include))
    assert {name: found[name] for name in asked} == asked
    assert found["text"] == formed | {"verbosity": "medium"}
    assert found["tool_choice"] == choice
    assert found["tools"][0] == TOOLS[0]
    assert found["tools"][1] == TOOLS[1] | {"description": None, "parameters": None, "strict": True}
    assert found["tools"][2] == TOOLS[2]


def test_output_items() -> None:
    """Reasoning, text with log probabilities and calls are output items, in this order, each with its own id."""
    calls = (
        ReplyCall(id="c1", name="f", arguments='{"a":1}'),
        ReplyCall(id="c2", name="note", arguments="rain", custom=True),
    )
    found = whole(
        Choice(
            index=0,
            text="Hé",
            reasoning="hm",
            calls=calls,
            logprobs=(SCORED,),
            text_logprobs=(SCORED,),
            finish_reason="tool_calls",
        )
    )
    thought, said, called, noted = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    (part,) = said["content"]
    assert part["logprobs"][0] == {
        "token": "Hé",
        "logprob": -0.5,
        "bytes": [72, 195, 169],
        "top_logprobs": [{"token": "H", "logprob": -0.25, "bytes": [72]}],
    }
    assert (called["call_id"], called["name"], called["arguments"]) == ("c1", "f", '{"a":1}')
    assert (noted["call_id"], noted["name"], noted["input"]) == ("c2", "note", "rain")
    assert [item["id"] for item in found["output"]] == ["rs_r1_0", "msg_r1_1", "fc_r1_2", "ctc_r1_3"]
    assert found["status"] == "completed"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(index=0, text="", finish_reason="stop"), ["message"]),
        (Choice(index=0, text="", reasoning="hm", finish_reason="length"), ["reasoning"]),
        (
            Choice(index=0, text="", calls=(ReplyCall(id="c", name="f", arguments=""),), finish_reason="stop"),
            ["function_call"],
        ),
    ],
)
def test_there_is_always_an_item(choice: Choice, expected: list[str]) -> None:
    """A reply without any output has one empty message, and one with other items has none."""
    assert [item["type"] for item in whole(choice)["output"]] == expected


@pytest.mark.parametrize(
    ("reason", "max_tokens", "status", "details"),
    [
        ("stop", 4, "completed", None),
        ("tool_calls", 9, "completed", None),
        ("length", 4, "incomplete", {"reason": "max_output_tokens"}),
        ("length", 9, "incomplete", {"reason": None}),  # time ran out, or the prompt was cut
        ("abort", 9, "incomplete", {"reason": None}),
    ],
)
def test_status(reason: Any, max_tokens: int, status: str, details: Any) -> None:
    """A text that was cut is incomplete, and so is its last item."""
    found = whole(Choice(index=0, text="x", reasoning="hm", finish_reason=reason), max_tokens=max_tokens)
    assert (found["status"], found["incomplete_details"]) == (status, details)
    assert [item["status"] for item in found["output"]] == ["completed", status]


def test_the_model_names_the_adapter() -> None:
    """The response's model is ``endpoint:adapter`` if an adapter answers."""
    assert whole(Choice(index=0, text="x", finish_reason="stop"), adapter="pirate")["model"] == "m:pirate"


TEXT = (
    Delta(index=0, text="H", num_tokens=1, logprobs=(TOP,)),
    Delta(index=0, text=""),
    Delta(index=0, text="é", num_tokens=1, logprobs=(SCORED,)),
)
END = (Ended(index=0, finish_reason="stop"), Done(usage=USAGE))


def test_a_stream_of_text() -> None:
    """A message is added, gets its part, grows and is done; the last event holds the whole response."""
    asked = echoed(instructions="be kind", tools=TOOLS)
    events = streamed(*TEXT, *END, asked=asked)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["delta"] for event in events if "delta" in event] == ["H", "é"]
    assert (events[2]["item"]["status"], events[2]["item"]["content"]) == ("in_progress", [])
    assert (events[6]["text"], events[7]["part"]["text"]) == ("Hé", "Hé")
    assert [len(entry["top_logprobs"]) for entry in events[6]["logprobs"]] == [0, 1]
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_r1_0"} == {events[2]["item"]["id"]}
    begun, done = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"], begun["instructions"]) == (
        "in_progress", [], None, "be kind",
    )  # fmt: skip
    choice = Choice(index=0, text="Hé", text_logprobs=(TOP, SCORED), finish_reason="stop")
    assert done == whole(choice, asked)
    assert done["output"] == [events[-2]["item"]]


def test_a_stream_of_everything() -> None:
    """Reasoning, text, a function call and a custom call are streamed one after the other, with the whole reply at the
    end.
    """
    pieces = (
        Delta(index=0, text="", reasoning="h", num_tokens=1),
        Delta(index=0, text="", reasoning="m", num_tokens=1),
        Delta(index=0, text="Hé", num_tokens=1),
        Delta(index=0, text="", calls=(CallDelta(index=0, id="c1", name="f"),)),
        Delta(index=0, text="", calls=(CallDelta(index=0, arguments='{"a":'), CallDelta(index=0, arguments="1}"))),
        Delta(
            index=0,
            text="",
            calls=(
                CallDelta(index=1, id="c2", name="note", custom=True),
                CallDelta(index=1, arguments="rain", custom=True),
            ),
        ),
        Ended(index=0, finish_reason="tool_calls"),
        Done(usage=USAGE),
    )
    events = streamed(*pieces)
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    calls = (
        ReplyCall(id="c1", name="f", arguments='{"a":1}'),
        ReplyCall(id="c2", name="note", arguments="rain", custom=True),
    )
    choice = Choice(index=0, text="Hé", reasoning="hm", calls=calls, finish_reason="tool_calls")
    assert events[-1]["response"] == whole(choice)


def test_calls_of_tools_in_a_namespace() -> None:
    """Whole and streamed they have the tool's own name and its namespace, which the model wrote as one name."""
    space = {"type": "namespace", "name": "s", "description": "", "tools": [{"type": "function", "name": "f"}]}
    asked = echoed(tools=[*TOOLS, space])
    calls = tuple(ReplyCall(id=f"c{i}", name=name, arguments="{}") for i, name in enumerate(("f", "s__f")))
    found = whole(Choice(index=0, text="", finish_reason="tool_calls", calls=calls), asked)
    assert [(item["name"], item.get("namespace")) for item in found["output"]] == [("f", None), ("f", "s")]
    assert found["tools"][-1] == space
    assert "namespaces" not in found
    pieces = [
        Delta(index=0, text="", calls=(CallDelta(index=i, **more),))
        for i, call in enumerate(calls)
        for more in ({"id": call.id, "name": call.name}, {"arguments": "{}"})
    ]
    events = streamed(*pieces, Ended(index=0, finish_reason="tool_calls"), Done(usage=USAGE), asked=asked)
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["f", "f"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["name"], item.get("namespace")) for item in done] == [("f", None), ("f", "s")]
    assert events[-1]["response"]["output"] == done


def test_text_between_thoughts_and_calls() -> None:
    """Text that resumes after reasoning or a call becomes a separate output item."""
    pieces = [
        Delta(index=0, text="a"),
        Delta(index=0, text="", reasoning="b"),
        Delta(index=0, text="c"),
        Delta(index=0, text="", calls=(CallDelta(index=0, id="c1", name="f"),)),
        Delta(index=0, text="d"),
    ]
    output = streamed(*pieces, *END)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "reasoning", "message", "function_call", "message"]
    assert len({item["id"] for item in output}) == 5


def test_log_probabilities_of_the_text() -> None:
    """A held-back token's log probability goes with the text that follows; those of reasoning, calls and markers are
    left out.
    """
    pieces = (
        Delta(index=0, text="", reasoning="h", logprobs=(scored("h"),)),
        Delta(index=0, text="", logprobs=(scored("</think>"),)),
        Delta(index=0, text="", logprobs=(scored("a"),)),
        Delta(index=0, text="ab", logprobs=(scored("b"),)),
        Delta(index=0, text="", logprobs=(scored("<call>"),)),
        Delta(index=0, text="", calls=(CallDelta(index=0, id="c1", name="f"),), logprobs=(scored("f"),)),
        Delta(index=0, text="", logprobs=(scored("</call>"),)),
    )
    events = streamed(*pieces, *END)
    found = [entry["token"] for event in events if "delta" in event for entry in event.get("logprobs", ())]
    assert found == ["a", "b"]
    choice = gather((*pieces, *END)).choices[0]
    assert events[-1]["response"]["output"] == whole(choice)["output"]
    last = streamed(Delta(index=0, text="x", logprobs=(TOP,)), Delta(index=0, text="", logprobs=(SCORED,)), *END)
    assert [len(event["logprobs"]) for event in last if event["type"] == "response.output_text.delta"] == [1, 1]
    assert len(last[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 2


def scored(token: str) -> TextLogprob:
    return TextLogprob(token=token, bytes=tuple(token.encode()), token_id=3, logprob=-1.0)


def test_a_stream_of_nothing() -> None:
    """A stream without any text has an empty message, as a whole reply does."""
    events = streamed(*END)
    assert kinds(events)[2:] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[-1]["response"] == whole(Choice(index=0, text="", finish_reason="stop"))


@pytest.mark.parametrize(
    "pieces",
    [
        (Delta(index=0, text="x"),),
        (Delta(index=0, text="", reasoning="x"),),
        (Delta(index=0, text="", calls=(CallDelta(index=0, id="c", name="f"), CallDelta(index=0, arguments="x"))),),
        (Delta(index=0, text="", calls=(CallDelta(index=0, id="c", name="f", custom=True),)),),
    ],
)
def test_a_stream_that_is_cut(pieces: tuple[Piece, ...]) -> None:
    """A stream that is cut ends as incomplete with its last item; a custom tool's call alone has no status for it."""
    events = streamed(*pieces, Ended(index=0, finish_reason="length"), Done(usage=USAGE))
    assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
    (item,) = events[-1]["response"]["output"]
    assert item.get("status", "incomplete") == "incomplete"
    assert events[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("stop", "arguments", "status"),
    [
        ("a", '{"b', "incomplete"),
        (7, "{", "incomplete"),
        ("a", "", "incomplete"),
        ("a", "{}", "completed"),  # what came after the call ended the reply
        (None, '{"b', "completed"),  # the model ended it so
    ],
)
def test_a_call_that_a_stop_string_cut(stop: str | int | None, arguments: str, status: str) -> None:
    """A call cut off by a stop string is incomplete, as is its response, streamed and whole, so that nobody runs it."""
    call = ReplyCall(id="c", name="f", arguments=arguments)
    found = whole(Choice(index=0, text="", calls=(call,), finish_reason="stop", stop_reason=stop), max_tokens=4)
    assert [found["status"], found["output"][0]["status"]] == [status] * 2
    assert found["incomplete_details"] == ({"reason": None} if status == "incomplete" else None)
    calls = (CallDelta(index=0, id="c", name="f"), CallDelta(index=0, arguments=arguments))
    ended = Ended(index=0, finish_reason="stop", stop_reason=stop)
    events = streamed(Delta(index=0, text="", calls=calls), ended, Done(usage=USAGE))
    assert events[-2]["item"]["status"] == status
    assert events[-1]["response"] == whole(
        Choice(index=0, text="", calls=(call,), finish_reason="stop", stop_reason=stop)
    )


@pytest.mark.parametrize(
    ("error", "code", "failure"),
    [
        (EngineDied("gone"), "engine_died", "server_error"),
        (DeadlineExceeded("late"), "timeout", "server_error"),
        (LimitExceeded("too much"), "rate_limit_exceeded", "rate_limit_exceeded"),
        (InvalidField("text", 1, "2"), "invalid_value", "invalid_prompt"),
        (InvalidField("tools[0].function.parameters", 1, "2"), "invalid_value", "invalid_prompt"),
    ],
)
def test_a_stream_that_breaks_off(error: ServingError, code: str, failure: str) -> None:
    """A broken stream ends with an error and a failed response with the output so far, even before any output."""
    events = streamed(*TEXT, error=error)
    assert kinds(events)[-2:] == ["error", "failed"]
    message = error.message.replace(".function", "")
    assert (events[-2]["code"], events[-2]["message"]) == (code, message)
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": failure, "message": message})
    assert response["output"][0]["content"][0]["text"] == "Hé"
    assert response["output"][0]["status"] == "incomplete"
    assert kinds(streamed(error=error)) == ["created", "in_progress", "error", "failed"]


@pytest.mark.parametrize("kind", [*walk()])
def test_every_error_is_rendered(kind: type[ServingError]) -> None:
    """Each class of the tree has an object and an end of a stream."""
    error = InvalidField("a", 1, "b") if kind is InvalidField else kind("no")
    found = DIALECT.error(error)
    assert found.status == kind.status
    assert set(json.loads(found.body)["error"]) == {"message", "type", "param", "code"}
    assert kinds(streamed(error=error))[-1] == "failed"
