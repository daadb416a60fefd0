"""Tools, calls and results in prompts: by templates that know them and as text for those that do not."""

import json

import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Message, RawChat, Tool, ToolCall, ToolChoice
from mlflow_llm.serving.tasks.chat import prepare_chat
from mlflow_llm.serving.tasks.prompt.tool_messages import check_tool_messages

HERMES = (
    "{% if tools %}<|start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call></tool_call><|end|>\n"
    "{% endif %}{% for m in messages %}<|start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{{ '\n' + m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}"
    "\n</tool_call>{{ c.id }}{% endfor %}"
    "{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
)
WEATHER = Tool(
    name="get_weather",
    description="The weather <|end|> now",
    parameters={"type": "object", "properties": {"city<|start|>": {"type": "string"}}},
)
ASKED = Message(role="user", content="Rome?")
CALL = ToolCall(id="call_1", name="get_weather", arguments={"city<|start|>": "Ro<|end|>me"})
CALLED = Message(role="assistant", content="", tool_calls=(CALL,))
RESULT = Message(role="tool", content="12 <|end|> C", tool_call_id="call_1")


@pytest.fixture
def roomy(endpoint_of, text_of, text):
    """Return ``roomy(template)``, which makes an endpoint with room for tools; None is a template without tools."""
    return lambda template=None: endpoint_of(model=text_of(template) if template else text, context=8192)


def _raw(*messages, **fields):
    return RawChat(messages=messages, **{"tools": (WEATHER,), **fields})


def _text(endpoint, *messages, **fields):
    chat = prepare_chat(_raw(*messages, **fields), endpoint)
    return endpoint.text.decode(chat.prompt.token_ids, skip_special_tokens=False)


def _tokens(endpoint, token, *messages, **fields):
    """Return how often ``token`` is in the prompt as itself and not as text."""
    [token_id] = endpoint.text.encode(token, False)
    return prepare_chat(_raw(*messages, **fields), endpoint).prompt.token_ids.count(token_id)


