"""Engines with tokenizers, and grammars for them, as the rewriter of schemas makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf
from engine_runs import Outcome
from llguidance import LLMatcher
from tiny_models import COMMON, make_model
from tokenizer_kinds import KINDS, save
from transformers import AutoTokenizer

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar

PADDING = 7  # rows of the model that no token has
COMPACT: Any = {"whitespace_flexible": False}


def bundle_of(kind: str, directory: Path, **more: Any) -> Bundle:
    """Return a tiny random model with a tokenizer of ``kind``, its logits wider than its vocabulary. ``more`` is for
    its configuration."""
    tokenizer = KINDS[kind]()
    size = tokenizer.get_vocab_size() + PADDING
    config = tf.LlamaConfig(**COMMON | {"vocab_size": size, "max_position_embeddings": 512, "pad_token_id": 0} | more)
    make_model(config).save_pretrained(directory / "model")
    return Bundle(
        content_hash=kind,
        tasks=("chat", "completions"),
        model_dir=str(directory / "model"),
        tokenizer_dir=str(save(tokenizer, directory / "tokenizer")),
    )


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar(source=LLMatcher.grammar_from_json_schema(value, overrides=COMPACT), field="response_format", **more)


def regex(value: str, **more: Any) -> Grammar:
    return Grammar(source=LLMatcher.grammar_from_regex(value), field="guided_regex", **more)


def lark(value: str, **more: Any) -> Grammar:
    return Grammar(source=LLMatcher.grammar_from_lark(value), field="guided_grammar", **more)


class Texts:
    """Text decoded from an engine's tokens after other text, as a caller of a grammar sees it."""

    def __init__(self, bundle: Bundle) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(bundle.tokenizer_dir)
        self._anchor: list[int] = self.tokenizer.encode("a", add_special_tokens=False)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def of(self, token_ids: list[int]) -> str:
        backend = self.tokenizer.backend_tokenizer
        whole: str = backend.decode([*self._anchor, *token_ids], skip_special_tokens=True)
        return whole.removeprefix(backend.decode(self._anchor))

    def texts(self, outcome: Outcome) -> dict[int, str]:
        return {index: self.of(tokens) for index, tokens in sorted(outcome.tokens.items())}
