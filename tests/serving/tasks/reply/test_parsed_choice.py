"""Reasoning and tool calls of a reply, from an engine's events to pieces."""

import msgspec
import pytest
from scripted_engine import ScriptedEngine, spoken

from mlflow_llm.serving.interface.events import Finished, TokenLogprob, Tokens
from mlflow_llm.serving.interface.reply import Delta, Ended
from mlflow_llm.serving.interface.request import Message, RawChat, RawSampling, Tool, ToolChoice
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply import generate

HERMES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }} "
    "<tool_call>{}</tool_call>{% endif %}assistant:{% if thinking %}<think>\n{% endif %}{# <think> </think> #}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[TOOL_CALLS] [INST]{{ messages[-1].content }}[/INST]"
)
F = Tool(name="f", parameters={"properties": {"x": {"type": "integer"}}})
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
def hermes(text_of):
    """Return a model whose template has tools in Hermes' form and reasoning between think markers."""
    return text_of(HERMES)


@pytest.fixture
def ask(endpoint_of):
    def build(model, tools=(F,), **fields):
        sampling = {name: fields.pop(name) for name in list(fields) if name in RawSampling.__struct_fields__}
        raw = RawChat(
            messages=(Message(role="user", content="hi"),),
            tools=tools or None,
            sampling=RawSampling(**{"max_tokens": 100, **sampling}),
            **fields,
        )
        return prepare(raw, endpoint_of(model=model, context=4096), request_id="r1")

    return build


def _pieces(engine, request, text):
    return list(generate.run(engine, request, text))


def _reply(said, request, text, reason="stop", chunk=1):
    ids = said if isinstance(said, list) else text.encode(said, False)
    engine = ScriptedEngine(spoken(0, ids, reason, chunk=chunk))
    return generate.gather(generate.run(engine, request, text)), engine


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_text_reasoning_and_calls(hermes, ask, chunk):
    """A reply's three kinds of content are apart, without their markers, however tokens come."""
    said = "<think>\nHm: f.\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL.replace("1", "22")
    reply, _ = _reply(said, ask(hermes), hermes, chunk=chunk)
    choice = reply.choices[0]
    assert (choice.reasoning, choice.text) == ("Hm: f.", "Let me see.")
    assert [(call.name, call.arguments) for call in choice.calls] == [("f", '{"x": 1}'), ("f", '{"x": 22}')]
    assert choice.finish_reason == "tool_calls"
    ids = hermes.encode(said, False)
    assert choice.token_ids == ids
    assert reply.usage.completion_tokens == len(ids)
    thought = len(hermes.encode("<think>\nHm: f.\n</think>", False))
    assert 0 < reply.usage.reasoning_tokens <= thought < len(ids)


def test_deltas_of_calls(hermes, ask):
    """The first delta of a call has its id and name and no arguments; later ones have arguments alone; indexes do not
    interleave; and no delta holds two kinds of content."""
    said = "a<think>" + CALL + CALL
    ids = hermes.encode(said, False)
    pieces = _pieces(ScriptedEngine(spoken(0, ids)), ask(hermes), hermes)
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    for index in (0, 1):
        first, *rest = (call for call in calls if call.index == index)
        assert (first.name, first.arguments) == ("f", "")
        assert all((call.id, call.name) == (None, None) and call.arguments for call in rest)
    assert all(bool(delta.text) + bool(delta.reasoning) + bool(delta.calls) <= 1 for delta in deltas)
    assert sum(delta.num_tokens for delta in deltas) == len(ids)
    assert "".join(delta.text for delta in deltas) == "a<think>"


def test_arguments_come_with_their_tokens(hermes, ask):
    """The arguments that a token adds are sent before the next token."""
    head, body = '<tool_call>\n{"name": "f", "arguments": ', '{"x": 1, "y": "abc", "z": [1, 2]}'
    ids = hermes.encode(head, False)
    request, said = ask(hermes), ""
    run = generate.Run(request, hermes, ScriptedEngine([]).stream)
    for token_id in ids:
        list(run.feed(Tokens(0, (token_id,))))
    for token_id in hermes.encode(body, False):
        said += "".join(c.arguments for d in run.feed(Tokens(0, (token_id,))) for c in d.calls)
        ids += (token_id,)
        assert head + said == hermes.decode(list(ids))


