"""Replies as they go over the wire, byte for byte."""

import base64
import json
from array import array

import jsonschema
import msgspec
import pytest

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.dialects.openai.codec import ObjectDialect
from mlflow_llm.serving.interface.errors import (
    InvalidField,
    LimitExceeded,
    Overloaded,
    RequestError,
    RequestTimeout,
    ServingError,
    walk,
)
from mlflow_llm.serving.interface.reply import (
    CallDelta,
    Choice,
    Delta,
    Done,
    Ended,
    Reply,
    ReplyCall,
    TextLogprob,
    Usage,
)
from mlflow_llm.serving.interface.request import Sampling, Sequence, ToolUse, ValidRequest
from mlflow_llm.serving.tasks.reply.pieces import gather

ALL = sorted(name for name, dialect in DIALECTS.items() if isinstance(dialect, ObjectDialect))
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)


def _request(task="chat", n=1, prompts=1, logprobs=None, **fields):
    sampling = None if task == "embeddings" else Sampling(max_tokens=9, logprobs=logprobs)
    sequences = (Sequence(prompt_token_ids=(1, 2)),) * (n * prompts)
    return ValidRequest(
        request_id="r1", task=task, model="m", sequences=sequences, sampling=sampling, n=n, created=1700000000, **fields
    )


def _choice(index=0, **fields):
    return Choice(index=index, text="Hé", finish_reason="stop", **fields)


LOGPROB = TextLogprob(
    token="Hé",
    bytes=(72, 195, 169),
    token_id=7,
    logprob=-0.5,
    top=(
        TextLogprob(token="Hé", bytes=(72, 195, 169), token_id=7, logprob=-0.5),
        TextLogprob(token="x", bytes=(120,), token_id=8, logprob=-2.0),
    ),
)


def _wire(dialect, request, reply):
    return json.dumps(DIALECTS[dialect].written(request, reply), ensure_ascii=False)


def test_openai_chat():
    """A chat completion has OpenAI's keys in OpenAI's order."""
    assert _wire("openai", _request(), Reply(choices=(_choice(),), usage=USAGE)) == (
        '{"id": "chatcmpl-r1", "object": "chat.completion", "created": 1700000000, "model": "m", "choices": '
        '[{"index": 0, "message": {"role": "assistant", "content": "Hé"}, "logprobs": null, "finish_reason": "stop"}], '
        '"usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, '
        '"prompt_tokens_details": {"cached_tokens": 2}}}'
    )


def test_databricks_completions():
    """A text completion has the documented usage."""
    assert _wire("databricks", _request("completions"), Reply(choices=(_choice(),), usage=USAGE)) == (
        '{"id": "cmpl-r1", "object": "text_completion", "created": 1700000000, "model": "m", "choices": '
        '[{"index": 0, "text": "Hé", "logprobs": null, "finish_reason": "stop"}], '
        '"usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}'
    )


def test_databricks_index_profiles():
    """Choices of two prompts times two are numbered flat, or by prompt where the endpoint's profile says so and the
    route is Databricks'."""
    flat = _request("completions", n=2, prompts=2)
    grouped = msgspec.structs.replace(flat, index_by_prompt=True)
    reply = Reply(choices=tuple(_choice(i) for i in range(4)), usage=USAGE)
    databricks = DIALECTS["databricks"]
    assert [c["index"] for c in databricks.written(flat, reply)["choices"]] == [0, 1, 2, 3]
    assert [c["index"] for c in databricks.written(grouped, reply)["choices"]] == [0, 0, 1, 1]
    assert b'"index":1,' in databricks.stream(grouped).encode(Delta(index=3, text="x"))
    for other in ("openai", "mlflow"):
        assert [c["index"] for c in DIALECTS[other].written(grouped, reply)["choices"]] == [0, 1, 2, 3]