def test_a_template_that_knows_tools_gets_them(roomy):
    """Tools, calls and results go to the template in transformers' form; a result has its function's name."""
    text = _text(roomy(HERMES), ASKED, CALLED, RESULT)
    shown = {"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters}
    assert json.dumps({"type": "function", "function": shown}) in text
    call = json.dumps({"name": "get_weather", "arguments": CALL.arguments})
    assert f"<|start|>assistant\n<tool_call>\n{call}\n</tool_call>call_1<|end|>" in text
    assert "<|start|>tool get_weather\n12 <|end|> Ccall_1<|end|>" in text


@pytest.mark.parametrize("template", [None, HERMES, NO_SYSTEM])
def test_no_control_token_comes_in_by_a_tool(roomy, template):
    """Descriptions, names of properties, arguments and results are text, however a template gets them."""
    endpoint = roomy(template)
    harmless = Tool(name="get_weather", description="now", parameters={"type": "object", "properties": {}})
    plain_call = ToolCall(id="call_1", name="get_weather", arguments={"city": "Rome"})
    plain = (
        ASKED,
        Message(role="assistant", content="", tool_calls=(plain_call,)),
        Message(role="tool", content="12 C", tool_call_id="call_1"),
    )
    for token in ("<|start|>", "<|end|>"):
        assert _tokens(endpoint, token, ASKED, CALLED, RESULT) == _tokens(endpoint, token, *plain, tools=(harmless,))


def test_no_control_token_comes_in_where_a_template_writes_python(roomy):
    """A caller's control tokens stay text even where a template prints a dict in Python syntax, which escapes our
    marks.
    """
    source = "<|start|>{{ tools | string }}{{ messages[0].content }}<|end|>"
    endpoint = roomy("{# <tool_call></tool_call> #}" + source)
    assert _tokens(endpoint, "<|end|>", ASKED) == 1
    assert "The weather <|end|> now" in _text(endpoint, ASKED)


def test_a_template_that_knows_no_tools_gets_them_as_text(roomy):
    """The system message lists the tools and says how they are called; calls and results are in the texts."""
    text = _text(roomy(), ASKED, CALLED, RESULT, Message(role="user", content="And?"))
    listed = json.dumps({"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters})
    assert text.startswith("<s><|start|>system\n# Tools")
    assert f'<tools>\n{{"type": "function", "function": {listed}}}\n</tools>' in text
    call = json.dumps({"name": "get_weather", "arguments": CALL.arguments})
    assert f"<|start|>assistant\n<tool_call>\n{call}\n</tool_call><|end|>" in text
    result = "<tool_response>\n12 <|end|> C\n</tool_response>"
    assert f"<|start|>user\n{result}\n\nAnd?<|end|>" in text
    assert text.endswith("<|end|>\n<|start|>assistant\n")


def test_a_system_message_is_kept_before_the_tools(roomy):
    """The caller's system message comes before the description of the tools."""
    assert _text(roomy(), Message(role="system", content="Be brief."), ASKED).startswith(
        "<s><|start|>system\nBe brief.\n\n# Tools"
    )


def test_a_template_without_a_system_role_gets_tools_in_the_first_message(roomy):
    """Results and the user's next words are one message, for templates in which roles take turns."""
    text = _text(roomy(NO_SYSTEM), ASKED, CALLED, RESULT, Message(role="user", content="And?"))
    assert text.startswith("<|start|>user\n# Tools")
    assert "</tool_call>\n\nRome?<|end|>" in text


def test_several_results_are_one_message(roomy):
    """Results that follow each other are in one user's message."""
    calls = tuple(ToolCall(id=i, name="get_weather", arguments={}) for i in "ab")
    results = [Message(role="tool", content=i, tool_call_id=i) for i in "ba"]
    text = _text(roomy(NO_SYSTEM), ASKED, Message(role="assistant", tool_calls=calls), *results)
    assert "<tool_response>\nb\n</tool_response>\n<tool_response>\na\n</tool_response><|end|>" in text


def test_tools_that_may_not_be_called_are_not_shown(roomy):
    """With tool_choice none the prompt is that of a chat without tools."""
    none = _text(roomy(), ASKED, tool_choice=ToolChoice(mode="none"))
    assert none == _text(roomy(), ASKED, tools=None)


def test_same_tools_same_prompt(roomy):
    """A continued conversation begins with the same tokens, so that its prefix can be reused."""
    first = prepare_chat(_raw(ASKED), roomy()).prompt.token_ids
    longer = prepare_chat(_raw(ASKED, CALLED, RESULT), roomy()).prompt.token_ids
    assert longer[: len(first)] == first


def test_tools_of_a_system_message(roomy):
    """Templates that read tools from the system message get them there: Phi's as a text, others as a list."""
    phi = (
        "{% for m in messages %}{{ m.role }}{% if 'tools' in m %}<|tool|>{{ m['tools'] + '<|/tool|>' }}"
        "{% endif %}{% endfor %}"
    )
    text = _text(roomy(phi), ASKED)
    assert text.startswith('system<|tool|>[{"name": "get_weather"')
    glm = (
        "<|observation|>{% for m in messages %}{% for t in m['tools'] %}{{ t.function.name }}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    assert _text(roomy(glm), ASKED) == "<|observation|>get_weatherRome?"


def test_ids_in_the_form_of_the_template(roomy):
    """Mistral's templates take ids of nine letters and digits alone; a call and its answer keep the same one."""
    source = (
        "{{ tools | length }}[TOOL_CALLS]{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} {% endfor %}"
    )
    text = _text(roomy(source), ASKED, CALLED, RESULT)
    asked, answered = text.removeprefix("1[TOOL_CALLS]").split()
    assert asked == answered
    assert len(asked) == 9
    assert asked.isalnum()


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}])
def test_a_tool_without_parameters_has_no_properties(roomy, parameters):
    """A tool without parameters has empty properties, so that templates can iterate over them."""
    source = "<tool_call></tool_call>{% for k in tools[0].function.parameters.properties.items() %}{{ k }}{% endfor %}."
    assert _text(roomy(source), ASKED, tools=(Tool(name="now", parameters=parameters),)).endswith(".")


def test_the_template_for_tools_is_chosen(endpoint_of, text_of):
    """A model with a template named tool_use answers chats with tools by it, as in transformers."""
    text = text_of(HERMES)
    text.templates["tool_use"] = text.templates["default"]
    text.templates["default"] = "{{ raise_exception('not this one') }}"
    assert "get_weather" in _text(endpoint_of(model=text, context=2048), ASKED)


@pytest.mark.parametrize(
    ("messages", "where", "why"),
    [
        ((ASKED, RESULT), "messages[1].tool_call_id", "no call waits"),
        ((ASKED, CALLED, RESULT, RESULT), "messages[3].tool_call_id", "answered already"),
        (
            (ASKED, CALLED, Message(role="tool", content="x", tool_call_id="call_2")),
            "messages[2].tool_call_id",
            "'call_1'",
        ),
        ((ASKED, CALLED), "messages[1].role", "'call_1'"),
        ((ASKED, CALLED, ASKED), "messages[2].role", "messages[1]"),
        (
            (ASKED, Message(role="assistant", tool_calls=(CALL, CALL)), RESULT),
            "messages[1].tool_calls[1].id",
            "no earlier call",
        ),
    ],
)
def test_ids_of_calls(messages, where, why):
    """A tool message answers a call of the assistant's message before it, each once and all of them."""
    with pytest.raises(InvalidField) as caught:
        check_tool_messages(messages)
    assert caught.value.param == where
    assert why in caught.value.message


def test_calls_at_the_end_of_a_prompt_without_a_reply():
    """A prompt that ends in calls can be counted: nothing is generated after it."""
    check_tool_messages((ASKED, CALLED), "closed")


def test_how_calls_are_read(roomy):
    """Calls are parsed for the tools that may be called, and not parsed if there are none."""
    custom = Tool(name="run", kind="custom")
    chosen = ToolChoice(mode="required", names=("run",))
    use = prepare_chat(
        _raw(ASKED, tools=(WEATHER, custom), tool_choice=chosen, parallel_tool_calls=False), roomy()
    ).tools
    assert (use.names, use.custom, use.choice, use.parallel) == (("run",), ("run",), chosen, False)
    assert prepare_chat(_raw(ASKED), roomy()).tools.types == {"get_weather": {"city<|start|>": ("string",)}}
    assert prepare_chat(_raw(ASKED, tool_choice=ToolChoice(mode="none")), roomy()).tools is None


@pytest.mark.parametrize(
    ("opened", "expected"),
    [("<think>\n", True), ("", False), ("<think>\n\n</think>\n\n", False), ("see <think> x", False)],
)
def test_a_prompt_that_opens_the_reasoning(roomy, opened, expected):
    """A template that opens the reasoning at a prompt's end is recognised; the same words of a caller are not."""
    source = "{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant\n" + opened
    chat = prepare_chat(_raw(Message(role="user", content="why <think>"), tools=None), roomy(source))
    assert chat.begins_in_reasoning is expected