def test_ids_of_calls(hermes, ask):
    """An id is OpenAI's in form, and the same for the same call of the same request alone."""
    reply, _ = _reply(CALL + CALL, ask(hermes), hermes)
    again, _ = _reply(CALL + CALL, ask(hermes), hermes)
    ids = [call.id for call in reply.choices[0].calls]
    assert ids == [call.id for call in again.choices[0].calls]
    assert len(set(ids)) == 2
    assert all(len(each) == 29 and each.startswith("call_") and each[5:].isalnum() for each in ids)
    other, _ = _reply(CALL, msgspec.structs.replace(ask(hermes), request_id="r2"), hermes)
    assert other.choices[0].calls[0].id != ids[0]


@pytest.mark.parametrize(
    ("fields", "said", "engine_reason", "expected"),
    [
        ({}, CALL, "stop", "tool_calls"),
        ({"tool_choice": ToolChoice(mode="required")}, CALL, "stop", "tool_calls"),
        ({"tool_choice": ToolChoice(mode="required", names=("f",), named=True)}, CALL, "stop", "stop"),
        ({"tool_choice": ToolChoice(mode="required", names=("f",))}, CALL, "stop", "tool_calls"),
        ({}, "no call", "stop", "stop"),
        ({}, CALL.replace("f", "g"), "stop", "stop"),
        ({}, CALL, "length", "length"),
        ({}, "no call", "length", "length"),
        ({"stop": ("1",)}, CALL, "stop", "stop"),
    ],
)
def test_finish_reason(hermes, ask, fields, said, engine_reason, expected):
    """The finish reason is tool_calls if the model ended after a complete call of its own choice."""
    reply, _ = _reply(said, ask(hermes, **fields), hermes, engine_reason)
    assert reply.choices[0].finish_reason == expected


def test_cut_call(hermes, ask):
    """A call cut by its length is given out as far as it came, and the reply says so."""
    reply, _ = _reply(CALL[: CALL.index("1")], ask(hermes), hermes, "length")
    assert [call.arguments for call in reply.choices[0].calls] == ['{"x": ']
    assert reply.choices[0].finish_reason == "length"


def test_one_call_ends_the_sequence(hermes, ask):
    """Without parallel calls the sequence ends in the engine after the first call, and nothing behind it is counted."""
    ids = hermes.encode(CALL + CALL, False)
    first = next(i for i in range(len(ids)) if '"x": 1}' in hermes.decode(list(ids[: i + 1])))
    reply, engine = _reply(list(ids), ask(hermes, parallel_tool_calls=False), hermes)
    assert [call.arguments for call in reply.choices[0].calls] == ['{"x": 1}']
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].stop_reason is None
    assert engine.stream.finished == [0]
    assert reply.usage.completion_tokens == first + 1


def test_tools_that_may_not_be_called(hermes, ask):
    """Without tools, or with tool_choice none, what looks like a call is text."""
    for fields in ({"tools": ()}, {"tool_choice": ToolChoice(mode="none")}):
        reply, _ = _reply(CALL, ask(hermes, **fields), hermes)
        assert (reply.choices[0].text, reply.choices[0].calls) == (CALL, ())
        assert reply.choices[0].finish_reason == "stop"


def test_prompt_that_opens_the_reasoning(hermes, ask):
    """A reply to a prompt that ends in the marker of reasoning begins in it."""
    request = ask(hermes, chat_template_kwargs={"thinking": True}, tools=())
    assert request.begins_in_reasoning
    said = "so it is\n</think>\n\nYes"
    reply, _ = _reply(said, request, hermes)
    assert (reply.choices[0].reasoning, reply.choices[0].text) == ("so it is", "Yes")
    assert reply.usage.reasoning_tokens == len(hermes.encode(said.removesuffix("\n\nYes"), False))


def test_plain_chats_are_not_parsed(text_of, ask, hermes, endpoint_of):
    """A chat without tools goes through no parser, unless its model has markers of reasoning."""
    plain = text_of(PLAIN)
    assert ask(plain, tools=()).read_as is None
    assert ask(plain).read_as == "default"
    assert ask(hermes, tools=()).read_as == "default"
    run = generate.Run(ask(plain, tools=()), plain, ScriptedEngine([]).stream)
    assert type(run.choices[0]).__name__ == "ChoiceText"


