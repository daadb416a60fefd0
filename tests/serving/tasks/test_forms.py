"""Constraints on a request's texts: callable tools, and forms that an endpoint can enforce."""

import dataclasses

import msgspec
import pytest
from tool_probes import ALLOWED, CUSTOM, FORM, NAMED, NAMED_CUSTOM, TOOL

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.dialects.fields.defaults import defaults_of
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import ToolChoice, ToolUse
from mlflow_llm.serving.structured.grammar import grammar_of
from mlflow_llm.serving.tasks.chat import tool_use
from mlflow_llm.serving.tasks.prepare import prepare

HI = [{"role": "user", "content": "hello world"}]
TOOLS = [TOOL, CUSTOM]
TYPES = {"find": {"a": ("integer",)}, "run": {"input": ("string",)}}


def _use(**fields):
    return tool_use(DIALECTS["openai"].read({"messages": HI, **fields}))


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        (None, ("find", "run"), ToolChoice(mode="auto")),
        ("auto", ("find", "run"), ToolChoice(mode="auto")),
        ("required", ("find", "run"), ToolChoice(mode="required")),
        (NAMED, ("find",), ToolChoice(mode="required", names=("find",), named=True)),
        (NAMED_CUSTOM, ("run",), ToolChoice(mode="required", names=("run",), named=True)),
        (ALLOWED, ("find",), ToolChoice(mode="auto", names=("find",))),
    ],
)
def test_tools_that_may_be_called(choice, names, expected):
    """All tools, the named one or the subset may be called; with tools and no choice it is auto."""
    found = _use(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert found == ToolUse(
        names=names,
        custom=tuple(name for name in names if name == "run"),
        types={name: TYPES[name] for name in names},
        choice=expected,
        parallel=False,
    )
    assert _use(tools=TOOLS, tool_choice=choice).parallel


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}]
)
def test_no_tool_may_be_called(fields):
    """Without tools, or with the choice none, no tool may be called."""
    assert _use(**fields) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "none or auto: the request has no tools"),
        ({"tool_choice": "required", "tools": []}, "none or auto"),
        ({"tool_choice": NAMED}, "one of the request's tools: none"),
        ({"tool_choice": NAMED_CUSTOM, "tools": [TOOL]}, "one of the request's tools: find"),
        ({"tool_choice": ALLOWED, "tools": [CUSTOM]}, "one of the request's tools: run"),
    ],
)
def test_choices_of_no_tool_are_refused(fields, words):
    """A choice that matches no tool of the request is refused."""
    with pytest.raises(InvalidField, match=words) as caught:
        _use(**fields)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
@pytest.mark.parametrize("content", [{"messages": HI}, {"prompt": "x"}], ids=["chat", "completions"])
def test_an_engine_without_structured_output_refuses_constraints(endpoint, content, fields, param):
    """An engine without structured output refuses a constraint by its field, but accepts type text."""
    info = endpoint.info
    plain = msgspec.structs.replace(
        info, capabilities=msgspec.structs.replace(info.capabilities, structured_output=False)
    )
    view = dataclasses.replace(endpoint, info=plain)
    with pytest.raises(InvalidField, match="structured output is not supported by this endpoint's engine") as caught:
        prepare(DIALECTS["mlflow"].read({**content, **fields}), view)
    assert caught.value.param == param
    text = {"response_format": {"type": "text"}}
    assert prepare(DIALECTS["mlflow"].read({**content, **text}), view).sampling.grammar is None


def test_text_overrides_the_form_that_a_model_was_logged_with(endpoint):
    """A request for text overrides the constraint that a model was logged with."""
    view = dataclasses.replace(endpoint, defaults=defaults_of({"response_format": {"type": "json_object"}}))
    asked = {"messages": HI, "response_format": {"type": "text"}}
    assert prepare(DIALECTS["mlflow"].read(asked), view).sampling.grammar is None


@pytest.fixture
def holding(endpoint):
    """Return an endpoint whose engine supports grammars."""
    capabilities = msgspec.structs.replace(endpoint.info.capabilities, structured_output=True)
    return dataclasses.replace(endpoint, info=msgspec.structs.replace(endpoint.info, capabilities=capabilities))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": FORM},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"grammar": 'start: "a"'}},
    ],
)
@pytest.mark.parametrize("content", [{"messages": HI}, {"prompt": "x"}], ids=["chat", "completions"])
def test_forms_become_grammars(holding, content, fields):
    """Each choice gets the grammar of the request's constraint, whichever field sets it, beside all other fields."""
    more = {"n": 2, "stop": ["x"], "ignore_eos": True, "min_tokens": 2, "logprobs": 1 if "prompt" in content else True}
    if "prompt" in content:
        more |= {"echo": True, "suffix": "!"}
    raw = DIALECTS["mlflow"].read({**content, **fields, **more})
    assert prepare(raw, holding).sampling.grammar == grammar_of(raw.sampling.constraint)
    assert prepare(DIALECTS["mlflow"].read({**content, **more}), holding).sampling.grammar is None


def test_a_form_that_a_model_was_logged_with(holding):
    """A logged constraint applies if the request has none, and is replaced by any other."""
    view = dataclasses.replace(holding, defaults=defaults_of({"response_format": FORM}))
    logged = prepare(DIALECTS["mlflow"].read({"messages": HI}), view).sampling.grammar
    assert logged.field == "response_format.json_schema.schema"
    asked = DIALECTS["mlflow"].read({"messages": HI, "guided_regex": "a"})
    assert prepare(asked, view).sampling.grammar == grammar_of(asked.sampling.constraint)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {**FORM, "json_schema": {"name": "a", "schema": {"type": "float"}}}},
            "response_format.json_schema.schema",
            "type",
        ),
        ({"guided_json": {"properties": {"a": {"x-guidance": {}}}}}, "guided_json", "x-guidance"),
        ({"guided_regex": "("}, "guided_regex", ""),
    ],
)
def test_invalid_constraints_are_refused(holding, fields, param, words):
    """An invalid schema, expression or grammar is refused with its field, before it reaches an engine."""
    with pytest.raises(InvalidField) as caught:
        prepare(DIALECTS["mlflow"].read({"messages": HI, **fields}), holding)
    assert caught.value.param.startswith(param)
    assert words in caught.value.message
