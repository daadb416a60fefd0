"""Bounds on fields that multiply a request's work, checked before it runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.dialects.fields.text_readers import MAX_VARIABLE_CHARACTERS, template_variables
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply_size import fixed_size

HI = [{"role": "user", "content": "hello world"}]
KIB = 2**10


def _valid(endpoint: Any, **body: object) -> Any:
    return prepare(DIALECTS["mlflow"].read(body), endpoint)


def _refused(endpoint: Any, field: str, allowed: str, **body: object) -> None:
    with pytest.raises(InvalidField, match=allowed) as caught:
        _valid(endpoint, **body)
    assert caught.value.param == field


def test_a_suffix_times_its_choices(endpoint_of):
    """A suffix is counted in each choice of each prompt, in bytes; at the bound it passes, one byte more names it."""
    small = endpoint_of(max_reply_bytes=64 * KIB)
    assert fixed_size(_valid(small, prompt=["a", "b"], n=4, suffix="é" * (4 * KIB)), 0) == 64 * KIB
    reported = re.escape("suffix: '8193 bytes in 8 choices' is not allowed; expected at most 65536 bytes in a reply")
    _refused(small, "suffix", reported, prompt=["a", "b"], n=4, suffix="x" * (8 * KIB + 1))


def test_an_echo_times_its_choices(endpoint_of):
    """An echoed prompt is counted in each of its choices."""
    prompt = "hello " * 40
    _refused(endpoint_of(max_reply_bytes=KIB), "echo", "at most 1024 bytes", prompt=prompt, n=8, echo=True)
    assert fixed_size(_valid(endpoint_of(), prompt=prompt, n=8, echo=True), 0) == 8 * 240


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("top_logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 20}),
        ("logprobs", {"prompt": "hello", "logprobs": 20}),
        ("logprobs", {"prompt": "hello hello", "logprobs": 20, "echo": True}),
    ],
)
def test_log_probabilities_times_tokens_times_choices(endpoint_of, field, body):
    """Alternatives are counted for each token that may come, and for those of an echoed prompt, in each choice."""
    small = endpoint_of(max_reply_bytes=64 * KIB)
    _valid(small, **body, max_tokens=8)
    _refused(small, field, "at most 682 tokens and alternatives", **body, max_tokens=8, n=5)


def test_inputs_times_dimensions(endpoint_of):
    """Vectors are counted by their dimensions, which may be fewer, and by their encoding, which may be shorter."""
    endpoint = endpoint_of(max_reply_bytes=KIB)
    width = endpoint.info.embedding_dim * 20
    maximum = KIB // width
    _refused(endpoint, "input", f"at most {maximum} in one request", input=["a"] * (maximum + 1))
    assert len(_valid(endpoint, input=["a"] * maximum).sequences) == maximum
    assert len(_valid(endpoint, input=["a"] * (maximum + 1), encoding_format="base64").sequences) == maximum + 1
    assert len(_valid(endpoint, input=["a"] * (maximum + 1), dimensions=1).sequences) == maximum + 1


def test_prompts_times_choices(endpoint_of):
    """The tokens of prompts are counted once a choice, as the engine keeps them; without choices they are not."""
    small = endpoint_of(max_copied_tokens=100)
    tokens = len(_valid(small, prompt="hello " * 10).sequences[0].prompt_token_ids)
    _valid(small, prompt="hello " * 10, n=100 // tokens)
    _refused(small, "n", rf"in \[1, {100 // tokens}\]", prompt="hello " * 10, n=100 // tokens + 1)
    assert _valid(small, prompt="hello " * 100).num_prompt_tokens > 100


def test_lists_are_bounded_before_they_are_read(endpoint):
    """Too many prompts, inputs and messages are counted, not read: nothing is said of the last, which is no text."""
    many = ["a"] * 2048 + [7]
    _refused(endpoint, "prompt", "at most 2048", prompt=many)
    _refused(endpoint, "input", "at most 2048", input=many)
    _refused(endpoint, "messages", "at most 4096", messages=HI * 4096 + [7])


def test_template_variables_are_bounded():
    """Characters, entries and keys of chat_template_kwargs count together, however deep they lie."""
    assert template_variables({"a": ["x" * 100]}, "v") == {"a": ["x" * 100]}
    for value in (
        {"a": "x" * MAX_VARIABLE_CHARACTERS},
        {"a": [0] * MAX_VARIABLE_CHARACTERS},
        {"a": {"x" * MAX_VARIABLE_CHARACTERS: 1}},
    ):
        with pytest.raises(InvalidField, match=f"at most {MAX_VARIABLE_CHARACTERS}"):
            template_variables(value, "chat_template_kwargs")
