"""The requests whose replies have a grammar for their calls."""

import msgspec
import pytest

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Message, RawChat, RawSampling, Tool, ToolChoice
from mlflow_llm.serving.tasks.grammar_request import NO_GRAMMARS
from mlflow_llm.serving.tasks.prepare import prepare

ASKED = (Message(role="user", content="Rome?"),)
NOW = Tool(name="now")
STRICT = Tool(name="f", strict=True, parameters={"type": "object", "properties": {}})
SYNTAX = Constraint(kind="regex", value="[0-9]+", field="tools[0].custom.format.grammar.definition")
HELD = [
    ({"tools": (NOW,), "tool_choice": ToolChoice(mode="required")}, "tool_choice"),
    ({"tools": (NOW, STRICT), "tool_choice": ToolChoice(mode="auto", names=("now",))}, "tool_choice"),
    ({"tools": (NOW,), "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": (NOW, STRICT)}, "tools[1].function.strict"),
    ({"tools": (Tool(name="run", kind="custom", syntax=SYNTAX),)}, SYNTAX.field),
]


def _grammar(endpoint, **fields):
    return prepare(RawChat(messages=ASKED, **fields), endpoint).sampling.grammar


@pytest.mark.parametrize(("fields", "param"), HELD)
def test_calls_that_are_held_to_something(endpoint_of, fields, param):
    """Forced, strict, single and subset calls have a grammar; an engine without grammars refuses them by the field."""
    endpoint = endpoint_of(context=4096)
    assert "lark_grammar" in _grammar(endpoint, **fields).source
    info = endpoint.info
    without = msgspec.structs.replace(
        info, capabilities=msgspec.structs.replace(info.capabilities, structured_output=False)
    )
    endpoint = type(endpoint)(name="m", info=without, text=endpoint.text)
    with pytest.raises(InvalidField, match=NO_GRAMMARS[:40]) as caught:
        _grammar(endpoint, **fields)
    assert caught.value.param == param


def test_calls_that_are_not(endpoint_of):
    """Unconstrained tools, in any number and order, have no grammar, nor do tools that may not be called."""
    endpoint = endpoint_of(context=4096)
    assert _grammar(endpoint, tools=(NOW,)) is None
    assert _grammar(endpoint, tools=(STRICT,), tool_choice=ToolChoice(mode="none")) is None
    assert _grammar(endpoint) is None


def test_a_form_beside_calls(endpoint_of, text_of):
    """response_format with tools gives one grammar of both, after the reasoning if the model reasons."""
    form = Constraint(kind="regex", value="[a-z]+", field="structured_outputs.regex")
    sampling = RawSampling(constraint=form)
    both = _grammar(endpoint_of(context=4096), tools=(NOW,), sampling=sampling)
    assert "[a-z]+" in both.source
    assert "now" in both.source
    alone = _grammar(endpoint_of(context=4096), sampling=sampling)
    assert "now" not in alone.source
    thinks = endpoint_of(model=text_of("{# </think> #}{{ messages[0].content }}"), context=4096)
    assert "</think>" in _grammar(thinks, sampling=sampling).source.replace("\\\\", "")
