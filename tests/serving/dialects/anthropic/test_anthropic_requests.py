"""Bodies of the Messages API, as the raw request that is made of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probes import ANY, bounds

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.dialects.anthropic.requests import (
    BODY,
    COUNT_BODY,
    VERSION_HEADER,
    read_count_request,
    read_message_request,
)
from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.request import Message, RawChat, TextPart, Tool, ToolCall, ToolChoice

HI = [{"role": "user", "content": "hi"}]
MIN_BODY = {"model": "m", "max_tokens": 9, "messages": HI}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = {"type": "image", "source": SOURCE}


def read(**fields: Any) -> RawChat:
    return read_message_request(MIN_BODY | fields)


def refused(**fields: Any) -> InvalidField:
    with pytest.raises(InvalidField) as found:
        read_message_request({name: value for name, value in (MIN_BODY | fields).items() if value != "left out"})
    return found.value


def turns(*given: tuple[str, Any]) -> tuple[Message, ...]:
    return read(messages=[{"role": role, "content": content} for role, content in given]).messages


def test_a_user_has_256_characters_at_most() -> None:
    """A user of 256 characters is taken, as in the document; a longer one is refused by the field's name."""
    assert read(metadata={"user_id": "u" * 256}).labels == Labels(user="u" * 256)
    assert refused(metadata={"user_id": "u" * 257}).param == "metadata.user_id"


def test_what_a_message_asks() -> None:
    """Sampling fields, the end user's id and the stream flag reach the raw request."""
    raw = read(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["a", "b"],
        stream=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        speed="standard",
        cache_control={"type": "ephemeral"},
    )
    asked = raw.sampling
    assert (raw.model, raw.stream, raw.labels, raw.end) == ("m", True, Labels(user="u"), "generation_prompt")
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (9, 0.5, 0.9, 40)
    assert (asked.stop, asked.constraint) == (("a", "b"), None)
    assert (raw.tools, raw.tool_choice, raw.parallel_tool_calls, raw.thinking) == (None, None, None, None)


def test_null_is_the_default() -> None:
    """A null says no more than a field that is left out, wherever the body has a default."""
    nulls = dict.fromkeys(name for name in BODY.schema["properties"] if name not in MIN_BODY)
    assert read(**nulls) == read()


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_required_fields(name: str) -> None:
    """A missing required field is refused by name; max_tokens is not required for counting."""
    assert refused(**{name: "left out"}).param == name
    if name == "max_tokens":
        assert read_count_request({"model": "m", "messages": HI}).sampling.max_tokens is None


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be brief", "be brief"),
        ([{"type": "text", "text": "be "}, {"type": "text", "text": "brief", **CACHED}], ("be ", "brief")),
        ("", None),
        ([], None),
    ],
)
def test_system(system: Any, expected: Any) -> None:
    """The system prompt, a string or text blocks, precedes all messages; cache breakpoints are ignored as hints."""
    first = read(system=system).messages[0]
    parts = tuple(map(TextPart, expected)) if isinstance(expected, tuple) else expected
    assert (first.content if first.role == "system" else None) == parts


