"""Bodies of the Responses API, as the raw request that is made of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probes import ANY, bounds

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.dialects.responses.fields import TABLE, read_response_request
from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField, RequestError, ServingError
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.request import Message, RawChat, TextPart, Tool, ToolCall, ToolChoice

DIALECT = DIALECTS["responses"]
HEAD = Head(DIALECT.routes[0], {})
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SPACE = {"type": "namespace", "name": "met", "description": "Of the sky.", "tools": [WEATHER]}
NOTE = {"type": "custom", "name": "note", "description": "writes down"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
WROTE = {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "rain in Oslo"}
WRITTEN = {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]}
IMAGE = {"type": "input_image", "image_url": "https://h.example/a.png", "detail": "auto"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": [{"token": "So"}]}],
}


def read(**fields: Any) -> RawChat:
    return read_response_request({"input": "hi"} | fields)


def refused(**fields: Any) -> InvalidField:
    with pytest.raises(InvalidField) as found:
        read(**fields)
    assert len(found.value.message) < 500
    return found.value


def echoed(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(**fields).echoed)
    return found


def test_every_field_arrives() -> None:
    """Sampling, the end user's id, the stream flag and the instructions reach the raw request under their names."""
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1,
        "presence_penalty": -1.0, "frequency_penalty": 1.0, "seed": 7, "min_tokens": 1, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "timeout": 3.0,
    }  # fmt: skip
    raw = read(
        model="m",
        instructions="be kind",
        max_output_tokens=9,
        stop=["a"],
        logit_bias={"5": -100},
        stop_token_ids=[3],
        stream=True,
        user="u",
        cache_salt="s",
        parallel_tool_calls=False,
        chat_template="default",
        chat_template_kwargs={"a": 1},
        **sampling,
    )
    assert raw.messages == (Message(role="system", content="be kind"), Message(role="user", content="hi"))
    assert {name: getattr(raw.sampling, name) for name in sampling} == sampling
    assert (raw.sampling.max_tokens, raw.sampling.stop, raw.sampling.logit_bias) == (9, ("a",), {5: -100.0})
    assert (raw.sampling.stop_token_ids, raw.model, raw.stream, raw.cache_salt) == ((3,), "m", True, "s")
    assert raw.labels == Labels(user="u")
    assert (raw.parallel_tool_calls, raw.chat_template, raw.chat_template_kwargs) == (False, "default", {"a": 1})


def test_null_is_the_default() -> None:
    """A null field counts as left out, except the input."""
    left_out = msgspec_fields(read())
    for name in (*TABLE.fields, *TABLE.refused):
        if name != "input":
            assert msgspec_fields(read(**{name: None})) == left_out, name
    assert refused(input=None).param == "input"


def msgspec_fields(raw: RawChat) -> dict[str, Any]:
    return {name: getattr(raw, name) for name in raw.__struct_fields__}