def test_embeddings():
    """Embeddings are floats with the Databricks id, or base64 of little-endian float32."""
    vector = array("f", [0.5, -1.0]).tobytes()
    reply = Reply(vectors=(vector,), usage=Usage(prompt_tokens=5))
    assert _wire("databricks", _request("embeddings"), reply) == (
        '{"id": "embd-r1", "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}], '
        '"model": "m", "usage": {"prompt_tokens": 5, "total_tokens": 5}}'
    )
    encoded = DIALECTS["openai"].written(_request("embeddings", encoding_format="base64"), reply)
    assert base64.b64decode(encoded["data"][0]["embedding"]) == vector
    assert "id" not in encoded


def test_chat_logprobs():
    """Chat logprobs are objects with bytes and alternatives."""
    reply = Reply(choices=(_choice(logprobs=(LOGPROB,)),), usage=USAGE)
    found = DIALECTS["openai"].written(_request(logprobs=2), reply)["choices"][0]["logprobs"]
    best = {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169]}
    other = {"token": "x", "logprob": -2.0, "bytes": [120]}
    assert found == {"content": [{**best, "top_logprobs": [best, other]}], "refusal": None}


def test_completions_logprobs():
    """Completions logprobs are parallel lists with offsets into the text; an echoed first token has null."""
    shown = msgspec.structs.replace(LOGPROB, start=3)
    first = TextLogprob(token="<s>", bytes=(60, 115, 62), token_id=1, logprob=None)
    reply = Reply(choices=(_choice(logprobs=(first, shown)),), usage=USAGE)
    found = DIALECTS["openai"].written(_request("completions", logprobs=2), reply)["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["<s>", "Hé"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"Hé": -0.5, "x": -2.0}],
        "text_offset": [0, 3],
    }


def test_completions_logprobs_of_parts():
    """A part of a character is written by its bytes, so that two parts are told apart; chat logprobs have ``bytes``."""
    parts = [
        TextLogprob(token=data.decode(errors="replace"), bytes=tuple(data), token_id=i, logprob=-float(i), start=1)
        for i, data in enumerate((b"\xe6\x97", b" \xe6", "日".encode()))
    ]
    entry = msgspec.structs.replace(parts[0], top=tuple(parts))
    reply = Reply(choices=(_choice(logprobs=(entry, parts[2])),), usage=USAGE)
    found = DIALECTS["openai"].written(_request("completions", logprobs=3), reply)["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xe6\\x97", "日"]
    assert found["top_logprobs"][0] == {"bytes:\\xe6\\x97": 0.0, "bytes: \\xe6": -1.0, "日": -2.0}
    assert found["text_offset"] == [1, 1]
    chat = DIALECTS["openai"].written(_request(logprobs=3), reply)["choices"][0]["logprobs"]["content"]
    assert (chat[0]["token"], chat[0]["bytes"]) == ("\ufffd", [0xE6, 0x97])


def _streamed(dialect, request, *pieces):
    encoder = DIALECTS[dialect].stream(request)
    return b"".join(encoder.encode(piece) for piece in pieces)


PIECES = (Delta(index=0, text="Hé", num_tokens=2), Delta(index=0, text=""), Ended(index=0, finish_reason="stop"))
HEAD = '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":['
FIRST = '{"index":0,"delta":{"role":"assistant","content":"Hé"},"logprobs":null,"finish_reason":null}]'
LAST = '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]'


def test_openai_stream():
    """The first chunk has the role, empty deltas say nothing, the last has the reason, then [DONE]."""
    expected = f"data: {HEAD}{FIRST}}}\n\ndata: {HEAD}{LAST}}}\n\ndata: [DONE]\n\n"
    assert _streamed("openai", _request(), *PIECES, Done(usage=USAGE)).decode() == expected


def test_openai_stream_with_usage():
    """include_usage adds a last chunk with empty choices; the others carry a null usage."""
    usage = '{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":2}}'
    expected = (
        f'data: {HEAD}{FIRST},"usage":null}}\n\ndata: {HEAD}{LAST},"usage":null}}\n\n'
        f'data: {HEAD}],"usage":{usage}}}\n\ndata: [DONE]\n\n'
    )
    assert _streamed("openai", _request(usage_chunks="last"), *PIECES, Done(usage=USAGE)).decode() == expected


