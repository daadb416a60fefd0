"""One wish in the words of several dialects is one valid request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
# what every dialect can say, each in its own words
COMMON = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 900),
        "temperature": st.sampled_from([0.1, 0.5, 1.0]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "seed": st.integers(1, 2**64 - 1),
    },
    optional={"top_k": st.integers(1, 200)},
)
OPENAIS = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.lists(TEXTS, min_size=1, max_size=3, unique=True),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0.1, 1),
        "stop_token_ids": st.lists(st.integers(0, 250), max_size=3, unique=True),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 250).map(str), st.floats(-100, 100), max_size=3),
        "response_format": st.just({"type": "text"}),
        "cache_salt": TEXTS,
        "timeout": st.floats(1, 1000),
    },
)
MESSAGES = st.lists(TEXTS, min_size=1, max_size=5).map(
    lambda said: [
        {"role": "user" if (len(said) - place) % 2 else "assistant", "content": text} for place, text in enumerate(said)
    ]
)
IDS = st.lists(st.integers(0, 250), min_size=1, max_size=20)
SAMPLED = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def view(make: Callable[..., WorkerState]) -> EndpointView:
    (entity,) = make().endpoints
    return entity.view


def valid(
    view: EndpointView, dialect: str, path: str, body: bytes, headers: dict[str, str] | None = None
) -> ValidRequest:
    """Return the engine's request for a body, without the fields that only its reply uses."""
    codec = DIALECTS[dialect]
    route = next(route for route in codec.routes if route.path == path)
    raw = codec.decode(Head(route, headers or {}, {"name": "assistant"}), body)
    found = prepare(raw, view, request_id="r", now=0.0, created=1)
    plain = {
        field.name: field.default
        for field in msgspec.structs.fields(ValidRequest)
        if field.name in ("stream", "usage_chunks", "form", "timings", "index_by_prompt", "model_version", "model")
        and field.default is not msgspec.NODEFAULT
    }
    return msgspec.structs.replace(found, **plain, model="assistant")


def ask(view: EndpointView, dialect: str, path: str, **body: Any) -> ValidRequest:
    return valid(view, dialect, path, json.dumps({"model": "assistant", **body}).encode())


CHATS = (
    ("openai", "/v1/chat/completions"),
    ("databricks", "/serving-endpoints/chat/completions"),
    ("databricks", "/serving-endpoints/<name>/invocations"),
    ("mlflow", "/invocations"),
    ("mindie", "/mindie/v1/chat/completions"),
    ("openvino", "/v3/chat/completions"),
)


@SAMPLED
@given(messages=MESSAGES, common=COMMON, more=OPENAIS)
def test_chats(view: EndpointView, messages: list[Any], common: dict[str, Any], more: dict[str, Any]) -> None:
    """The same chat in OpenAI's, Databricks', MLflow's, MindIE's and OpenVINO's dialects is the same request."""
    more.pop("ignore_eos", None)  # MindIE's, too, but OpenVINO bounds the length by it
    found = [
        ask(view, dialect, path, messages=messages, **{"repetition_penalty": 1.0, "top_k": None, **common, **more})
        for dialect, path in CHATS
    ]
    assert all(one == found[0] for one in found[1:])


@SAMPLED
@given(messages=MESSAGES, common=COMMON, stop=st.lists(st.sampled_from(["a", "bc", "é"]), max_size=2, unique=True))
def test_agents_apis(view: EndpointView, messages: list[Any], common: dict[str, Any], stop: list[str]) -> None:
    """The same chat in OpenAI's Responses, Anthropic's Messages and chat completions is the same request, but for
    seeds.
    """
    chat = ask(view, "openai", "/v1/chat/completions", messages=messages, stop=stop or None, **common)
    maximum = common.pop("max_tokens")
    response = ask(
        view, "responses", "/v1/responses", input=messages, max_output_tokens=maximum, stop=stop or None, **common
    )
    assert response == chat
    common.pop("seed")
    message = ask(
        view, "anthropic", "/v1/messages", messages=messages, max_tokens=maximum, stop_sequences=stop or None, **common
    )
    assert _without_seeds(message) == _without_seeds(chat)


