"""MindIE's chat completions: what is taken and refused, and replies as its document prints them."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import pytest
from mindie_examples import CHATS, MEDIA, SECOND_ROUND, SINGLE, TOOLS

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.errors import InvalidField, NotFound, Overloaded
from mlflow_llm.serving.interface.reply import CallDelta, Choice, Delta, Done, Ended, Reply, ReplyCall, Step, Usage
from mlflow_llm.serving.interface.request import (
    MediaPart,
    RawChat,
    ReplyForm,
    Sampling,
    Sequence,
    ToolUse,
    ValidRequest,
)

MINDIE = DIALECTS["mindie"]
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def read(**fields: Any) -> RawChat:
    raw = MINDIE.decode(Head(MINDIE.routes[0], {}), json.dumps(HI | fields).encode())
    assert isinstance(raw, RawChat)
    return raw


def refused(field: str, value: Any) -> str:
    with pytest.raises(InvalidField) as error:
        read(**{field: value})
    return str(error.value)


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_the_documents_requests_are_taken(body: dict[str, Any]) -> None:
    """The documented requests are accepted as printed, by the reader and by the schema."""
    raw = read(**body)
    assert (raw.timings, raw.sampling.clip_max_tokens, raw.sampling.top_p) == (True, True, body["top_p"])
    assert raw.sampling.top_k == (0 if "top_k" in body else None)
    jsonschema.validate({"model": "m", **body}, MINDIE.request_schemas["chat"])


def test_a_round_of_tools() -> None:
    """An assistant's message may consist of calls alone, and a tool's message answers one by its id."""
    _, _, asked, answered = read(**SECOND_ROUND).messages
    assert asked.tool_calls[0].arguments == {"order_id": "12345"}
    assert answered.tool_call_id == asked.tool_calls[0].id == "tool_call_8p2Nk"


@pytest.mark.parametrize(
    ("field", "taken", "not_taken"),
    [
        ("temperature", [0, 0.001, 2.5, 100], [-0.1, "1", True]),
        ("top_p", [0.01, 1], [0, 1.01]),
        ("top_k", [-1, 1, 2147483647], [0, -2, 2147483648, True]),
        ("seed", [0, 18446744073709551615], [-1, 18446744073709551616]),
        ("repetition_penalty", [0.1, 2.0], [0, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("max_tokens", [1, 2147483647], [0, -1, 2147483648]),
        ("stop", [[], ["a"], "a", "a" * 32768, ["a" * 16384, "b" * 16384]], ["", [""], [None], "a" * 32769]),
        ("stop_token_ids", [[], [2, 13]], [[None], "2", [1.5], [-1]]),
        ("include_stop_str_in_output", [True, False], ["yes", 1]),
        ("skip_special_tokens", [True, False], [0]),
        ("ignore_eos", [True, False], [0]),
        ("stream", [True, False], ["true"]),
        ("tool_choice", ["none", "auto"], ["any", {"type": "function"}]),
        ("n", [1], [2, 0]),
        ("logprobs", [False], [True]),
        ("model", ["m", "m:adapter"], [5]),
        ("best_of", [], [2]),
    ],
)
def test_bounds(field: str, taken: list[Any], not_taken: list[Any]) -> None:
    """Each field is accepted within the documented bounds only, or null where allowed; the schema agrees."""
    schema = MINDIE.request_schemas["chat"]
    for value in [*taken, *([None] if field not in ("model", "best_of") else [])]:
        read(**{field: value})
        jsonschema.validate(HI | {field: value}, schema)
    for value in not_taken:
        assert refused(field, value).startswith(field)


def test_what_is_left_out_and_what_is_nothing() -> None:
    """Ids beyond 32 bits are dropped, an empty list of stop strings means none, and their total length is bounded."""
    assert read(stop_token_ids=[2, 2**31, -(2**40), 13]).sampling.stop_token_ids == (2, 13)
    assert read(stop=[]).sampling.stop is None
    assert "32768" in refused("stop", ["a" * 32768, "b"])


def test_model_and_messages_are_needed() -> None:
    """A request without model or messages is refused with the missing field."""
    for field in ("model", "messages"):
        assert refused(field, None).startswith(field)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": ""}, ".content"),
        ({"role": "user", "content": []}, ".content"),
        ({"role": "user", "content": [{"type": "text", "text": ""}]}, ".content[0].text"),
        ({"role": "assistant", "content": ""}, ".content"),
        ({"role": "assistant", "content": "", "tool_calls": []}, ".content"),
        ({"role": "tool", "content": "x"}, ".tool_call_id"),
        ({"role": "tool", "content": "", "tool_call_id": "a"}, ".content"),
        ({"role": "developer", "content": "x"}, ".role"),
        ({"role": "wizard", "content": "x"}, ".role"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, ".content[0].type"),
        ({"role": "user", "content": "x", "colour": 1}, ".colour"),
        ({"role": "user", "content": "x", "tool_call_id": 5}, ".tool_call_id"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            ".tool_calls[0].type",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "no"}}],
            },
            ".tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], where: str) -> None:
    """An invalid message is refused with its path."""
    assert refused("messages", [message]).startswith(f"messages[0]{where}:")


def test_messages_that_say_more_than_they_need() -> None:
    """An id of a call may stand beside any role, and content may be empty beside calls."""
    assert read(messages=[{"role": "user", "content": "x", "tool_call_id": "a"}]).messages[0].tool_call_id is None
    call = SECOND_ROUND["messages"][2]["tool_calls"]
    assert read(messages=[{"role": "assistant", "content": "", "tool_calls": call}]).messages[0].tool_calls
    assert "4194304" in refused("messages", [{"role": "user", "content": "a" * (2**21 + 1)}] * 2)


@pytest.mark.parametrize(
    ("part", "source", "place"),
    [
        ({"type": "image_url", "image_url": "/srv/a.png"}, "path", "/srv/a.png"),
        ({"type": "image_url", "image_url": {"url": "file:///srv/a%20b.JPG"}}, "path", "/srv/a b.JPG"),
        ({"type": "image_url", "image_url": "https://h.example:8080/a.jpeg?x=1"}, "url", "h.example:8080"),
        ({"type": "image_url", "image_url": {"url": PNG}}, "data", ""),
        ({"type": "video_url", "video_url": "http://h.example/signed"}, "url", "h.example"),
        ({"type": "audio_url", "audio_url": "/srv/a.flac"}, "path", "/srv/a.flac"),
    ],
)
def test_media_that_are_well_formed(part: dict[str, Any], source: str, place: str) -> None:
    """A medium is a path, a URL or base64, by itself or in an object."""
    (found,) = read(messages=[{"role": "user", "content": [part]}]).messages[0].content
    assert isinstance(found, MediaPart)
    assert (found.source, found.place, found.part) == (source, place, "messages[0].content[0]")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image_url", ""),
        ("image_url", None),
        ("image_url", {"url": "/a.png", "detail": "low"}),
        ("image_url", "/srv/a.gif"),
        ("image_url", "/srv/a"),
        ("image_url", "srv/a.png"),
        ("image_url", "ftp://h.example/a.png"),
        ("image_url", "http:///a.png"),
        ("image_url", "http://user@h.example/a.png"),
        ("image_url", "http://[::1/a.png"),
        ("image_url", "data:image/gif;base64,aGk="),
        ("image_url", "data:image/png;base64,!!"),
        ("image_url", "data:image/png;base64,"),
        ("image_url", "data:audio/mp3;base64,aGk="),
        ("image_url", "data:image/png;base64," + "A" * (28 * 2**20)),
        ("video_url", "/srv/a.mkv"),
        ("audio_url", "https://h.example/a.ogg"),
    ],
)
def test_media_that_are_malformed(kind: str, value: Any) -> None:
    """Malformed media are refused with the path of the fault, before anything is read."""
    part = {"type": kind, kind: value}
    assert refused("messages", [{"role": "user", "content": [part]}]).startswith(f"messages[0].content[0].{kind}")


def test_the_number_of_media() -> None:
    """A request has at most 20 media of all kinds."""
    content = [{"type": "image_url", "image_url": PNG}] * 10
    read(messages=[{"role": "user", "content": content}] * 2)
    more = [{"role": "user", "content": [{"type": "audio_url", "audio_url": "/a.mp3"}]}]
    assert "at most 20" in refused("messages", [{"role": "user", "content": content}] * 2 + more)
    assert len(read(**MEDIA).messages[0].content) == 2


def test_tools() -> None:
    """Tools are functions with object parameters, and null means none."""
    assert read(tools=None, tool_choice=None).tools is None
    assert refused("tools", [{"type": "custom", "custom": {"name": "x"}}]).startswith("tools[0].type")
    function = {**TOOLS[0]["function"], "parameters": {"type": "array"}}
    assert refused("tools", [{"type": "function", "function": function}]).startswith(
        "tools[0].function.parameters.type"
    )


def request(**fields: Any) -> ValidRequest:
    return ValidRequest(
        request_id="123",
        task="chat",
        model="llama_65b",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=9),
        created=1729614349,
        **fields,
    )


STEPS = tuple(Step(index=0, waited=0.0, elapsed=ms / 1000, batch_size=1) for ms in (200, 56, 28, 28))
USAGE = Usage(prompt_tokens=9, completion_tokens=12, cached_tokens=4)
TAIL = b'"usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21},"prefill_time":200.0,'
TAIL += b'"decode_time_arr":[56.0,28.0,28.0]}'
HEAD = (
    b'{"id":"chatcmpl-123","object":"chat.completion","created":1729614349,"model":"llama_65b","choices":[{"index":0,'
)


def test_a_reply() -> None:
    """A reply has the documented keys in the documented order."""
    choice = Choice(index=0, text="\n\nHello there", finish_reason="stop", steps=STEPS)
    found = MINDIE.encode(request(), Reply(choices=(choice,), usage=USAGE)).body
    message = b'"message":{"role":"assistant","content":"\\n\\nHello there"},"finish_reason":"stop"}],'
    assert found == HEAD + message + TAIL


def test_replies_with_tools() -> None:
    """Calls have short ids and end the reply with tool_calls, named or not, but for one that a stop string ended;
    without one there is a null."""
    tools = ToolUse(names=("get_delivery_date",))
    called = ReplyCall(id="call_JwmTNF3Oabcdefgh", name="get_delivery_date", arguments='{"order_id": "12345"}')
    choice = Choice(index=0, text="", calls=(called,), finish_reason="stop", steps=STEPS)
    found = MINDIE.encode(request(tools=tools), Reply(choices=(choice,), usage=USAGE)).body
    message = (
        b'"message":{"role":"assistant","content":"","tool_calls":[{"function":{"arguments":"{\\"order_id\\": '
        b'\\"12345\\"}","name":"get_delivery_date"},"id":"call_JwmTNF3O","type":"function"}]},'
        b'"finish_reason":"tool_calls"}],'
    )
    assert found == HEAD + message + TAIL
    choice = Choice(index=0, text="", calls=(called,), finish_reason="stop", stop_reason="END", steps=STEPS)
    found = MINDIE.encode(request(tools=tools), Reply(choices=(choice,), usage=USAGE)).body
    assert found == HEAD + message.replace(b'"finish_reason":"tool_calls"', b'"finish_reason":"stop"') + TAIL
    choice = Choice(index=0, text="x", finish_reason="length", steps=STEPS)
    found = MINDIE.encode(request(tools=tools), Reply(choices=(choice,), usage=USAGE)).body
    assert b'"message":{"role":"assistant","content":"x","tool_calls":null},"finish_reason":"length"}' in found


CHUNK = 'data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1729614349,"model":"llama_65b",'
PIECES = (
    Delta(index=0, text="Hello", num_tokens=1),
    Delta(index=0, text="", num_tokens=1),
    Delta(index=0, text="!", num_tokens=1),
    Ended(index=0, finish_reason="length"),
    Done(usage=Usage(prompt_tokens=31, completion_tokens=3)),
)
COUNTS = '"usage":{"prompt_tokens":31,"completion_tokens":3,"total_tokens":34},'


def streamed(valid: ValidRequest, *pieces: Any) -> str:
    encoder = MINDIE.stream(valid)
    return b"".join(map(encoder.encode, pieces)).decode()


def delta(content: str, reason: str = "null") -> str:
    role = f'"role":"assistant","content":"{content}"'
    return f'"choices":[{{"index":0,"delta":{{{role}}},"finish_reason":{reason}}}]}}\n\n'


def test_a_stream() -> None:
    """Every chunk has a role, one a token; usage is in the last one with choices, before them; then [DONE]."""
    said = "".join(CHUNK + delta(content) for content in ("Hello", "", "!"))
    assert streamed(request(), *PIECES) == said + CHUNK + COUNTS + delta("", '"length"') + "data: [DONE]\n\n"


def test_a_stream_of_full_texts() -> None:
    """Chunks have the text so far, and the last one full_text before its usage."""
    said = "".join(CHUNK + delta(content) for content in ("Hello", "Hello", "Hello!"))
    last = CHUNK + '"full_text":"Hello!",' + COUNTS + delta("Hello!", '"length"')
    assert streamed(request(form=ReplyForm(full_text=True)), *PIECES) == said + last + "data: [DONE]\n\n"


@pytest.mark.parametrize(("stop", "reason"), [(None, "tool_calls"), ("END", "stop"), (7, "tool_calls")])
def test_a_stream_of_calls(stop: str | int | None, reason: str) -> None:
    """Each chunk has the new part of a call; the finish reason is tool_calls unless a stop string may have cut a call
    off.
    """
    pieces = (
        Delta(index=0, text="", calls=(CallDelta(index=0, id="call_12345678abcd", name="f"),), num_tokens=1),
        Delta(index=0, text="", calls=(CallDelta(index=0, arguments="{}"),), num_tokens=1),
        Ended(index=0, finish_reason="stop", stop_reason=stop),
        Done(usage=USAGE),
    )
    chunks = [json.loads(line[6:]) for line in streamed(request(), *pieces).split("\n\n") if "{" in line]
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    first = {"index": 0, "function": {"arguments": "", "name": "f"}, "id": "call_12345678", "type": "function"}
    assert calls == [[first], [{"index": 0, "function": {"arguments": "{}"}}], None]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_errors() -> None:
    """An error has its text and type, and precedes [DONE] in a stream."""
    refused = MINDIE.error(NotFound("no endpoint", param="model"))
    assert (refused.status, refused.body) == (404, b'{"error": "no endpoint", "error_type": "NotFoundError"}')
    busy = MINDIE.error(Overloaded("full", retry_after=2))
    assert (busy.status, dict(busy.headers)) == (503, {"Retry-After": "2"})
    broken = MINDIE.stream(request()).error(InvalidField("top_k", 5, "less"))
    assert broken.startswith(b'data: {"error":"top_k: 5 is not allowed; expected less","error_type":"Input Valid')
    assert broken.endswith(b"}\n\ndata: [DONE]\n\n")


def test_the_single_example_streams_too() -> None:
    """The single example is also accepted streamed, without timings, since its chunks have none."""
    assert not read(**SINGLE | {"stream": True}).timings
