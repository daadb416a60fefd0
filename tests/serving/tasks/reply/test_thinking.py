"""Whether a model reasons before it answers, where a request says so: by the switch that its template has."""

from __future__ import annotations

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
    """``ends(template)(thinking)``: what a prompt has after its turns."""

    def of(template: str) -> Callable[[bool | None], str]:
        endpoint = endpoint_of(model=text_of(template))

        def end(thinking: bool | None) -> str:
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
    """The template's variable says it; unsaid is the template's own way."""
    end = ends(template)
    assert (end(True), end(False), end(None)) == (on, off, unsaid)


@pytest.mark.parametrize("template", [ALWAYS, HARMONY], ids=["opened by the prompt", "harmony"])
def test_a_model_that_always_reasons(ends: Any, template: str) -> None:
    """It cannot be told not to."""
    end = ends(template)
    assert end(True) == end(None)
    with pytest.raises(InvalidField, match="thinking: 'disabled' is not allowed; expected enabled"):
        end(False)


def test_a_model_that_never_reasons(ends: Any) -> None:
    """It cannot be told to."""
    end = ends(NEVER)
    assert end(False) == end(None)
    with pytest.raises(InvalidField, match="thinking: 'enabled' is not allowed; expected disabled"):
        end(True)