def test_a_billing_header_is_not_shown_to_the_model() -> None:
    """Claude Code's first block, which changes between requests, is dropped, and only that block."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.b6f; cc_entrypoint=cli; cch=0ab;"}
    prompt = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    told = Message(role="system", content=(TextPart("You are an agent."),))
    fields = {"model": "m", "messages": HI, "system": [header, prompt]}
    assert read(system=[header, prompt]).messages[0] == told
    assert read_count_request(fields).messages[0] == told
    assert [message.role for message in read(system=[header]).messages] == ["user"]
    for kept in ([prompt, header], [{"type": "text", "text": header["text"] + "\nBe brief."}]):
        content = tuple(TextPart(block["text"]) for block in kept)
        assert read(system=kept).messages[0] == Message(role="system", content=content)
    assert read(system=header["text"]).messages[0].content == header["text"]


def test_a_round_of_tools() -> None:
    """Thinking, text and calls become one message; each tool result becomes a message before the user's text."""
    assert turns(
        ("user", "is it raining?"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "I look it up.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "One moment."},
                {**CALL, "caller": {"type": "direct"}},
                {**CALL, "id": "toolu_2", **CACHED},
            ],
        ),
        (
            "user",
            [
                {**RESULT, "tool_use_id": "toolu_2", "is_error": True},
                {**RESULT, "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]},
                {"type": "text", "text": "and now?"},
            ],
        ),
    ) == (
        Message(role="user", content="is it raining?"),
        Message(
            role="assistant",
            content="One moment.",
            reasoning_content="I look it up.",
            tool_calls=(
                ToolCall(id="toolu_1", name="weather", arguments={"city": "Oslo"}),
                ToolCall(id="toolu_2", name="weather", arguments={"city": "Oslo"}),
            ),
        ),
        Message(role="tool", content="Error: rain", tool_call_id="toolu_2"),
        Message(role="tool", content=(TextPart("ra"), TextPart("in")), tool_call_id="toolu_1"),
        Message(role="user", content="and now?"),
    )


def test_turns_of_one_role_are_one() -> None:
    """Consecutive turns of one role are joined with an empty line between texts; tool results may come in several
    messages.
    """
    assert turns(("user", "a"), ("user", [{"type": "text", "text": "b"}]), ("user", "c")) == (
        Message(role="user", content=tuple(map(TextPart, ("a", "\n\n", "b", "\n\n", "c")))),
    )
    found = turns(
        ("user", "a"),
        ("assistant", [CALL, {**CALL, "id": "toolu_2"}]),
        ("user", [RESULT]),
        ("user", [{**RESULT, "tool_use_id": "toolu_2"}]),
    )
    assert [message.role for message in found] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([("user", "a"), ("assistant", [CALL]), ("user", "b")], "messages[2]"),
        ([("user", "a"), ("assistant", [CALL])], "messages"),
        ([("user", "a"), ("assistant", [CALL]), ("system", "b"), ("user", [RESULT])], "messages[2]"),
        ([("user", [RESULT])], "messages[0].content[0].tool_use_id"),
        ([("user", "a"), ("assistant", [CALL]), ("user", [RESULT, RESULT])], "messages[2].content[1].tool_use_id"),
        (
            [("user", "a"), ("assistant", [CALL]), ("user", [{"type": "text", "text": "b"}, RESULT])],
            "messages[2].content[1].type",
        ),
        ([("user", "a"), ("assistant", [CALL, CALL]), ("user", [RESULT])], "messages[1].content[1].id"),
        ([("user", [])], "messages[0].content"),
        ([("user", [CALL])], "messages[0].content[0].type"),
        ([("assistant", [RESULT])], "messages[0].content[0].type"),
        ([("user", [{"type": "image", "source": {}}])], "messages[0].content[0].source.type"),
        ([("user", "a"), ("assistant", [IMAGE])], "messages[1].content[0].type"),
        ([("system", [IMAGE]), ("user", "a")], "messages[0].content[0].type"),
        ([("user", "a"), ("assistant", [CALL]), ("user", [IMAGE, RESULT])], "messages[2].content[1].type"),
        ([("user", [{"type": "document", "source": {}}])], "messages[0].content[0].type"),
        ([("user", "a"), ("assistant", [{"type": "server_tool_use"}])], "messages[1].content[0].type"),
        (
            [("user", "a"), ("assistant", [CALL]), ("user", [RESULT | {"content": [{"type": "image"}]}])],
            "messages[2].content[0].content[0].type",
        ),
        ([("user", [{"type": "text", "text": None}])], "messages[0].content[0].text"),
        ([("user", [{"type": "text", "text": "a", "more": 1}])], "messages[0].content[0].more"),
        ([("user", [{"type": "text", "text": "a", "cache_control": {"type": "x"}}])],
         "messages[0].content[0].cache_control.type"),
        ([("wizard", "a")], "messages[0].role"),
        ([("user", 5)], "messages[0].content"),
    ],
)  # fmt: skip
def test_turns_that_are_refused(messages: list[tuple[str, Any]], param: str) -> None:
    """An invalid turn is refused with the path of the fault in the caller's own numbering."""
    error = refused(messages=[{"role": role, "content": content} for role, content in messages], system="s")
    assert error.param == param