def test_values_that_ask_for_nothing() -> None:
    """Fields of the hosted service are accepted with values that ask for the default behaviour."""
    plain = read()
    asked: dict[str, Any] = {
        "store": False, "background": False, "service_tier": "auto", "prompt_cache_key": "k", "top_logprobs": 0,
        "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}, "context_management": [],
        "include": ["reasoning.encrypted_content"], "truncation": "disabled", "text": {"verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None, "context": "auto"}, "safety_identifier": "u",
        "metadata": {"a": "b"}, "max_tool_calls": 3, "stream_options": {"include_obfuscation": False},
        "n": 1, "previous_response_id": None, "tools": [], "tool_choice": "auto",
    }  # fmt: skip
    raw = read(**asked)
    assert raw.tool_choice == ToolChoice(mode="auto")
    for name in ("messages", "sampling", "chat_template_kwargs", "thinking"):
        assert getattr(raw, name) == getattr(plain, name)
    assert not raw.tools


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"store": True}, "store", "not stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "not stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not stored"),
        ({"background": True}, "background", "while it is open"),
        ({"moderation": {"model": "m"}}, "moderation", "not moderated"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "not compacted"),
        ({"service_tier": "flex"}, "service_tier", "one tier"),
        ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
        ({"include": "message.output_text.logprobs"}, "include", "list"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "reasoning is given as it is"),
        ({"reasoning": {"generate_summary": "detailed"}}, "reasoning.generate_summary", "reasoning is given as it is"),
        ({"client_metadata": {"a": 1}}, "client_metadata.a", "string"),
        ({"client_metadata": {"a" * 65: "b"}}, "client_metadata", "64"),
        ({"client_metadata": {"a": "b" * (2**16 + 1)}}, "client_metadata.a", "65536"),
        ({"client_metadata": {str(i): "" for i in range(65)}}, "client_metadata", "64"),
        ({"client_metadata": "a"}, "client_metadata", "an object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'web_search = "disabled"'),
        ({"tools": [SPACE | {"tools": []}]}, "tools[0].tools", "1 to 128"),
        ({"tools": [SPACE | {"tools": [SPACE]}]}, "tools[0].tools[0].type", '"function", "custom"'),
        ({"tools": [SPACE | {"name": "a.b"}]}, "tools[0].name", "letters"),
        ({"tools": [WEATHER | {"name": "met__weather"}, SPACE]}, "tools[1].tools[0].name", "no tool before it has"),
        ({"tools": [SPACE | {"tools": [WEATHER | {"name": f"w{i}"} for i in range(128)]}, NOTE]}, "tools", "most 128"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "low"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "no such setting"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "a JSON schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no tools of its own"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "no tools of its own"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "no such field"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "before"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading", "shown"),
        ({"tools": [NOTE | {"format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.definition", "gramm"),
        ({"tools": {"type": "function"}}, "tools", "list"),
        ({"tool_choice": {"type": "custom", "name": "weather"}, "tools": [WEATHER]}, "tool_choice.name", "custom"),
        ({"tool_choice": {"type": "web_search_preview"}, "tools": [WEATHER]}, "tool_choice.type", "no tools of its"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "weather"}]},
             "tools": [WEATHER]},
            "tool_choice.tools[0].name",
            "a custom tool",
        ),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "text.format says"),
        ({"max_output_tokens": 0}, "max_output_tokens", "[1, "),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "[1, 1]"),
        ({"messages": []}, "messages", "this API has input"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "64"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"truncation": "cut"}, "truncation", "auto"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "no such field"),
    ],
)  # fmt: skip
def test_refusals_name_their_field(fields: dict[str, Any], param: str, why: str) -> None:
    """An unsupported request is refused with the field's path and what is allowed, or the reason."""
    error = refused(**fields)
    assert error.param == param
    assert error.message.startswith(param + ": ")
    assert why in error.message


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        (5, "input"),
        (["hi"], "input[0]"),
        ([{}], "input[0].role"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].image_url"),
        ([{"role": "system", "content": [IMAGE]}], "input[0].content[0].type"),
        ([{"role": "assistant", "content": [IMAGE]}], "input[0].content[0].type"),
        ([CALL, RESULT | {"output": [IMAGE]}], "input[1].output[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "\ud83d"}], "input[0].content"),
        ([USER | {"phase": "commentary"}], "input[0].phase"),
        ([USER | {"colour": 1}], "input[0].colour"),
        ([USER, {"type": "item_reference", "id": "msg_1"}], "input[1].type"),
        ([USER, {"id": "msg_1"}], "input[1]"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0].type"),
        ([USER, RESULT], "input[1].call_id"),
        ([CALL, WRITTEN], "input[1].call_id"),
        ([CALL, RESULT | {"type": "custom_tool_call_output"}], "input[1].call_id"),
        ([CALL, RESULT, RESULT], "input[2].call_id"),
        ([CALL, CALL], "input[1].call_id"),
        ([CALL | {"arguments": "{"}, RESULT], "input[0].arguments"),
        ([CALL | {"arguments": "[]"}, RESULT], "input[0].arguments"),
        ([CALL | {"namespace": 1}, RESULT], "input[0].namespace"),
        ([THOUGHT | {"content": None, "encrypted_content": "x"}], "input"),
    ],
)
def test_bad_items(items: Any, param: str) -> None:
    """An item at fault is named by its place and key."""
    error = refused(input=items)
    assert error.param == param


def messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read(input=list(items)).messages


