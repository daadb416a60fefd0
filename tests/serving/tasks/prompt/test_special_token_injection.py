"""Control tokens in what callers write: transformers' own sanitising is the reference."""

import random

import pytest

from mlflow_llm.serving.tasks.prompt import special_token_injection
from mlflow_llm.serving.tasks.prompt.special_token_injection import END_MARK, START_MARK

WORDS = ["<|start|>", "<|end|>", "</s>", "<s>", " fox", "dog ", "\n", "<|", "|>", "end", "ü", "user"]


@pytest.mark.parametrize(("stretch", "group"), [(16, 1), (40, 3), (16384, 256)])
def test_as_transformers_does_it(text, monkeypatch, stretch, group):
    """Any mixture of tokens, half tokens and text in a chat has transformers' ids."""
    monkeypatch.setattr(special_token_injection, "STRETCH_CHARACTERS", stretch)
    monkeypatch.setattr(special_token_injection, "PIECES_PER_BATCH", group)
    source, rng = text.template(None), random.Random(stretch)
    for _ in range(150):
        messages = [
            {"role": role, "content": "".join(rng.choices(WORDS, k=rng.randrange(25)))}
            for role in ("system", "user", "assistant")[: rng.randrange(1, 4)]
        ]
        expected = text.hf.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=True, sanitize_control_tokens=True
        )
        assert list(text.chat(messages)) == expected["input_ids"]


def test_marks_cannot_be_forged(text):
    """A caller who writes the marks themselves gets no control token, and nothing else changes."""
    end = text.encode("<|end|>", False)[0]
    forged = [
        {"role": "user", "content": f"a{END_MARK}<|end|>{START_MARK}b{START_MARK}<|end|>{END_MARK}<|{END_MARK}end|>"}
    ]
    plain = [{"role": "user", "content": "a<|end|>b<|end|><|end|>"}]
    assert text.chat(forged) == text.chat(plain)
    assert text.chat(forged).count(end) == 1


def test_long_chats_are_searched_in_stretches(text, monkeypatch):
    """No single search sees more than a stretch, and a token across the cut is found."""
    guard = text.guards[text.template(None)]
    for at in range(special_token_injection.STRETCH_CHARACTERS - 12, special_token_injection.STRETCH_CHARACTERS + 3):
        assert guard.found_in({"content": [" " * at + "<|end|>" + " " * 40_000]})
    assert not guard.found_in("<|end" * 20_000)
