"""Triton's generate in MindIE's form: what is taken and refused, and events as its document prints them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from mindie_examples import GENERATE

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidField,
    Overloaded,
    PayloadTooLarge,
)
from mlflow_llm.serving.interface.reply import Choice, Delta, Done, Ended, Reply, Step, Usage
from mlflow_llm.serving.interface.request import RawCompletion, ReplyForm, Sampling, Sequence, ValidRequest

GENERATED = DIALECTS["generate"]
ROUTES = {route.path.removeprefix("/v2/models/<name>"): route for route in GENERATED.routes}


def read(body: dict[str, Any], path: str = "/generate", **variables: str) -> RawCompletion:
    raw = GENERATED.decode(Head(ROUTES[path], {}, variables), json.dumps(body).encode())
    assert isinstance(raw, RawCompletion)
    return raw


def with_parameter(name: str, value: Any) -> dict[str, Any]:
    return {"text_input": "x", "parameters": {name: value}}


def test_the_documents_request_is_taken() -> None:
    """The documented request is accepted as printed, and its prompt is passed to the model unchanged."""
    raw = read(GENERATE, "/generate_stream")
    sampling = raw.sampling
    assert (raw.prompts, raw.use_raw_prompt, raw.stream, raw.timings) == ((GENERATE["text_input"],), True, True, True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (1.0, 10, 0.99, 0.5)
    assert (sampling.max_tokens, sampling.clip_max_tokens, sampling.seed) == (200, None, 123)
    jsonschema.validate(GENERATE, GENERATED.request_schemas["completions"])


def test_defaults() -> None:
    """The defaults are twenty tokens, or the rest of the context, greedy and without timings."""
    raw = read({"text_input": "x"})
    assert (raw.sampling.temperature, raw.sampling.max_tokens, raw.sampling.clip_max_tokens) == (0.0, 20, True)
    assert (raw.stream, raw.timings) == (False, False)
    assert read({"text_input": "x", "parameters": None, "id": None}) == raw
    assert read(with_parameter("temperature", 0.7)).sampling.temperature == 0.0  # without do_sample


@pytest.mark.parametrize(
    ("name", "taken", "not_taken"),
    [
        ("details", [True, False], ["true", 1]),
        ("do_sample", [True, False], [0]),
        ("max_new_tokens", [1, 2147483647], [0, -1, 2147483648, "5"]),
        ("repetition_penalty", [0.01, 1, 2.5], [0, -1]),
        ("seed", [1, 18446744073709551615], [0, -1, 18446744073709551616]),
        ("temperature", [0.001, 1, 5], [0, -1]),
        ("top_k", [0, 2147483647], [-1, 2147483648]),
        ("top_p", [0.01, 1], [0, 1.1, -1]),
        ("batch_size", [1, 100], [0, -1, 1.5]),
        ("typical_p", [0.5, 1], [-1, 0, 1.1]),
        ("watermark", [False], [True, "no"]),
        ("perf_stat", [True, False], [0]),
        ("stop", [], [["a"]]),
    ],
)
def test_bounds(name: str, taken: list[Any], not_taken: list[Any]) -> None:
    """Each parameter is accepted within the documented bounds only, or as null; the schema agrees."""
    schema = GENERATED.request_schemas["completions"]
    for value in [*taken, *([None] if name != "stop" else [])]:
        read(with_parameter(name, value))
        jsonschema.validate(with_parameter(name, value), schema)
    for value in not_taken:
        with pytest.raises(InvalidField, match=rf"^parameters\.{name}: "):
            read(with_parameter(name, value))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(with_parameter(name, value), schema)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text_input": ""},
        {"text_input": None},
        {"text_input": ["x"]},
        {"text_input": "x" * (512 * 2**10 + 1)},
        {"text_input": "x", "id": ""},
        {"text_input": "x", "id": "a b"},
        {"text_input": "x", "id": "a" * 257},
        {"text_input": "x", "id": 5},
        {"text_input": "x", "parameters": []},
        {"text_input": "x", "colour": 1},
    ],
)
def test_bodies_that_are_refused(body: dict[str, Any]) -> None:
    """An invalid body is refused with the name of the field."""
    with pytest.raises(InvalidField, match=r"^(text_input|id|parameters|colour): "):
        read(body)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, GENERATED.request_schemas["completions"])


def test_the_longest_text() -> None:
    """A text of 524,288 characters and an id of 256 are accepted."""
    assert len(read({"text_input": "字" * 512 * 2**10, "id": "a" * 256}).prompts[0]) == 512 * 2**10


def request(**fields: Any) -> ValidRequest:
    return ValidRequest(
        request_id="drawn",
        task="completions",
        model="llama_65b",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=9),
        **fields,
    )


STEPS = tuple(
    Step(index=0, waited=us / 10**6, elapsed=ms / 1000, batch_size=size)
    for us, ms, size in ((10, 200, 1), (11, 56, 2), (9, 28, 1))
)
PIECES = (
    STEPS[0],
    Delta(index=0, text="am", num_tokens=1),
    STEPS[1],
    Delta(index=0, text=" passion", num_tokens=1),
    STEPS[2],
    Delta(index=0, text="", num_tokens=1),
    Ended(index=0, finish_reason="stop"),
    Done(usage=Usage(prompt_tokens=5, completion_tokens=3)),
)
HEAD = 'data:{"id":"a123","model_name":"llama_65b","model_version":null,"text_output":'
NO_COSTS = '"first_token_cost":null,"decode_cost":null'


def streamed(body: dict[str, Any], form: ReplyForm, *pieces: Any, **variables: str) -> str:
    encoder = GENERATED.stream(request(form=form), read(body, **variables).echoed)
    assert encoder.content_type == "text/event-stream"
    return b"".join(map(encoder.encode, pieces)).decode()


def test_events() -> None:
    """Events have no space after the colon, the documented key order and no [DONE]; the last has all waits' sum."""
    expected = (
        HEAD + f'"am","details":{{"generated_tokens":1,{NO_COSTS},"batch_size":1,"queue_wait_time":10}}}}\n\n',
        HEAD + f'" passion","details":{{"generated_tokens":2,{NO_COSTS},"batch_size":2,"queue_wait_time":11}}}}\n\n',
        HEAD + f'"","details":{{"finish_reason":"eos_token","generated_tokens":3,{NO_COSTS},'
        '"batch_size":1,"queue_wait_time":30}}\n\n',
    )
    assert streamed(GENERATE, ReplyForm(), *PIECES) == "".join(expected)