def test_a_round_of_tools() -> None:
    """Consecutive reasoning, text and calls of the assistant become one message; each tool output becomes a tool
    message.
    """
    found = messages(USER, THOUGHT, SAID, CALL, WROTE, RESULT, WRITTEN, SAID)
    assert found == (
        Message(role="user", content="hi"),
        Message(
            role="assistant",
            content=(TextPart("So"),),
            reasoning_content="hm",
            tool_calls=(
                ToolCall(id="c1", name="weather", arguments={"city": "Oslo"}),
                ToolCall(id="c2", name="note", arguments={"input": "rain in Oslo"}),
            ),
        ),
        Message(role="tool", content="rain", tool_call_id="c1"),
        Message(role="tool", content=(TextPart("ok"),), tool_call_id="c2"),
        Message(role="assistant", content=(TextPart("So"),)),
    )


def test_turns_of_the_assistant() -> None:
    """A text after a text is a turn of its own; one after a call belongs to the call's, whose outputs follow it."""
    one, two = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}
    assert messages(one, two) == (Message(role="assistant", content="1"), Message(role="assistant", content="2"))
    (called, answered) = messages(one, CALL, two, RESULT)
    assert called.content == (TextPart("1"), TextPart("2"))
    assert (len(called.tool_calls), answered.role) == (1, "tool")
    (called, _, again, _) = messages(CALL, RESULT, CALL, RESULT)
    assert [call.id for call in (*called.tool_calls, *again.tool_calls)] == ["c1", "c1"]


def test_reasoning_that_comes_back() -> None:
    """The text of reasoning, or its summary, is given back to the template; encrypted reasoning is ignored."""
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages(THOUGHT, summary, SAID)[0].reasoning_content == "hm\nshort"
    (_, said) = messages(USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, SAID)
    assert said.reasoning_content is None


def test_tools_of_a_namespace() -> None:
    """The model knows them by both names, and calls of them that come back are the same; the namespace is described
    once, with its first tool."""
    sky = SPACE | {"tools": [WEATHER | {"description": "Now."}, NOTE]}
    tools = read(tools=[sky, NOTE]).tools or ()
    assert [(tool.name, tool.kind, tool.description) for tool in tools] == [
        ("met__weather", "function", "Tools of met: Of the sky.\n\nNow."),
        ("met__note", "custom", "writes down"),
        ("note", "custom", "writes down"),
    ]
    (alone,) = read(tools=[SPACE | {"tools": [WEATHER]}]).tools or ()
    assert alone.description == "Tools of met: Of the sky."
    (_, called, _) = messages(USER, CALL | {"namespace": "met"}, RESULT)
    assert [call.name for call in called.tool_calls] == ["met__weather"]


def test_what_codex_says_about_itself() -> None:
    """Codex's session is a label where it is short, and its wish for a summary is taken; neither reaches the model."""
    fields = {"client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": "{}" * 2000}}
    asked = {"reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"]}
    plain, found = read(), read(**fields, **asked)
    assert found.labels == Labels(tags={"session_id": "01a2"})
    assert msgspec.structs.replace(found, echoed=b"", labels=None) == msgspec.structs.replace(plain, echoed=b"")