def _without_seeds(request: ValidRequest) -> ValidRequest:
    sequences = tuple(msgspec.structs.replace(one, seed=0) for one in request.sequences)
    return msgspec.structs.replace(request, sequences=sequences)


@SAMPLED
@given(prompt=TEXTS, common=COMMON, more=OPENAIS)
def test_completions(view: EndpointView, prompt: str, common: dict[str, Any], more: dict[str, Any]) -> None:
    """The same completion in four dialects, without a template, is the same request."""
    more.pop("ignore_eos", None)
    asked = {"prompt": prompt, "repetition_penalty": 1.0, "top_k": None, **common, **more}
    first = ask(view, "openai", "/v1/completions", **asked)
    assert ask(view, "databricks", "/serving-endpoints/completions", use_raw_prompt=True, **asked) == first
    assert ask(view, "mlflow", "/invocations", **asked) == first
    assert ask(view, "openvino", "/v3/completions", **asked) == first


@SAMPLED
@given(prompt=TEXTS, common=COMMON, penalty=st.floats(0.1, 2), greedy=st.booleans())
def test_generate(view: EndpointView, prompt: str, common: dict[str, Any], penalty: float, greedy: bool) -> None:
    """``do_sample`` false in MindIE's form of Triton's generate is a temperature of 0."""
    heat = common.pop("temperature")
    maximum = common.pop("max_tokens")
    parameters = {**common, "temperature": heat, "do_sample": not greedy, "max_new_tokens": maximum}
    body = {"text_input": prompt, "parameters": {**parameters, "repetition_penalty": penalty}}
    found = valid(view, "generate", "/v2/models/<name>/generate", json.dumps(body).encode())
    plain = {**common, "temperature": 0 if greedy else heat, "repetition_penalty": penalty, "max_tokens": maximum}
    assert found == ask(view, "openai", "/v1/completions", prompt=prompt, **plain)


@SAMPLED
@given(ids=IDS, common=COMMON, penalty=st.floats(0.125, 2, width=32))
def test_tensors(view: EndpointView, ids: list[int], common: dict[str, Any], penalty: float) -> None:
    """KServe tensors, in JSON or bytes and of either kind, are the completion of the same token ids."""
    bounds = {"temperature": 0.5, "top_p": 0.5, "top_k": common.pop("top_k", 7)}  # exact in float32
    scalars = [
        ("request_output_len", "INT32", common["max_tokens"]),
        ("runtime_top_k", "INT32", bounds["top_k"]),
        ("runtime_top_p", "FP32", bounds["top_p"]),
        ("temperature", "FP32", bounds["temperature"]),
        ("repetition_penalty", "FP32", penalty),
        ("random_seed", "UINT64", common["seed"]),
    ]
    inputs = [{"name": name, "datatype": kind, "shape": [1], "data": [value]} for name, kind, value in scalars]
    prompt = {"name": "input_ids", "datatype": "INT32", "shape": [1, len(ids)]}
    path = "/v2/models/<name>/infer"
    as_json = valid(view, "kserve", path, json.dumps({"inputs": [{**prompt, "data": ids}, *inputs]}).encode())
    data = b"".join(one.to_bytes(4, "little") for one in ids)
    head = json.dumps({"inputs": [{**prompt, "parameters": {"binary_data_size": len(data)}}, *inputs]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    assert valid(view, "kserve", path, head + data, headers) == as_json
    plain = {"max_tokens": common["max_tokens"], "seed": common["seed"], "repetition_penalty": penalty}
    assert as_json == ask(view, "openai", "/v1/completions", prompt=ids, **bounds, **plain)
