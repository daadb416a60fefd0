"""One request in two APIs: what chat completions and responses both can say is the same raw request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.request import RawChat

WORDS = st.text("ab é\n", max_size=6)
NAMES = ("find", "note", "count")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 9), max_size=2).map(json.dumps)
FUNCTION = st.fixed_dictionaries(
    {"strict": st.booleans()}, optional={"description": WORDS, "parameters": st.just(SCHEMA) | st.none()}
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw a conversation, both as chat messages and as items."""
    messages, items = [], []
    for number in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["system", "developer", "user", "assistant", "calls"]))
        if role != "calls":
            plain = {"role": role, "content": draw(WORDS)}
            messages.append(plain)
            items.append(plain | ({"type": "message"} if draw(st.booleans()) else {}))
            continue
        said, thought = draw(st.none() | WORDS), draw(st.none() | WORDS.filter(bool))
        calls = [
            (f"c{number}{i}", draw(st.sampled_from(NAMES)), draw(ARGUMENTS)) for i in range(draw(st.integers(1, 2)))
        ]
        if messages and messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "go on"})
            items.append({"role": "user", "content": "go on"})
        messages.append({
            "role": "assistant", "content": said, "reasoning_content": thought,
            "tool_calls": [
                {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call, name, arguments in calls
            ],
        })  # fmt: skip
        if thought is not None:
            items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        if said is not None:
            items.append({"role": "assistant", "content": said})
        items += [
            {"type": "function_call", "call_id": call, "name": name, "arguments": arguments}
            for call, name, arguments in calls
        ]
        for call, _, _ in calls:
            answer = draw(WORDS)
            messages.append({"role": "tool", "tool_call_id": call, "content": answer})
            items.append({"type": "function_call_output", "call_id": call, "output": answer})
    return messages, items


SAME = {
    "model": WORDS, "temperature": st.floats(0, 2), "top_p": st.floats(0.1, 1), "seed": st.integers(0, 2**64 - 1),
    "stop": st.lists(WORDS.filter(bool), max_size=2), "top_k": st.integers(-1, 50), "user": WORDS,
    "parallel_tool_calls": st.booleans(), "stream": st.booleans(), "chat_template_kwargs": st.just({"a": 1}),
    "logit_bias": st.just({"5": 1}), "guided_regex": st.none(), "cache_salt": st.just("s"),
}  # fmt: skip


@st.composite
def both(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the bodies of a chat completion and a response that ask the same."""
    messages, items = draw(turns())
    same = draw(st.fixed_dictionaries({}, optional=SAME))
    chat, response = {"messages": messages, **same}, {"input": items, **same}
    if draw(st.booleans()):
        chat["max_completion_tokens"] = response["max_output_tokens"] = draw(st.integers(1, 99))
    if draw(st.booleans()):
        top = draw(st.none() | st.integers(0, 20))
        chat |= {"logprobs": True, "top_logprobs": top}
        response |= {"include": ["message.output_text.logprobs"], "top_logprobs": top}
    if draw(st.booleans()):
        chat["tools"], response["tools"] = draw(tools())
        chat["tool_choice"], response["tool_choice"] = draw(choices())
    form = draw(st.sampled_from([None, "text", "json_object", "json_schema"]))
    if form == "json_schema":
        named = {"name": "form", "schema": SCHEMA, "strict": draw(st.booleans())}
        chat["response_format"] = {"type": form, "json_schema": named}
        response["text"] = {"format": {"type": form, **named}}
    elif form is not None:
        chat["response_format"], response["text"] = {"type": form}, {"format": {"type": form}}
    return chat, response


@st.composite
def tools(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw functions and a custom tool, in nested and in flat form."""
    functions = [{"name": name, **draw(FUNCTION)} for name in NAMES]
    nested: list[dict[str, Any]] = [{"type": "function", "function": function} for function in functions]
    flat: list[dict[str, Any]] = [{"type": "function", **function} for function in functions]
    if draw(st.booleans()):
        grammar = {"syntax": draw(st.sampled_from(["lark", "regex"])), "definition": "a"}
        form = {"type": "grammar", "grammar": grammar}
        nested.append({"type": "custom", "custom": {"name": "write", "format": form}})
        flat.append({"type": "custom", "name": "write", "format": {"type": "grammar", **grammar}})
    return nested, flat


@st.composite
def choices(draw: st.DrawFn) -> tuple[Any, Any]:
    """Draw a tool choice, in nested and in flat form."""
    word = draw(st.sampled_from(["none", "auto", "required", "named", "allowed"]))
    if word not in ("named", "allowed"):
        return word, word
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    flat = [{"type": "function", "name": name} for name in names]
    if word == "named":
        return nested[0], flat[0]
    mode = draw(st.sampled_from(["auto", "required"]))
    allowed = {"type": "allowed_tools", "mode": mode, "tools": flat}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}, allowed


def read(dialect: str, body: dict[str, Any]) -> Any:
    """Return the raw request in plain values, without field names and what only the reply repeats."""
    codec = DIALECTS[dialect]
    raw = codec.decode(Head(codec.routes[0], {}), json.dumps(body).encode())
    assert isinstance(raw, RawChat)
    return nameless(msgspec.to_builtins(msgspec.structs.replace(raw, echoed=b""), builtin_types=(bytes,)))


def nameless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nameless(entry) for key, entry in value.items() if key != "field"}
    return [nameless(entry) for entry in value] if isinstance(value, list | tuple) else value


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(both())
def test_both_apis_ask_the_same(bodies: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Both APIs give the same request for conversations, reasoning, sampling, tools, tool choice and text formats."""
    chat, response = bodies
    asked, same = read("openai", chat), read("responses", response)
    for one in (asked, same):
        del one["sent_as"]  # the names under which each API sends the fields
    assert asked == same