def test_messages_of_every_form() -> None:
    """Messages are read with or without a type, as strings or parts, developer as system and refusals as text."""
    parts = [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    parts += [{"type": "input_text", "text": "b"}]
    denied = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    found = messages(
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": parts, "id": "msg_1", "status": "completed"},
        denied,
        {"role": "assistant", "content": []},
    )
    assert found == (
        Message(role="system", content="be kind"),
        Message(role="user", content=(TextPart("a"), TextPart("b"))),
        Message(role="assistant", content=(TextPart("no"),)),
        Message(role="assistant", content=()),
    )


def test_tools() -> None:
    """A function is strict unless it says otherwise; a custom tool's grammar is a constraint of its field."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    loose = {"type": "function", "name": "loose", "strict": False, "description": "does"}
    raw = read(tools=[WEATHER, loose, NOTE, NOTE | {"name": "lines", "format": grammar}])
    assert raw.tools == (
        Tool(name="weather", parameters=WEATHER["parameters"], strict=True),
        Tool(name="loose", description="does"),
        Tool(name="note", kind="custom", description="writes down"),
        Tool(
            name="lines",
            kind="custom",
            description="writes down",
            syntax=Constraint(kind="lark", value="start: /a+/", field="tools[3].format.definition"),
        ),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice(mode="none")),
        ("auto", ToolChoice(mode="auto")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "name": "weather"}, ToolChoice(mode="required", names=("weather",), named=True)),
        ({"type": "custom", "name": "note"}, ToolChoice(mode="required", names=("note",), named=True)),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "note"}, {"type": "function", "name": "weather"}],
            },
            ToolChoice(mode="auto", names=("note", "weather")),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice(mode="required", names=("weather",)),
        ),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    """Each form of the choice is read; a subset of one is not a named tool."""
    assert read(tools=[WEATHER, NOTE], tool_choice=choice).tool_choice == expected


def test_formats() -> None:
    """A text format becomes a constraint that names the field it came from."""
    schema = {"type": "object"}
    asked = {"type": "json_schema", "name": "a", "schema": schema, "strict": True, "description": "b"}
    assert read(text={"verbosity": "medium"}).sampling.constraint is None
    found = read(text={"format": {"type": "text"}}).sampling.constraint
    assert found == Constraint(kind="text", field="text.format")
    found = read(text={"format": {"type": "json_object"}}).sampling.constraint
    assert found == Constraint(kind="json_object", field="text.format")
    found = read(text={"format": asked}).sampling.constraint
    assert found == Constraint(kind="json_schema", value=schema, field="text.format.schema")
    found = read(structured_outputs={"regex": "a+"}, text={"format": {"type": "text"}}).sampling.constraint
    assert found == Constraint(kind="regex", value="a+", field="structured_outputs.regex")


def test_logprobs() -> None:
    """Log probabilities are requested by include, and the number of alternatives by top_logprobs."""
    raw = read(include=["message.output_text.logprobs"], top_logprobs=3).sampling
    assert (raw.logprobs, raw.top_logprobs) == (True, 3)
    raw = read(include=["message.output_text.logprobs"]).sampling
    assert (raw.logprobs, raw.top_logprobs) == (True, None)


def test_reasoning_effort() -> None:
    """It is the effort of the chat; what the template does with it is not decided here."""
    assert read(reasoning={"effort": "none"}).reasoning_effort == "none"
    raw = read(reasoning={"effort": "low"}, chat_template_kwargs={"a": 1})
    assert (raw.thinking, raw.reasoning_effort, raw.chat_template_kwargs) == (None, "low", {"a": 1})


def test_truncation() -> None:
    """Truncation auto is the same as error_behavior truncate."""
    assert read(truncation="auto").sampling.error_behavior == "truncate"
    assert read(truncation="disabled").sampling.error_behavior is None


def test_what_the_reply_repeats() -> None:
    """The fields of a response object that the request has are repeated as they were sent."""
    asked = {"instructions": "be kind", "tools": [WEATHER], "tool_choice": "auto", "user": "u", "metadata": {"a": "b"}}
    asked |= {"parallel_tool_calls": False, "text": {"format": {"type": "json_object"}}, "max_tool_calls": 3}
    asked |= {"reasoning": {"effort": "low"}, "truncation": "auto", "prompt_cache_key": "k", "max_output_tokens": 7}
    shown = {"tools": [WEATHER | {"description": None, "strict": True}]}
    shown["text"] = asked["text"] | {"verbosity": "medium"}
    assert echoed(**asked) == asked | shown | {"top_logprobs": 0}


@pytest.mark.parametrize(
    ("param", "message", "expected"),
    [
        ("max_tokens", "max_tokens: 9 is not allowed", ("max_output_tokens", "max_output_tokens: 9 is not allowed")),
        ("messages[2].role", "messages[2].role: x", ("input", "input (messages[2].role): x")),
        ("messages", "messages: 9 tokens", ("input", "input (messages): 9 tokens")),
        ("error_behavior", "error_behavior: x", ("truncation", "truncation (error_behavior): x")),
        ("tools[0].function.name", "tools[0].function.name: x", ("tools[0].name", "tools[0].name: x")),
        ("reasoning_effort", "reasoning_effort: x", ("reasoning.effort", "reasoning.effort: x")),
        ("temperature", "temperature: x", ("temperature", "temperature: x")),
        ("max_tokens_more", "max_tokens_more: x", ("max_tokens_more", "max_tokens_more: x")),
        (None, "body", (None, "body")),
    ],
)
def test_errors_have_the_names_of_this_api(param: str | None, message: str, expected: tuple[str | None, str]) -> None:
    """Errors from below the dialect name the field that the caller sent."""
    error = json.loads(DIALECT.error(RequestError(message, param=param)).body)["error"]
    assert (error["param"], error["message"]) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 5}, "max_tokens: 5 is not allowed; expected null: this API has max_output_tokens"),
        ({"messages": []}, "messages: [] is not allowed; expected null: this API has input"),
    ],
)
def test_a_field_of_chats_keeps_its_name_in_the_error(body: dict[str, Any], message: str) -> None:
    """A chat field sent to this API keeps its name in the error."""
    with pytest.raises(InvalidField) as caught:
        DIALECT.decode(HEAD, json.dumps({"input": "x"} | body).encode())
    error = json.loads(DIALECT.error(caught.value).body)["error"]
    assert (error["param"], error["message"]) == (next(iter(body)), message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", "body"),
        (b"{", "body"),
        (b'{"input": "\\ud800"}', "input"),
        (b'{"input": "x", "instructions": "\\ud800"}', "instructions"),
        (
            b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": "\\ud800"}}]}',
            "tools[0].parameters",
        ),
        (b'{"input": "x", "metadata": {"\\ud800": ""}}', "metadata"),
        (b'{"input": "x", "seed": 1' + b"0" * 400 + b"}", "seed"),
        (b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    ],
)
def test_invalid_bytes_are_refused(body: bytes, param: str | None) -> None:
    """Invalid bytes are refused as the caller's mistake, with the field where there is one."""
    with pytest.raises(RequestError) as found:
        DIALECT.decode(HEAD, body)
    assert param is None or found.value.param == param


SHOWN = {"role": "user", "content": [IMAGE]}
ITEMS: list[Any] = [USER, SHOWN, CALL, RESULT, WROTE, WRITTEN, THOUGHT, SAID]


def values() -> Iterator[Any]:
    """Yield each item as it is and with each of its fields left out, null and of other types."""
    for item in ITEMS:
        yield item
        for name in item:
            yield {key: value for key, value in item.items() if key != name}
            yield from (item | {name: value} for value in ANY)
        yield from (item | {name: value} for name in ("status", "id", "caller", "phase", "name") for value in ANY)
    for role in ("user", "system", "assistant"):
        for more in ({}, {"file_id": None}, {"file_id": "f"}, {"more": 1}, {"image_url": None}, {"image_url": ""}):
            yield {"role": role, "content": [IMAGE | more]}
        yield from ({"role": role, "content": [IMAGE | {"detail": value}]} for value in (*ANY, "low"))


@pytest.mark.parametrize("name", [*TABLE.fields, *TABLE.refused])
def test_schema_and_reader_take_the_same_values(name: str) -> None:
    """Schema and reader agree on null, wrong types and bounds, except for rules that a schema cannot express."""
    schema = TABLE.schema()["properties"][name]
    validator = jsonschema.Draft202012Validator(schema)
    probes = [*ANY, *bounds(schema)]
    probes += [[item] for item in values()] if name == "input" else []
    if name == "tools":
        probes += [[tool | more] for tool in (WEATHER, NOTE) for more in ({}, {"strict": None}, {"x": 1})]
    for value in probes:
        try:
            TABLE.read({"input": "hi", name: value})
            known = True
        except InvalidField as error:
            known = any(told in error.message for told in ("call_id of a", "a JSON object in a", "model can read"))
        assert validator.is_valid(value) == known, (name, str(value)[:200])


def test_the_schema_is_valid() -> None:
    """The schema of requests is a valid JSON Schema."""
    jsonschema.Draft202012Validator.check_schema(TABLE.schema())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "role", "content", "text", "call_id", "a"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
JUNK = st.sampled_from([*ITEMS, "x", "function", "message", "user", "grammar"]) | JSON


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    items=st.lists(st.builds(lambda item, more: item | more, st.sampled_from(ITEMS), st.dictionaries(
        st.sampled_from(["type", "content", "output", "arguments", "call_id", "role"]), JUNK, max_size=2)), max_size=5)
    | JUNK,
    fields=st.dictionaries(st.sampled_from([*TABLE.fields, *TABLE.refused, "n"]), JUNK, max_size=3),
)  # fmt: skip
def test_junk_is_read_or_refused(items: Any, fields: dict[str, Any]) -> None:
    """Any JSON body is read as a request or refused with an error of the tree."""
    with contextlib.suppress(ServingError):
        raw = read_response_request(fields | {"input": items})
        assert raw.messages
        assert isinstance(json.loads(raw.echoed), dict)
