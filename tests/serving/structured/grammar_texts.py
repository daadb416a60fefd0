"""The texts that a grammar accepts, checked by llguidance with a tokenizer of single bytes."""

from __future__ import annotations

from typing import Any

import llguidance

from mlflow_llm.serving.interface.constraint import Constraint, Grammar
from mlflow_llm.serving.structured.grammar import grammar_of

END = 256


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end of text."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
    special_token_ids = (END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), slices=[])
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


def matcher(grammar: Grammar) -> llguidance.LLMatcher:
    """Compile a grammar; raise ``ValueError`` with llguidance's reason if that fails."""
    made = llguidance.LLMatcher(TOKENIZER, grammar.source, log_level=0, limits=_LIMITS)
    if made.is_error():
        raise ValueError(made.get_error())
    return made


def takes(made: llguidance.LLMatcher, text: str | bytes) -> bool:
    """Return whether the grammar accepts the text as a whole."""
    assert made.reset()
    data = text.encode() if isinstance(text, str) else text
    return bool(made.try_consume_tokens(list(data)) == len(data) and made.is_accepting())


def of(kind: Any, value: Any = None) -> llguidance.LLMatcher:
    return matcher(grammar_of(Constraint(kind=kind, value=value, field="field")))