def test_events_of_the_current_profile() -> None:
    """The current profile has times in place of the documented nulls, and its last event shows the end."""
    found = streamed(GENERATE, ReplyForm(times=True, end_text=True), *PIECES).split("\n\n")
    costs = [json.loads(line[5:])["details"] for line in found if line]
    assert [one["first_token_cost"] for one in costs] == [200.0] * 3
    assert [one["decode_cost"] for one in costs] == [0.0, 56.0, 84.0]
    assert json.loads(found[2][5:])["text_output"] == "</s>"


def test_events_without_details() -> None:
    """Events without details are the text alone; perf_stat adds the time of each step to the last one."""
    body = {"text_input": "x", "id": "a123", "parameters": {"perf_stat": True}}
    last = (
        '"","perf_stat":{"prefill_time":200.0,"decode_time_arr":[56.0,28.0],"batch_size":[1,2,1],'
        '"queue_wait_time":[10,11,9]}}\n\n'
    )
    assert streamed(body, ReplyForm(), *PIECES) == "".join((HEAD + '"am"}\n\n', HEAD + '" passion"}\n\n', HEAD + last))


def test_a_drawn_id_and_a_version() -> None:
    """A reply has an id of its own if the request has none, and the version of the path."""
    raw = read({"text_input": "x"}, "/versions/<model_version>/generate", model_version="3")
    choice = Choice(index=0, text="am", finish_reason="length")
    body = GENERATED.encode(request(), Reply(choices=(choice,), usage=Usage(prompt_tokens=5)), raw.echoed).body
    assert body == b'{"id":"drawn","model_name":"llama_65b","model_version":"3","text_output":"am"}'


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"finish_reason": "stop"}, "eos_token"),
        ({"finish_reason": "stop", "stop_reason": "x"}, "stop_sequence"),
        ({"finish_reason": "stop", "stop_reason": 5}, "stop_sequence"),
        ({"finish_reason": "length"}, "length"),
    ],
)
def test_a_whole_reply(ended: dict[str, Any], reason: str) -> None:
    """A whole reply lists each step's values and the finish reason, with the end token only if the model ended by
    itself.
    """
    choice = Choice(index=0, text="am passion", steps=STEPS, **ended)
    whole = Reply(choices=(choice,), usage=Usage(prompt_tokens=5, completion_tokens=3))
    found = json.loads(GENERATED.encode(request(form=ReplyForm(end_text=True)), whole, read(GENERATE).echoed).body)
    assert list(found) == ["id", "model_name", "model_version", "text_output", "details"]
    assert found["text_output"] == "am passion" + ("</s>" if reason == "eos_token" else "")
    assert found["details"] == {
        "finish_reason": reason,
        "generated_tokens": 3,
        "first_token_cost": None,
        "decode_cost": None,
        "batch_size": [1, 2, 1],
        "queue_wait_time": [10, 11, 9],
    }


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (
            InvalidField("max_tokens", 9, "less"),
            422,
            {"error": "parameters.max_new_tokens: 9 is not allowed; expected less"},
        ),
        (ContextTooLong("prompt: 9 tokens; 5 are allowed", param="prompt"), 422, {"error": "text_input: 9 tokens; 5"}),
        (PayloadTooLarge("too large"), 413, {"error": "too large"}),
        (Overloaded("full"), 503, {"error": "full"}),
        (DeadlineExceeded("late"), 504, {"error": "late"}),
    ],
)
def test_errors(error: Any, status: int, body: dict[str, str]) -> None:
    """Errors have the documented statuses and field names."""
    found = GENERATED.error(error)
    said = json.loads(found.body)
    assert found.status == status
    assert said["error"].startswith(body["error"])
    assert list(said) == ["error", "error_type"]
    streamed = GENERATED.stream(request(), read(GENERATE).echoed).error(error)
    assert streamed.startswith(b'data:{"error":')
