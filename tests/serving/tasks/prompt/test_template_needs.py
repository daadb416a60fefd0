"""Chat templates that need more of a request than messages: what they need is found out, and asked for by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Message, RawChat, TextPart
from mlflow_llm.serving.tasks.chat import prepare_chat

TURNS = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
PERSONA = "You are {{ persona.upper() }}." + TURNS
MODE = "{% if mode not in ['rag', 'chat'] %}{{ raise_exception('which mode?') }}{% endif %}" + TURNS
ONE = "{{ messages[-1].content if messages | length == 1 else raise_exception('one turn only') }}"
FIRST = "Question: {{ messages[0].content }}"
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
)
HELLO = (Message(role="user", content="hello"),)
THREE = (*HELLO, Message(role="assistant", content="dog"), Message(role="user", content="world"))


@pytest.fixture
def prompt(endpoint_of: Any, text_of: Any) -> Any:
    """Return ``prompt(template, **fields)``: the text of a chat's prompt."""

    def of(template: str, **fields: Any) -> str:
        endpoint = endpoint_of(model=text_of(template))
        chat = prepare_chat(RawChat(**{"messages": HELLO, **fields}), endpoint)
        return str(endpoint.text.decode(chat.prompt.token_ids, skip_special_tokens=False))

    return of


@pytest.mark.parametrize(
    ("template", "name", "value", "begins"),
    [(PERSONA, "persona", "bob", "You are BOB.<|start|>user hello"), (MODE, "mode", "rag", "<|start|>user hello")],
    ids=["persona", "mode"],
)
def test_a_variable_that_a_template_needs(
    endpoint_of: Any, text_of: Any, template: str, name: str, value: str, begins: str
) -> None:
    """A request that gives it is rendered, one that does not is refused by the variable's name."""
    endpoint = endpoint_of(model=text_of(template))
    chat = prepare_chat(RawChat(messages=THREE, chat_template_kwargs={name: value}), endpoint)
    assert endpoint.text.decode(chat.prompt.token_ids, skip_special_tokens=False).startswith(begins)
    with pytest.raises(InvalidField, match=f"chat_template_kwargs.{name}: None is not allowed; expected a value: this"):
        prepare_chat(RawChat(messages=THREE), endpoint)


@pytest.mark.parametrize("template", [ONE, FIRST], ids=["refuses", "reads the first"])
def test_a_template_of_one_turn(endpoint_of: Any, text_of: Any, template: str) -> None:
    """It takes one message of the user; further turns are refused, also where the template would drop them."""
    endpoint = endpoint_of(model=text_of(template))
    chat = prepare_chat(RawChat(messages=HELLO), endpoint)
    assert "hello" in endpoint.text.decode(chat.prompt.token_ids)
    with pytest.raises(InvalidField, match=r"messages: \['user', 'assistant', 'user'\] is not allowed; expected one"):
        prepare_chat(RawChat(messages=THREE), endpoint)


def test_a_template_that_reads_parts(prompt: Any) -> None:
    """It gets content as a list of parts, however it was sent."""
    assert prompt(PARTS, messages=THREE) == "user: hello;assistant: dog;user: world;"


def test_parts_of_a_request(prompt: Any) -> None:
    """Parts that a caller sends are joined before a template that reads parts gets them too."""
    both = Message(role="user", content=(TextPart("hel"), TextPart("lo")))
    assert prompt(PARTS, messages=(both,)) == "user: hello;"


def test_other_templates_need_nothing(prompt: Any) -> None:
    """A variable that may be missing is not asked for."""
    assert prompt("{{ greeting }}" + TURNS, messages=THREE).count("<|start|>") == 3
