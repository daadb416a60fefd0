"""The table of formats, as data."""

import msgspec
import pytest

from mlflow_llm.serving.interface.tool_format import ToolFormat
from mlflow_llm.serving.tool_calls.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_json(name):
    """A format survives its JSON form, which omits defaults."""
    data = msgspec.json.encode(FORMATS[name])
    assert msgspec.json.decode(data, type=ToolFormat) == FORMATS[name]
    assert b"null" not in data


def test_unknown_fields_are_refused():
    """A misspelt field of an override is an error, not ignored."""
    with pytest.raises(msgspec.ValidationError, match="seperator"):
        msgspec.convert({"name": "own", "layout": "object", "seperator": "\n"}, ToolFormat)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_say_where_arguments_end(name):
    """A format has the literals that its layout and its arguments need."""
    each = FORMATS[name]
    if each.layout != "object":
        assert each.name_end
    if each.arguments == "parameters":
        assert all((each.parameter_begin, each.key_end, each.value_end, each.call_end))
    if each.arguments == "keywords":
        assert each.call_end.startswith(")")
