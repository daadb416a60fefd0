"""Detection of the format of a template's calls."""

import pytest

from mlflow_llm.serving.interface.tool_format import Reasoning
from mlflow_llm.serving.tool_calls.detect import detect, detect_or_generic
from mlflow_llm.serving.tool_calls.formats import FORMATS, REASONING

LLAMA = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}'
    "{% endif %}<|start_header_id|>assistant<|end_header_id|>"
)
TEMPLATES = {
    "hermes": "{% if tools %}within <tool_call></tool_call> tags{% endif %}<|im_start|>",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\n{% endif %}",
    "glm45": "{{ '<tool_call>' + c.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
    "llama3_json": LLAMA,
    "llama4_pythonic": "{% if tools %}[func_name1(params_name1=value)]{% endif %}<|python_start|>",
    "mistral_v3": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] [",
    "mistral_v11": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "granite3": "<|start_of_role|>available_tools<|end_of_role|>{{ tools }}<|tool_call|>",
    "phi4_mini": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '```json' }}",
    "deepseek_v31": "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{{ name }}<|message|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "glm4": "{% for t in item['tools'] %}{{ t }}{% endfor %}<|observation|>",
    "chatglm3": "{% if tools %}{{ tools }}{% endif %}```python\ntool_call({{ args }})<|observation|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_marks_of_a_template(name):
    """Each family of templates is detected by what it writes."""
    assert detect(TEMPLATES[name]).name == name


def test_granite_4_writes_as_hermes_does():
    """Granite's later templates have the marks of Hermes beside their own roles."""
    assert detect("<|start_of_role|>{{ tools }}<tool_call></tool_call>").name == "hermes"


def test_a_template_without_marks_is_not_known():
    """A template without markers of calls gets the generic format, with its own markers of reasoning."""
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert detect(plain) is None
    assert detect_or_generic(plain) == FORMATS["generic"]
    assert detect_or_generic(plain + "</think>").reasoning == REASONING["think"]


def test_reasoning_is_known_by_tokens_or_template():
    """The marks of reasoning are tokens of their own, or stand in the template."""
    assert detect(TEMPLATES["hermes"]).reasoning is None
    assert detect(TEMPLATES["hermes"], ("<think>", "</think>")).reasoning == REASONING["think"]
    assert detect(TEMPLATES["mistral_v11"], ("[THINK]", "[/THINK]")).reasoning == REASONING["magistral"]
    assert detect(TEMPLATES["harmony"], ("<think>", "</think>")).reasoning == REASONING["harmony"]


def _response(**tool_calls):
    fields = {"reasoning_content": {"open": "<r>", "close": "</r>"}, "tool_calls": tool_calls, "content": {}}
    return {"fields": fields, "start_anchor": "x"}


def test_a_response_template_comes_before_the_chat_template():
    """A response template takes precedence over the chat template, for the markers and for reasoning."""
    response = _response(open_pattern=r"<tool_call>\s*<function=(?P<name>\w+)>", content_args={"p": "<parameter=x>"})
    found = detect(LLAMA, (), response)
    assert found.name == "qwen3_coder"
    assert found.reasoning == Reasoning(begin="<r>", end="</r>")


def test_a_response_template_of_its_own():
    """A response template with literal ends around JSON gives a format without a known name."""
    response = _response(open="<<call", close="call>>", content="json", transform={"function": "{content}"})
    found = detect("", (), response)
    assert (found.begin, found.end, found.layout) == (("<<call",), "call>>", "object")


@pytest.mark.parametrize(
    "response", [7, {}, {"fields": 3}, {"fields": {"tool_calls": []}}, _response(open=[3], close=4)]
)
def test_invalid_response_templates_are_ignored(response):
    """An invalid response template is ignored in favour of the chat template."""
    assert detect_or_generic(TEMPLATES["hermes"], (), response).name == "hermes"