def test_the_beginning_of_the_reply() -> None:
    """A last message of the assistant is continued by the reply; an empty one is dropped."""
    begun = [*HI, {"role": "assistant", "content": "The answer is ("}]
    raw = read(messages=begun)
    assert raw.end == "open"
    assert raw.messages[-1] == Message(role="assistant", content="The answer is (")
    for empty in ("", []):
        raw = read(messages=[*HI, {"role": "assistant", "content": empty}])
        assert (raw.end, len(raw.messages)) == ("generation_prompt", 1)


@pytest.mark.parametrize(
    ("content", "more", "param"),
    [
        ("blank ", {}, "messages[1].content"),
        ([{"type": "text", "text": "blank\n"}], {}, "messages[1].content[0].text"),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], {}, "messages[1].content[0]"),
        ("{", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format.schema"),
        ("I", {"tools": [WEATHER], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_beginnings_that_cannot_be_continued(content: Any, more: dict[str, Any], param: str) -> None:
    """A reply cannot begin with trailing blanks or anything but text, nor with a constraint on the whole reply."""
    assert refused(messages=[*HI, {"role": "assistant", "content": content}], **more).param == param


def test_tools() -> None:
    """A tool has a name, a description and the schema of its input, which may be enforced."""
    tools = [
        {**WEATHER, **CACHED, "type": "custom", "description": "now", "strict": True},
        {**WEATHER, "name": "other", "defer_loading": False, "eager_input_streaming": True},
    ]
    schema = WEATHER["input_schema"]
    assert read(tools=tools).tools == (
        Tool(name="weather", description="now", parameters=schema, strict=True),
        Tool(name="other", parameters=schema),
    )
    assert read(tools=[]).tools is None


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(mode="auto"), None),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(mode="auto"), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice(mode="required"), None),
        ({"type": "tool", "name": "weather"}, ToolChoice(mode="required", names=("weather",), named=True), None),
        ({"type": "none"}, ToolChoice(mode="none"), None),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: ToolChoice, parallel: bool | None) -> None:
    """``tool_choice`` says which tools may be called, and whether several may be called in parallel."""
    raw = read(tools=[WEATHER], tool_choice=choice)
    assert (raw.tool_choice, raw.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {}}]}, "tools[0].input_schema.type"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "a"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]}},
            "context_management",
        ),
        ({"metadata": {"team": "x"}}, "metadata.team"),
        ({"n": 2}, "n"),
        ({"anthropic_version": "vertex-2023-10-16"}, "anthropic_version"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    """An unsupported field is refused with its name and never ignored."""
    assert refused(**fields).param == param


def test_what_claude_code_sends_by_default() -> None:
    """That all thinking is kept, and its default effort; both are as if left out."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert read(context_management={"edits": edits}, output_config={"effort": "high"}) == read()


def test_formats() -> None:
    """The schema of a text is read under its newer and its older name."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    newer = read(output_config={"format": form, "effort": "high"})
    assert newer.sampling.constraint == Constraint(
        kind="json_schema", value={"type": "object"}, field="output_config.format.schema"
    )
    older = read(output_format=form).sampling.constraint
    assert older is not None
    assert older.field == "output_format.schema"
    assert read(output_format=form, output_config={"format": form}).sampling == newer.sampling
    assert refused(output_format=form, output_config={"format": form | {"schema": {}}}).param == "output_format"


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "disabled"},
        {"type": "adaptive"},
        {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    ],
)
def test_thinking(thinking: dict[str, Any]) -> None:
    """Thinking is switched on or off, and its budget must be less than max_tokens."""
    assert read(max_tokens=2048, thinking=thinking).thinking == thinking["type"]


