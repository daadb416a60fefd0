"""Whole replies, streams and errors of each dialect and task, byte for byte, beside those in ``test_replies``."""

import json
from array import array

import msgspec
import pytest

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.frontend.answer import error_answer
from mlflow_llm.serving.interface.errors import DeadlineExceeded, InvalidField, NotFound
from mlflow_llm.serving.interface.reply import Choice, Delta, Done, Ended, Reply, Usage
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

REPLY = Reply(
    choices=(Choice(index=0, text="Hé", finish_reason="length"),),
    usage=Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
)
VECTORS = Reply(vectors=(array("f", [0.5, -1.0]).tobytes(),), usage=Usage(prompt_tokens=5))
PIECES = (
    Delta(index=0, text="H", num_tokens=1),
    Delta(index=0, text="é", num_tokens=2),
    Ended(index=0, finish_reason="length"),
    Done(usage=REPLY.usage),
)
CHAT = (
    '{"id":"chatcmpl-r1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"Hé"},"logprobs":null,"finish_reason":"length"}],"usage":'
)
TEXT = (
    '{"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":"Hé",'
    '"logprobs":null,"finish_reason":"length"}],"usage":'
)
EMBEDDED = (
    '"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,-1.0]}],"model":"m",'
    '"usage":{"prompt_tokens":5,"total_tokens":5}}'
)
COUNTS = '{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}'
DETAILS = COUNTS[:-1] + ',"prompt_tokens_details":{"cached_tokens":2}}'
CHUNK = 'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":['
PART = 'data: {"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"m","choices":['
DONE = "data: [DONE]\n\n"


def _request(task: str, **fields: object) -> ValidRequest:
    return ValidRequest(
        request_id="r1",
        task=task,
        model="m",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=None if task == "embeddings" else Sampling(max_tokens=9),
        created=1700000000,
        **fields,
    )


@pytest.mark.parametrize(
    ("dialect", "task", "expected"),
    [
        ("openai", "completions", TEXT + DETAILS + "}"),
        ("openai", "embeddings", "{" + EMBEDDED),
        ("databricks", "chat", CHAT + COUNTS + "}"),
        ("mlflow", "chat", CHAT + DETAILS + "}"),
        ("mlflow", "completions", TEXT + DETAILS + "}"),
        ("mlflow", "embeddings", '{"id":"embd-r1",' + EMBEDDED),
    ],
)
def test_whole(dialect: str, task: str, expected: str) -> None:
    """The body of a whole reply equals the snapshot."""
    reply = VECTORS if task == "embeddings" else REPLY
    assert DIALECTS[dialect].encode(_request(task), reply).body == expected.encode()


def test_vectors_as_base64() -> None:
    """An embedding in base64 is little-endian float32, as OpenAI's client asks for it."""
    body = DIALECTS["openai"].encode(_request("embeddings", encoding_format="base64"), VECTORS).body
    assert body == ("{" + EMBEDDED.replace("[0.5,-1.0]", '"AAAAPwAAgL8="')).encode()


@pytest.mark.parametrize(
    ("dialect", "task", "usage"),
    [
        ("openai", "completions", ""),
        ("databricks", "completions", COUNTS),
        ("mlflow", "chat", DETAILS),
        ("mlflow", "completions", DETAILS),
    ],
)
def test_streamed(dialect: str, task: str, usage: str) -> None:
    """Every event of a streamed reply equals the snapshot, with usage in the last chunk of Databricks' and MLflow's
    routes.
    """
    null = '"logprobs":null,"finish_reason":null}]}\n\n'
    if task == "chat":
        expected = f'{CHUNK}{{"index":0,"delta":{{"role":"assistant","content":"H"}},{null}'
        expected += f'{CHUNK}{{"index":0,"delta":{{"content":"é"}},{null}'
        expected += f'{CHUNK}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}]'
    else:
        expected = f'{PART}{{"index":0,"text":"H",{null}{PART}{{"index":0,"text":"é",{null}'
        expected += f'{PART}{{"index":0,"text":"","logprobs":null,"finish_reason":"length"}}]'
    expected += (f',"usage":{usage}' if usage else "") + "}\n\n" + DONE
    encoder = DIALECTS[dialect].stream(_request(task))
    assert b"".join(map(encoder.encode, PIECES)).decode() == expected


def test_completions_stream_with_usage() -> None:
    """include_usage on a text completion: null in each chunk, and a last one without choices."""
    encoder = DIALECTS["openai"].stream(_request("completions", usage_chunks="last"))
    found = b"".join(map(encoder.encode, PIECES)).decode().split("\n\n")
    assert [event.endswith(',"usage":null}') for event in found[:3]] == [True] * 3
    assert found[3:] == [f'{PART}],"usage":{DETAILS}}}', "data: [DONE]", ""]


REPORTED = "temperature: -1 is not allowed; expected a number in [0, 2]"


@pytest.mark.parametrize(
    ("dialect", "error", "expected"),
    [
        ("mlflow", InvalidField("temperature", -1, "a number in [0, 2]"), ("INVALID_PARAMETER_VALUE", REPORTED)),
        ("mlflow", NotFound("nobody", param="model"), ("RESOURCE_DOES_NOT_EXIST", "nobody")),
        ("mlflow", DeadlineExceeded("late"), ("DEADLINE_EXCEEDED", "late")),
        ("databricks", InvalidField("temperature", -1, "a number in [0, 2]"), ("INVALID_PARAMETER_VALUE", REPORTED)),
        ("databricks", DeadlineExceeded("late"), ("INTERNAL_ERROR", "late")),
    ],
)
def test_error_body(dialect: str, error: Exception, expected: tuple[str, str]) -> None:
    """An error before anything was streamed is these two keys."""
    answer = error_answer(DIALECTS[dialect], error)
    assert (answer.status, answer.content_type) == (error.status, "application/json")
    assert answer.body == f'{{"error_code": "{expected[0]}", "message": "{expected[1]}"}}'.encode()


@pytest.mark.parametrize("dialect", ["databricks", "mlflow"])
def test_streamed_error(dialect: str) -> None:
    """An error within a stream has OpenAI's object beside the two keys, and [DONE] after it."""
    code = {"databricks": "INTERNAL_ERROR", "mlflow": "DEADLINE_EXCEEDED"}[dialect]
    assert DIALECTS[dialect].stream(_request("chat")).error(DeadlineExceeded("late")).decode() == (
        'data: {"error":{"message":"late","type":"server_error","param":null,"code":"timeout"},'
        f'"error_code":"{code}","message":"late"}}\n\n{DONE}'
    )


@pytest.mark.parametrize("dialect", ["databricks", "mlflow", "openai"])
def test_model_names_the_adapter(dialect: str) -> None:
    """A reply's model is ``endpoint:adapter`` where an adapter answers, once, whichever way it was asked for."""
    codec = DIALECTS[dialect]
    for name in ("m", "m:pirate"):
        chat, vectors = (_request(task, adapter="pirate") for task in ("chat", "embeddings"))
        chat, vectors = (msgspec.structs.replace(r, model=name) for r in (chat, vectors))
        first = codec.stream(chat).encode(PIECES[0])
        bodies = [codec.written(chat, REPLY), codec.written(vectors, VECTORS), json.loads(first[6:])]
        assert [body["model"] for body in bodies] == ["m:pirate"] * 3