def test_special_tokens(text_of, ask):
    """Markers that are special tokens are seen although they are not shown; a text that spells one is text."""
    text = text_of(MISTRAL, special=("[TOOL_CALLS]",))
    marker = text.special_tokens["[TOOL_CALLS]"]
    call = text.encode(' [{"name": "f", "arguments": {"x": 1}}]', False)
    spelt = text.encode("about [TOOL_", False) + text.encode("CALLS] é", False)
    half = text.encode("é", False)[:-1] if len(text.encode("é", False)) > 1 else ()
    reply, _ = _reply([*spelt, *half, marker, *call], ask(text), text)
    choice = reply.choices[0]
    assert choice.text.startswith("about [TOOL_CALLS] é")
    assert [(each.name, each.arguments) for each in choice.calls] == [("f", '{"x": 1}')]


@pytest.mark.parametrize("skip", [True, False])
def test_special_token_without_a_call(text_of, ask, skip):
    """A special token that opens no call is shown only where special tokens are."""
    text = text_of(MISTRAL, special=("[TOOL_CALLS]",))
    ids = [text.special_tokens["[TOOL_CALLS]"], *text.encode("not a call", False)]
    reply, _ = _reply(ids, ask(text, skip_special_tokens=skip), text)
    assert reply.choices[0].text == ("" if skip else "[TOOL_CALLS]") + "not a call"


def test_stop_strings_come_first(hermes, ask):
    """A stop string is matched on what the model writes, so in arguments too; what it ends is given out as it came."""
    reply, _ = _reply(CALL, ask(hermes, stop=("x",)), hermes)
    choice = reply.choices[0]
    assert [call.arguments for call in choice.calls] == ['{"']
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "x")
    kept, _ = _reply(CALL, ask(hermes, stop=('"x',), include_stop_str_in_output=True), hermes)
    assert [call.arguments for call in kept.choices[0].calls] == ['{"x']


@pytest.mark.parametrize("at", [1, 5, 12, 20])
def test_resumed_reply(hermes, ask, at):
    """A reply that goes on in another engine is, from there on, what it would have been."""
    ids = hermes.encode("<think>\nhm\n</think>\nso\n" + CALL, False)
    request = ask(hermes)
    whole = generate.Run(request, hermes, ScriptedEngine([]).stream)
    before = [piece for token in ids[:at] for piece in whole.feed(Tokens(0, (token,)))]
    rest = [piece for token in ids[at:] for piece in whole.feed(Tokens(0, (token,)))]
    ended = list(whole.feed(Finished(0, "stop")))
    sequence = msgspec.structs.replace(request.sequences[0], resumed_token_ids=ids[:at])
    resumed = generate.Run(msgspec.structs.replace(request, sequences=(sequence,)), hermes, ScriptedEngine([]).stream)
    assert [piece for token in ids[at:] for piece in resumed.feed(Tokens(0, (token,)))] == rest
    assert list(resumed.feed(Finished(0, "stop"))) == ended
    assert list(resumed.end()) == list(whole.end())
    assert sum(delta.num_tokens for delta in before) == at


def test_log_probabilities_are_counted_as_ever(hermes, ask):
    """Each token's log probability comes once, whatever its text became."""
    ids = hermes.encode("a " + CALL + " b", False)
    events = [Tokens(0, (i,), (TokenLogprob(i, -1.0),)) for i in ids]
    request = ask(hermes, logprobs=True)
    reply = generate.gather(generate.run(ScriptedEngine([*events, Finished(0, "stop")]), request, hermes))
    assert [entry.token_id for entry in reply.choices[0].logprobs] == list(ids)


def test_several_choices(hermes, ask):
    """Choices are read apart, with calls of their own ids."""
    ids = hermes.encode(CALL, False)
    engine = ScriptedEngine([*spoken(0, ids), *spoken(1, hermes.encode("no", False))])
    request = ask(hermes, n=2)
    pieces = _pieces(engine, request, hermes)
    reply = generate.gather(pieces)
    assert [len(choice.calls) for choice in reply.choices] == [1, 0]
    assert [piece.finish_reason for piece in pieces if isinstance(piece, Ended)] == ["tool_calls", "stop"]


def test_custom_tools(hermes, ask):
    """A custom tool's call is the text that it is called with, as it comes."""
    tool = Tool(name="sh", kind="custom")
    said = '<tool_call>\n{"name": "sh", "arguments": {"input": "ls \\"a\\"\\n\\u00e9"}}\n</tool_call>'
    reply, _ = _reply(said, ask(hermes, tools=(tool,)), hermes)
    assert [(call.arguments, call.custom) for call in reply.choices[0].calls] == [('ls "a"\né', True)]