@pytest.mark.parametrize("task", ["chat", "completions"])
def test_usage_in_every_chunk(task):
    """With continuous_usage_stats each chunk has the counts so far, tokens without a text included."""
    request = _request(task, usage_chunks="all")
    pieces = [Delta(index=0, text=text, num_tokens=count) for text, count in (("a", 1), ("b", 2), ("", 3), ("c", 1))]
    encoder = DIALECTS["openai"].stream(request)
    wire = b"".join(map(encoder.encode, (*pieces, Ended(index=0, finish_reason="stop"), Done(usage=USAGE))))
    assert getattr(encoder, "template", None) is None  # it would write texts without their counts
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in wire.split(b"\n\n")[:-2]]
    prompt = request.num_prompt_tokens
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 7, 7, USAGE.completion_tokens]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks[:-1]] == [prompt + n for n in (1, 3, 7, 7)]
    assert chunks[-1]["choices"] == []


def test_databricks_stream():
    """The last chunk with choices carries usage unasked."""
    usage = '{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}'
    expected = f'data: {HEAD}{FIRST}}}\n\ndata: {HEAD}{LAST},"usage":{usage}}}\n\ndata: [DONE]\n\n'
    assert _streamed("databricks", _request(), *PIECES, Done(usage=USAGE)).decode() == expected


@pytest.mark.parametrize("dialect", ALL)
def test_stream_of_several_choices(dialect):
    """Each choice has one role and one reason, whatever their order, and lines are data lines only."""
    wire = _streamed(
        dialect,
        _request(n=2),
        Delta(index=1, text="b"),
        Ended(index=1, finish_reason="length"),
        Ended(index=0, finish_reason="stop"),
        Done(usage=USAGE),
    ).decode()
    lines = [line for line in wire.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1]
    assert [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]] == [(1, "length"), (0, "stop")]


def test_completions_stream_offsets():
    """text_offset goes on over the chunks of one choice."""
    encoder = DIALECTS["openai"].stream(_request("completions", logprobs=1))
    for expected in ([0], [2]):
        entry = msgspec.structs.replace(LOGPROB, start=expected[0])
        chunk = json.loads(encoder.encode(Delta(index=0, text="Hé", logprobs=(entry,)))[6:])
        assert chunk["object"] == "text_completion"
        assert chunk["choices"][0]["logprobs"]["text_offset"] == expected


ID, CUSTOM_ID = "call_" + "a" * 24, "call_" + "b" * 24
CALLS = (
    ReplyCall(id=ID, name="find", arguments='{"a": 1}'),
    ReplyCall(id=CUSTOM_ID, name="run", arguments="ls", custom=True),
)
CALL_OBJECTS = [
    {"id": ID, "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}},
    {"id": CUSTOM_ID, "type": "custom", "custom": {"name": "run", "input": "ls"}},
]
CALL_PIECES = (
    Delta(index=0, text="", reasoning="Hm.", num_tokens=1),
    Delta(index=0, text="Well", num_tokens=1),
    Delta(index=0, text="", calls=(CallDelta(index=0, id=ID, name="find"), CallDelta(index=0, arguments='{"a"'))),
    Delta(index=0, text="", calls=(CallDelta(index=0, arguments=": 1}"),)),
    Delta(index=0, text="", num_tokens=1),
    Delta(
        index=0,
        text="",
        calls=(
            CallDelta(index=1, id=CUSTOM_ID, name="run", custom=True),
            CallDelta(index=1, arguments="ls", custom=True),
        ),
    ),
    Ended(index=0, finish_reason="tool_calls"),
)
TOOLS = ToolUse(names=("find", "run"), custom=("run",))


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    ("said", "content"), [({}, None), ({"text": "Well"}, "Well"), ({"reasoning": "Hm."}, None)], ids=str
)
def test_messages_with_calls(dialect, said, content):
    """A message has calls of functions and custom tools, null content without text, and its reasoning beside them."""
    choice = Choice(**{"index": 0, "text": "", "finish_reason": "tool_calls", "calls": CALLS, **said})
    found = DIALECTS[dialect].written(_request(tools=TOOLS), Reply(choices=(choice,), usage=USAGE))["choices"][0]
    reasoning = {"reasoning_content": "Hm."} if "reasoning" in said else {}
    expected = {"role": "assistant", "content": content, **reasoning, "tool_calls": CALL_OBJECTS}
    assert (found["message"], found["finish_reason"]) == (expected, "tool_calls")
    assert list(found["message"]) == list(expected)


