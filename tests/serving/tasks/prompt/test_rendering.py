"""Chat templates rendered in a confined process: transformers' text to the letter, within limits."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.errors import Overloaded, PackagingError, RequestError
from mlflow_llm.serving.sandbox import MAX_TEMPLATE, Limits, Refused
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt import rendering
from mlflow_llm.serving.tasks.prompt.rendering import Renderer, check_length, read_template

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}|{{ m.content | trim }}{{ eos_token }}\n  {% endfor %}",
    "  {% if true %}\n   x{% endif %}\n{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls|tojson }}{%break%}{% endif %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ flag | default('none') }}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}{{ dict(a=1)}}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ messages[0].reasoning_content }}",
    "{{ messages[-1].thinking }}{{ flag.deep[1] }}{{ number * 2 }}{{ messages[0].content.split('<')[-1] }}",
    "{{ messages[0].content[::-1] | upper }}{{ messages[0] }}{{ nothing }}",
]


def test_as_transformers_renders(text):
    """A rendered text, or error, equals that of apply_chat_template."""
    rng = random.Random(5)
    renderer = Renderer(text.hf)
    variables = {"flag": {"deep": [1, 2.5]}, "number": 2**70, "bos_token": "<own>"}
    for _ in range(12):
        messages = [
            {"role": role, "content": "".join(rng.choices("aé 😀<|end|>\n", k=20)), "reasoning_content": None}
            for role in ("system", "user", "assistant")[: rng.randrange(1, 4)]
        ]
        messages[-1]["reasoning_content"] = "so"
        messages[0]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": [1, None, True, "ü"]}}}]
        for template in TEMPLATES:
            wanted = text.hf.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **variables
            )
            assert renderer.text(messages, template, variables) == wanted


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages.x.y }}", "{{ ''.__class__.mro() }}"])
def test_errors_are_those_of_transformers(text, template):
    """A template's error has the same class and words as in this process."""
    with pytest.raises(Exception) as wanted:
        text.hf.apply_chat_template([{"role": "user"}], chat_template=template, tokenize=False)
    with pytest.raises(Refused) as caught:
        Renderer(text.hf).text([{"role": "user"}], template, {})
    assert (caught.value.kind, caught.value.message) == (type(wanted.value).__name__, str(wanted.value))


def test_a_request_that_is_stopped(endpoint, monkeypatch):
    """A template stopped at its limit is a 400 that names template and limit; without a process it is overload."""
    tight = Limits(seconds=0.5, memory=100 << 20, output=50)
    monkeypatch.setattr(rendering, "render_limits", lambda size, context: tight)
    raw = DIALECTS["openai"].read({"messages": [{"role": "user", "content": "a" * 100}]}, "chat")
    with pytest.raises(RequestError, match="chat template was stopped: it took more than 50 characters") as caught:
        prepare(raw, endpoint)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    rendering.POOL.close()
    with pytest.raises(Overloaded, match="cannot be rendered now"):
        prepare(raw, endpoint)


def test_limits_grow_with_the_request(text):
    """A caller's own long text is within limits that its model's template alone would exceed."""
    renderer = Renderer(text.hf)
    content = "wörd " * 600_000
    assert renderer.render([{"role": "user", "content": content}], "{{ messages[0].content * 3 }}", {}, 512)
    with pytest.raises(RequestError, match="characters of output"):
        renderer.render([{"role": "user", "content": "a" * 10}], "{{ messages[0].content * 200000 }}", {}, 512)


def test_templates_too_long_or_too_hard_to_read():
    """A template of megabytes is refused by name, and so is one that takes too much to parse."""
    with pytest.raises(PackagingError, match=r"chat_template 'rag': 1048577 characters; at most 1048576"):
        check_length("rag", "a" * (MAX_TEMPLATE + 1))
    assert read_template("deep", "{{" + "(" * 400_000 + "}}").variables is None
    assert read_template("constant", "{{ 'a' * 10**10 }}{{ b }}").variables == {"b"}


def test_a_trusted_tokenizer_class_renders_with_its_own_code(text):
    """A trusted tokenizer class with its own apply_chat_template renders the chat."""

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation, **kwargs):
            return "own"

    tokenizer = Own(tokenizer_object=text.backend)
    assert Renderer(tokenizer).text([{"role": "user", "content": "a"}], "{{ 1 }}", {}) == "own"
