"""Structured output through the object API and through ``predict``, and what a model may be logged with."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import mlflow
import pandas as pd
import pytest
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
def path(llama_dir, tmp_path_factory):
    """A tiny model that was logged with a form of its own."""
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir, defaults={"response_format": FORMAT})
    return str(path)


@pytest.fixture(scope="module")
def model(path):
    with llm.load_model(path, in_process=True, threads=1) as loaded:
        yield loaded


def test_answers_have_the_form(model):
    """Asked for, or the model's own; text of any form where the request says so."""
    assert _is_person(model.chat("Who?", response_format=FORMAT, **FIELDS).text)
    assert _is_person(model.chat("Who?", **FIELDS).text)
    assert model.chat("Who?", guided_choice=["yes", "no"], **FIELDS).text in ("yes", "no")
    assert model.complete("x", guided_regex="[ab]{3}", **FIELDS).text.strip("ab") == ""
    plain = model.chat("Who?", response_format={"type": "text"}, **FIELDS).text
    with pytest.raises((json.JSONDecodeError, jsonschema.ValidationError)):
        _is_person(plain)


def test_streams_have_the_form(model):
    """What a stream gives, of threads and of coroutines, is the text of the whole answer."""
    stream = model.chat("Who?", stream=True, **FIELDS)
    assert _is_person("".join(stream))
    assert (stream.tool_calls, stream.reasoning, stream.finish_reason) == ((), "", "stop")

    async def ask():
        answer = await model.aio.chat("Who?", **FIELDS)
        return answer.text, "".join([part async for part in await model.aio.chat("Who?", stream=True, **FIELDS)])

    assert asyncio.run(ask()) == (stream.text, stream.text)


def test_predict_takes_forms(path):
    """In a request, in a column of a frame, and as a parameter for all rows."""
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
def test_what_no_model_is_logged_with(tmp_path, llama_dir, defaults, reported):
    """A form that is none, two forms, and tools, which are for who calls them."""
    with pytest.raises(MlflowException, match=reported):
        llm.save_model(tmp_path / "m", llama_dir, defaults=defaults)