def test_reasoning_without_calls():
    """Reasoning alone leaves the text a text; its tokens are a detail of usage where the dialect has any."""
    choice = Choice(index=0, text="", reasoning="Hm.", finish_reason="length")
    reply = Reply(choices=(choice,), usage=msgspec.structs.replace(USAGE, reasoning_tokens=2))
    openai, databricks = (DIALECTS[name].written(_request(), reply) for name in ("openai", "databricks"))
    expected = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert openai["choices"][0]["message"] == databricks["choices"][0]["message"] == expected
    assert openai["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert "completion_tokens_details" not in databricks["usage"]


def test_drafts_in_usage():
    """Usage has a prediction's accepted and rejected tokens as in OpenAI's API, and all drafts where there were any;
    Databricks' usage has no details.
    """
    choice = Choice(index=0, text="", finish_reason="stop")
    predicted = msgspec.structs.replace(USAGE, accepted_prediction_tokens=0, rejected_prediction_tokens=0)
    drafted = msgspec.structs.replace(
        USAGE, draft_tokens=9, accepted_draft_tokens=6, accepted_prediction_tokens=4, rejected_prediction_tokens=1
    )

    def details(usage, dialect="openai"):
        found = DIALECTS[dialect].written(_request(), Reply(choices=(choice,), usage=usage))
        return found["usage"].get("completion_tokens_details")

    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    all_drafts = {"draft_tokens": 9, "accepted_draft_tokens": 6}
    assert details(USAGE) is None
    assert details(predicted) == nothing
    assert details(drafted) == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1} | all_drafts
    assert details(drafted, "databricks") is None


