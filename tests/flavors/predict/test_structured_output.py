"""Structured output by the object API and by ``predict``, and as a default that a model is logged with."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import mlflow
import pandas as pd
import pytest
from flavor_models import tiny_llama
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
NO_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}
FIELDS = {"max_tokens": 64, "temperature": 1, "seed": 3}


def _is_person(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.fixture(scope="module")
def path(tokenizer, tmp_path_factory):
    """Save a tiny model with a response format of its own, and with room for tools in its prompts."""
    root = tmp_path_factory.mktemp("m")
    tiny_llama(max_position_embeddings=2048).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    llm.save_model(root / "m", root / "llama", defaults={"response_format": FORMAT})
    return str(root / "m")


@pytest.fixture(scope="module")
def model(path):
    with llm.load_model(path, in_process=True, threads=1) as loaded:
        yield loaded


def test_answers_follow_their_schema(model):
    """Answers follow the requested schema or the model's own; a request may ask for free text."""
    assert _is_person(model.chat("Who?", response_format=FORMAT, **FIELDS).text)
    assert _is_person(model.chat("Who?", **FIELDS).text)
    assert model.chat("Who?", guided_choice=["yes", "no"], **FIELDS).text in ("yes", "no")
    assert model.complete("x", guided_regex="[ab]{3}", **FIELDS).text.strip("ab") == ""
    plain = model.chat("Who?", response_format={"type": "text"}, **FIELDS).text
    with pytest.raises((json.JSONDecodeError, jsonschema.ValidationError)):
        _is_person(plain)


def test_streams_follow_their_schema(model):
    """Streamed text of threads and of coroutines equals the whole answer and follows its schema."""
    stream = model.chat("Who?", stream=True, **FIELDS)
    assert _is_person("".join(stream))
    assert (stream.tool_calls, stream.reasoning, stream.finish_reason) == ((), "", "stop")

    async def ask():
        answer = await model.aio.chat("Who?", **FIELDS)
        return answer.text, "".join([part async for part in await model.aio.chat("Who?", stream=True, **FIELDS)])

    assert asyncio.run(ask()) == (stream.text, stream.text)


TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CALLING = {**FIELDS, "max_tokens": 128, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def test_answers_have_calls(model):
    """A tool call comes beside the text, whole and streamed, and can be sent back as a message."""
    answer = model.chat("Who?", **CALLING)
    (call,) = answer.tool_calls
    assert (answer.text, answer.finish_reason, call.name) == ("", "tool_calls", "find")
    assert _is_person(call.arguments)
    assert f"find({call.arguments})" in repr(answer)
    stream = model.chat("Who?", stream=True, **CALLING)
    assert "".join(stream) == ""
    assert [(made.name, made.arguments) for made in stream.tool_calls] == [("find", call.arguments)]
    turns = [{"role": "user", "content": "Who?"}, answer.message]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "ann"})
    assert model.chat(turns, **{**CALLING, "tool_choice": "none"}).tool_calls == ()

    async def ask():
        return await model.aio.chat("Who?", **CALLING)

    assert asyncio.run(ask()).tool_calls[0].arguments == call.arguments


def test_predict_takes_tools(path):
    """Tools are taken from a request and from columns of a frame; an invalid tool is refused by its place."""
    with llm.closing(mlflow.pyfunc.load_model(path, model_config={"in_process": True, "threads": 1})) as model:
        asked = {"messages": [{"role": "user", "content": "Who?"}], **CALLING}
        rows = [
            model.predict(asked),
            *model.predict(pd.DataFrame([asked, {**asked, "tools": None, "tool_choice": None}])),
        ]
        messages = [row["choices"][0]["message"] for row in rows]
        assert all(_is_person(message["tool_calls"][0]["function"]["arguments"]) for message in messages[:2])
        assert "tool_calls" not in messages[2]
        with pytest.raises(MlflowException, match=r"tools\[0\]\.function\.name"):
            model.predict({**asked, "tools": [{"type": "function", "function": {"name": "a b"}}]})


def test_predict_takes_response_formats(path):
    """A response format is taken from a request, from a column of a frame, and as a param for all rows."""
    with llm.closing(mlflow.pyfunc.load_model(path, model_config={"in_process": True, "threads": 1})) as model:
        messages = [{"role": "user", "content": "Who?"}]
        text = {"type": "text"}
        asked = {"messages": messages, **FIELDS, "response_format": FORMAT}
        assert _is_person(model.predict(asked)["choices"][0]["message"]["content"])
        frame = pd.DataFrame([asked, {**asked, "guided_choice": ["a"], "response_format": None}])
        replies = model.predict(frame)
        assert _is_person(replies[0]["choices"][0]["message"]["content"])
        assert replies[1]["choices"][0]["message"]["content"] == "a"
        params = {"response_format": {"type": "json_object"}, "guided_regex": None}
        found = model.predict([{"messages": messages, **FIELDS}, {**asked, "response_format": text}], params=params)
        assert found[0]["choices"][0]["message"]["content"].startswith("{")
        chunks = list(model.predict_stream(asked))
        assert _is_person("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
        with pytest.raises(MlflowException, match=r"response_format\.json_schema\.schema"):
            model.predict({**asked, "response_format": NO_FORM})


@pytest.mark.parametrize(
    ("defaults", "reported"),
    [
        ({"response_format": {"type": "xml"}}, r"response_format\.type"),
        ({"response_format": NO_FORM}, "type"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_invalid_formats_and_tools_are_refused_when_logging(tmp_path, llama_dir, defaults, reported):
    """An invalid response format, two of them, and tools, which belong to requests, are refused when logging."""
    with pytest.raises(MlflowException, match=reported):
        llm.save_model(tmp_path / "m", llama_dir, defaults=defaults)
