"""Ollama's chat templates in Jinja: the prompts that Ollama writes, or a refusal that names the line."""

from __future__ import annotations

import pytest
from flavor_models import byte_tokenizer

from mlflow_llm.flavors.llm.convert.ollama.chat_template import converted, with_messages
from mlflow_llm.flavors.llm.convert.ollama.go_template import Unconverted
from mlflow_llm.serving.tasks.prompt.template_trial import check_template

SYSTEM, FIRST, ANSWER, SECOND = (
    {"role": role, "content": text}
    for role, text in (("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"))
)
# the template of https://docs.ollama.com/modelfile, of the older kind
TURNS = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
# of the newer kind, as exporters of fine-tuned models write it
MESSAGES = """{{ if .System }}<|system|>{{ .System }}{{ end }}{{ range .Messages }}{{ if eq .Role "user" }}<|user|>
{{ .Content }}<|assistant|>{{ else if eq .Role "assistant" }}{{ .Content }}<|end|>
{{ end }}{{ end }}"""


def rendered(template: str, *messages) -> str:
    return byte_tokenizer().apply_chat_template(
        list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
    )


def test_turns_are_written_one_after_another() -> None:
    """A template with a prompt is written for each turn; the response of a past turn follows where none is named, and
    the last turn ends before it."""
    text = rendered(converted(TURNS, ""), SYSTEM, FIRST, ANSWER, SECOND)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(converted(TURNS, "<s>"), FIRST) == ("<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_what_follows_the_response_ends_past_turns() -> None:
    """Text after ``.Response`` ends a past turn, and is not there while a response is being written."""
    template = converted("{{ .Prompt }}: {{ .Response }}<|end|>{{ if .System }}never{{ end }}\n", "")
    assert rendered(template, FIRST, ANSWER, SECOND) == "Hi: Hello!<|end|>\nBye: "


def test_a_response_within_a_condition_ends_the_prompt() -> None:
    """The response may be named within an ``if``: all that follows is cut there."""
    template = converted("{{ if .Prompt }}{{ .Prompt }}: {{ .Response }}|{{ else }}none{{ end }};", "")
    assert rendered(template, FIRST, ANSWER, SECOND) == "Hi: Hello!|;Bye: "


def test_a_range_over_messages() -> None:
    """A template that ranges over messages is written once, with all system messages joined."""
    text = rendered(converted(MESSAGES, ""), SYSTEM, FIRST, ANSWER, SECOND)
    assert text == "<|system|>Be kind.<|user|>\nHi<|assistant|>Hello!<|end|>\n<|user|>\nBye<|assistant|>"


def test_consecutive_messages_of_a_role_are_one() -> None:
    """Messages of one role in a row are joined by an empty line, as in Ollama."""
    assert rendered(converted("{{ .Prompt }}>", ""), FIRST, SECOND) == "Hi\n\nBye>"


def test_variables_markers_and_the_last_message() -> None:
    """Trim markers, comments, variables, printf and the idiom for the last message are converted."""
    source = """{{- /* a comment */ -}}
    {{- $first := "none" }}
    {{- range $i, $m := .Messages }}
        {{- $last := eq (len (slice $.Messages $i)) 1 -}}
        {{- if eq .Role "system" }}{{ $first = .Content }}{{ continue }}{{ end }}
        {{- if and (eq $m.Role "user") (not $last) }} a {{ printf "%s/%s" $first .Content }}
        {{- else if ne .Role "user" }}{{ `b"` }}{{ .Content }}
        {{- else if or $last .Content }}{{ "c\\n" }}{{ $i }}{{ end }}
    {{- end }}"""
    assert rendered(converted(source, ""), SYSTEM, FIRST, ANSWER, SECOND) == ' a Be kind./Hib"Hello!c\n3'


def test_parts_for_tools_are_left_out_with_a_warning(caplog) -> None:
    """A part that only tools need is left out, whatever it holds, and a warning names it."""
    source = "{{ if .Tools }}{{ range .Tools }}{{ json . }}{{ end }}{{ else }}no {{ end }}{{ .Prompt }}{{ .Suffix }}"
    assert rendered(converted(source, ""), FIRST) == "no Hi"
    assert "TEMPLATE: without the parts of the template for .Suffix, .Tools" in caplog.text


def test_a_conversation_with_tools_is_refused() -> None:
    """A message of a tool, for which the template has no place, is refused rather than left out."""
    with pytest.raises(Exception, match="messages of system, user and assistant alone"):
        rendered(converted(TURNS, ""), FIRST, {"role": "tool", "content": "7"})


@pytest.mark.parametrize("source", [TURNS, MESSAGES])
def test_converted_templates_can_be_served(source: str) -> None:
    """The sandbox renders them, and their check finds the user's message."""
    assert str(check_template("default", converted(source, "<s>"), byte_tokenizer(), parts=False)) == ""


def test_system_and_examples_come_first() -> None:
    """SYSTEM is there unless the conversation has its own, and the examples of MESSAGE stand before it."""
    template = with_messages(converted(TURNS, ""), "Be brief.", [FIRST, ANSWER])
    assert rendered(template, SECOND) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    own = rendered(template, SYSTEM, SECOND)
    assert "Be kind." in own
    assert "Be brief." not in own
    assert own.index("Be kind.") < own.index("Hello!")
    assert with_messages("x", None, []) == "x"


REFUSED = {
    "many quotes that are not closed": ("{{ " + '"a" ' * 5000, "line 1 of the template: an action is not closed"),
    "too long": ("a" * 1_048_577, "at most"),
    "a function": ("a\n{{ len .Messages }}", r"line 2 of the template: '{{ len .Messages }}' has no conversion"),
    "a pipe": ("{{ .Prompt | json }}", "has no conversion"),
    "a field": ("{{ .Other }}", "has no conversion"),
    "with": ("{{ with .Prompt }}{{ . }}{{ end }}", "has no conversion"),
    "a range": ("{{ range .Tools }}{{ end }}", "has no conversion"),
    "printf": ('{{ printf "%d" .Prompt }}', "has no conversion"),
    "no end": ("{{ if .Prompt }}a", "its end is missing"),
    "an end too many": ("{{ end }}", "has no conversion"),
    "not closed": ("a\n{{ .Prompt", "line 1 of the template: an action is not closed"),
    "nothing": ("{{ if }}{{ end }}", "has no conversion"),
    "a message outside": ("{{ .Content }}", "has no conversion"),
    "parentheses": ("{{ if (eq .Role 1 }}{{ end }}", "has no conversion"),
}


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_conversion_is_refused_by_its_line(source: str, message: str) -> None:
    """Nothing is dropped in silence: an action that is not understood is named with its line."""
    with pytest.raises(Unconverted, match=message):
        converted(source, "")
