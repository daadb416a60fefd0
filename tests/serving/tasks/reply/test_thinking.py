"""Requests that switch a model's reasoning on or off, by the variable of its template."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Message, RawChat
from mlflow_llm.serving.tasks.chat import prepare_chat

TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"
QWEN3 = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
DEEPSEEK = TURNS + "{% if thinking %}<think>{% else %}</think>{% endif %}"
ALWAYS = TURNS + "<think>\n{# until </think> #}"
MAYBE = TURNS + "{# what stands before </think> is left out #}"
HARMONY = TURNS + "{# <|channel|>analysis<|message|> commentary #}"
NEVER = TURNS


@pytest.fixture
def ends(endpoint_of: Any, text_of: Any) -> Any:
    """Return ``ends(template)(thinking)``, which gives what a prompt has after its turns."""

    def of(template: str) -> Callable[[str | None], str]:
        endpoint = endpoint_of(model=text_of(template))

        def end(thinking: Any) -> str:
            chat = prepare_chat(RawChat(messages=(Message(role="user", content="hello"),), thinking=thinking), endpoint)
            text = endpoint.text.decode(chat.prompt.token_ids, skip_special_tokens=False)
            return str(text).rpartition("assistant\n")[2]

        return end

    return of


@pytest.mark.parametrize(
    ("template", "on", "off", "unsaid"),
    [
        (QWEN3, "", "<think>\n\n</think>\n\n", ""),
        (DEEPSEEK, "<think>", "</think>", "</think>"),
        (MAYBE, "", "", ""),
    ],
    ids=["enable_thinking", "thinking", "no switch"],
)
def test_switches(ends: Any, template: str, on: str, off: str, unsaid: str) -> None:
    """The template's variable switches reasoning on or off, and without a choice the template decides."""
    end = ends(template)
    assert (end("enabled"), end("adaptive"), end("disabled"), end(None)) == (on, on, off, unsaid)


@pytest.mark.parametrize("template", [ALWAYS, HARMONY], ids=["opened by the prompt", "harmony"])
def test_a_model_that_always_reasons(ends: Any, template: str) -> None:
    """Thinking cannot be switched off for a model that always reasons."""
    end = ends(template)
    assert end("enabled") == end(None)
    with pytest.raises(InvalidField, match=r"thinking\.type: 'disabled' is not allowed; expected enabled"):
        end("disabled")


@pytest.mark.parametrize("asked", ["enabled", "adaptive"])
def test_a_model_that_never_reasons(ends: Any, asked: str) -> None:
    """Thinking cannot be switched on for a model that never reasons, and the error has the word that was sent."""
    end = ends(NEVER)
    assert end("disabled") == end(None)
    with pytest.raises(InvalidField, match=rf"thinking\.type: '{asked}' is not allowed; expected disabled"):
        end(asked)


EFFORT = TURNS + "{{ reasoning_effort }}"
BOTH = TURNS + "{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
READS_NO_EFFORT = "reasoning_effort: 'low' is not allowed; expected none or null: this model's chat template does not"


@pytest.fixture
def ends_with(endpoint_of: Any, text_of: Any) -> Any:
    """Return ``ends_with(template, **fields)``: what the prompt of a chat with these fields has after its turns."""

    model_of = functools.cache(text_of)

    def end(template: str, **fields: Any) -> str:
        endpoint = endpoint_of(model=model_of(template))
        chat = prepare_chat(RawChat(messages=(Message(role="user", content="hello"),), **fields), endpoint)
        text = endpoint.text.decode(chat.prompt.token_ids, skip_special_tokens=False)
        return str(text).rpartition("assistant\n")[2]

    return end


@pytest.mark.parametrize(
    ("template", "effort", "end"),
    [
        (EFFORT, "low", "low"),
        (EFFORT, "none", "none"),
        (BOTH, "high", "high"),
        (BOTH, "none", "<off>"),
        (QWEN3, "none", "<think>\n\n</think>\n\n"),
        (MAYBE, "none", ""),
    ],
)
def test_effort(ends_with: Any, template: str, effort: str, end: str) -> None:
    """A template that reads the effort gets it; none is the switch of reasoning where there is one."""
    assert ends_with(template, reasoning_effort=effort) == end


@pytest.mark.parametrize("template", [NEVER, QWEN3])
def test_an_effort_that_the_template_does_not_read(ends_with: Any, template: str) -> None:
    """It would change nothing, so it is refused by its name."""
    with pytest.raises(InvalidField, match=READS_NO_EFFORT):
        ends_with(template, reasoning_effort="low")


def test_two_efforts(ends_with: Any) -> None:
    """The field and the template's variable are the same, or one of them is refused."""
    assert ends_with(EFFORT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"}) == "low"
    with pytest.raises(InvalidField, match=r"reasoning_effort: 'low' .* expected 'high', which chat_template_kwargs"):
        ends_with(EFFORT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})


def test_no_effort_of_a_model_that_always_reasons(ends_with: Any) -> None:
    """It cannot be told not to, by this field either."""
    with pytest.raises(InvalidField, match="reasoning_effort: 'none' is not allowed; expected another"):
        ends_with(HARMONY, reasoning_effort="none")