@pytest.mark.parametrize("dialect", ALL)
def test_stream_of_calls(dialect):
    """A delta says one thing. The first of a call has index, id, type, name and no arguments; later ones have its
    index and arguments, and nothing else, not even a null."""
    wire = _streamed(dialect, _request(tools=TOOLS), *CALL_PIECES, Done(usage=USAGE)).decode()
    choices = [json.loads(line[6:])["choices"][0] for line in wire.split("\n\n") if line.startswith("data: {")]
    custom = {"index": 1, "id": CUSTOM_ID, "type": "custom", "custom": {"name": "run", "input": ""}}
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "reasoning_content": "Hm."},
        {"content": "Well"},
        {"tool_calls": [{"index": 0, "id": ID, "type": "function", "function": {"name": "find", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [custom]},
        {"tool_calls": [{"index": 1, "custom": {"input": "ls"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["tool_calls"]


def test_openai_s_client_gathers_what_we_gather():
    """The parts of a stream, put together by OpenAI's own client, are the message of a reply that is not streamed."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    pieces = [piece for piece in CALL_PIECES if not (isinstance(piece, Delta) and any(c.custom for c in piece.calls))]
    state = ChatCompletionStreamState()
    wire = _streamed("openai", _request(tools=TOOLS), *pieces, Done(usage=USAGE)).decode()
    for line in wire.split("\n\n"):
        if line.startswith("data: {"):
            state.handle_chunk(ChatCompletionChunk.model_validate_json(line[6:]))
    found = state.get_final_completion().choices[0]
    whole = DIALECTS["openai"].written(_request(tools=TOOLS), gather([*pieces, Done(usage=USAGE)]))["choices"][0]
    assert found.finish_reason == whole["finish_reason"] == "tool_calls"
    gathered = found.message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in gathered["tool_calls"]:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert gathered == whole["message"]


def test_logprobs_beside_calls():
    """Log probabilities of what makes no text go out with the pieces of calls, or alone, never with a content."""
    encoder = DIALECTS["openai"].stream(_request(logprobs=1, tools=TOOLS))
    begun = encoder.encode(Delta(index=0, text="", calls=CALL_PIECES[2].calls, logprobs=(LOGPROB,)))
    chunks = [json.loads(line[6:])["choices"][0] for line in begun.decode().split("\n\n") if line]
    assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == [1, 0]
    alone = json.loads(encoder.encode(Delta(index=0, text="", logprobs=(LOGPROB,)))[6:])["choices"][0]
    assert (alone["delta"], len(alone["logprobs"]["content"])) == ({}, 1)


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("error_class", walk(), ids=lambda c: c.__name__)
def test_every_error_is_rendered(dialect, error_class):
    """Every class of the tree has a body in every dialect of OpenAI's objects, alone and within a stream."""
    error = error_class.__new__(error_class)
    ServingError.__init__(error, "what happened", param="field")
    alone = DIALECTS[dialect].error(error)
    body = json.loads(alone.body)
    assert alone.status == error_class.status
    assert "what happened" in json.dumps(body)
    jsonschema.validate(body, DIALECTS[dialect].error_schema)
    wire = DIALECTS[dialect].stream(_request()).error(error).decode()
    event, done = wire.strip().split("\n\n")
    reported = json.loads(event.removeprefix("data: "))
    assert body.items() <= reported.items()
    known = body["error"] if dialect == "openvino" else json.loads(DIALECTS["openai"].error(error).body)["error"]
    assert reported["error"] == known
    assert done == "data: [DONE]"


@pytest.mark.parametrize("error_class", walk(RequestError), ids=lambda c: c.__name__)
def test_no_client_sends_a_mistake_again(error_class):
    """Permanent errors have statuses that clients do not retry, except limits, timeouts and OpenAI's conflicts."""
    assert error_class.status in {400, 401, 403, 404, 405, 409, 413, 414, 415, 417, 422, 431} or (
        error_class in (LimitExceeded, RequestTimeout)
    )


def test_error_bodies():
    """An error has its dialect's form, with Retry-After rounded up."""
    error = InvalidField("temperature", -1, "a number in [0, 2]")
    assert json.loads(DIALECTS["openai"].error(error).body) == {
        "error": {
            "message": "temperature: -1 is not allowed; expected a number in [0, 2]",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }
    assert json.loads(DIALECTS["databricks"].error(error).body)["error_code"] == "INVALID_PARAMETER_VALUE"
    limited = DIALECTS["databricks"].error(LimitExceeded("otpm: 100 of 100 used", limit="otpm", retry_after=1.2))
    assert (limited.status, limited.headers) == (429, {"Retry-After": "2"})
    assert json.loads(limited.body)["error_code"] == "REQUEST_LIMIT_EXCEEDED"
    full = DIALECTS["mlflow"].error(Overloaded("full"))
    assert json.loads(full.body)["error_code"] == "TEMPORARILY_UNAVAILABLE"


def test_mlflow_error_codes_are_mlflows():
    """Every code of the MLflow dialect is one that MLflow's own clients know."""
    from mlflow.protos.databricks_pb2 import ErrorCode

    from mlflow_llm.serving.dialects.openai.mlflow import ERROR_CODES

    assert set(ERROR_CODES.values()) <= set(ErrorCode.keys())


def test_held_chunk_is_not_lost_on_an_error():
    """A chunk held for usage goes out before an error that follows it."""
    encoder = DIALECTS["databricks"].stream(_request(n=2))
    assert encoder.encode(Ended(index=0, finish_reason="stop")) == b""
    wire = encoder.error(Overloaded("full")).decode()
    assert wire.index('"finish_reason":"stop"') < wire.index("error_code")