def test_versions() -> None:
    """A known version or none is accepted, and another is refused by the header's name; beta headers are ignored."""
    dialect = DIALECTS["anthropic"]
    body = json.dumps(MIN_BODY).encode()
    beta = {"anthropic-beta": "output-128k-2025-02-19"}
    for headers in ({}, {VERSION_HEADER: "2023-06-01"}, {VERSION_HEADER: "2026-10-21"} | beta):
        assert dialect.decode(Head(dialect.routes[0], headers), body).task == "chat"
    with pytest.raises(InvalidField, match="anthropic-version: '2024-01-01' is not allowed"):
        dialect.decode(Head(dialect.routes[0], {VERSION_HEADER: "2024-01-01"}), body)


BLOCKS = [
    {"type": "text", "text": "a"},
    CALL,
    RESULT,
    {"type": "thinking", "thinking": "a", "signature": ""},
    {"type": "image"},
    IMAGE,
    IMAGE | CACHED,
    IMAGE | {"more": 1},
    IMAGE | {"cache_control": {"type": "x"}},
    *(IMAGE | {"source": SOURCE | more} for more in ({"media_type": "image/bmp"}, {"data": None}, {"url": "x"})),
    *({"type": "image", "source": source} for source in (
        None, 5, "x", {}, {"type": "url"}, {"type": "url", "url": "https://h.example/a"}, {"type": "url", "url": ""},
        {"type": "url", "url": 5}, {"type": "file", "file_id": "f"}, {"type": "base64", "data": "aGk="},
    )),
    {"type": 5},
    5,
]  # fmt: skip
PROBES = {
    "messages": [
        [{"role": role, "content": content}]
        for role in ("user", "assistant", "system", "tool", None)
        for content in ("x", "", None, 5, [], *([block] for block in BLOCKS), [{**RESULT, "content": [5]}])
    ],
    "tools": [[WEATHER], [{**WEATHER, "type": "custom"}], [{**WEATHER, "type": "x"}], [{}], [5]],
    "tool_choice": [{"type": name} for name in ("auto", "any", "none", "tool", "x", None)],
    "thinking": [{"type": name} for name in ("disabled", "adaptive", "enabled", "x", None)],
    "output_config": [{}, {"effort": "high"}, {"effort": "low"}, {"format": {}}, {"format": {"type": "json_schema"}}],
    "metadata": [{}, {"user_id": None}, {"user_id": 5}],
}


@pytest.mark.parametrize("body", [BODY, COUNT_BODY], ids=["message", "count"])
def test_schema_and_reader_take_the_same_values(body: Any) -> None:
    """Schema and reader agree for each field on null, wrong types, probes and values around the bounds."""
    minimum = {name: MIN_BODY[name] for name in body.schema["required"]}
    for name, schema in body.schema["properties"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for value in [*ANY, *bounds(schema), *PROBES.get(name, ())]:
            try:
                body({**minimum, name: value}, "")
                taken = True
            except InvalidField:
                taken = False
            assert validator.is_valid(value) == taken, (name, str(value)[:200])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
            "content": st.text(max_size=4) | st.lists(st.sampled_from(BLOCKS) | JSON, max_size=3) | JSON,
        }
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    messages=TURNS | JSON,
    fields=st.dictionaries(st.sampled_from(sorted(BODY.schema["properties"])), JSON, max_size=3),
)
def test_junk_is_read_or_refused(messages: Any, fields: dict[str, Any]) -> None:
    """Any JSON makes a request or a short error of the caller's."""
    for read_body in (read_message_request, read_count_request):
        body = {"messages": messages, "model": "m", **fields}
        if read_body is read_message_request:
            body.setdefault("max_tokens", 9)
        try:
            read_body(body)
        except InvalidField as error:
            message = error.message
        else:
            message = ""
        assert len(message) < 600
