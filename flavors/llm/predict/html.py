"""HTML of models, answers and comparisons for notebooks. Every text is escaped: it may be a model's or a caller's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ....serving.interface.reply import Choice, TextLogprob, Usage

CELL = "text-align:left;vertical-align:top;padding:2px 8px"
TEXT = "white-space:pre-wrap;text-align:left"
NOTE = "color:gray;font-size:smaller"
MAX_TOKENS_SHOWN = 2000  # of a heat map, whose spans are larger than its text


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of two columns; the second holds HTML."""
    cells = "".join(
        f'<tr><th style="{CELL}">{escape(name)}</th><td style="{CELL}">{value}</td></tr>' for name, value in rows
    )
    return f"<table>{cells}</table>"


def of_answer(choices: Sequence[Choice], usage: Usage) -> str:
    """Return the choices of an answer, as a heat map if it has log probabilities, and what it took."""
    note = escape(_usage(usage, choices[0].finish_reason))
    return "".join(map(_choice, choices)) + f'<div style="{NOTE}">{note}</div>'


def of_text(text: str, reasoning: str, usage: Usage | None, finish_reason: str | None) -> str:
    """Return the text of a stream so far."""
    ended = "running" if finish_reason is None else finish_reason
    note = ended if usage is None else _usage(usage, ended)
    return _reasoning(reasoning) + _text(text) + f'<div style="{NOTE}">{escape(note)}</div>'


def of_model(facts: Iterable[tuple[str, Any]], example: str) -> str:
    """Return the facts of a model, and a line to try it."""
    rows = [(name, escape(str(value))) for name, value in facts]
    return table([*rows, ("Try it", f"<code>{escape(example)}</code>")])


def _choice(choice: Choice) -> str:
    calls = "".join(f"<div><code>{escape(f'{call.name}({call.arguments})')}</code></div>" for call in choice.calls)
    shown = _heat_map(choice.text_logprobs) if covers(choice) else _text(choice.text)
    return _reasoning(choice.reasoning) + shown + calls


def covers(choice: Choice) -> bool:
    """Return whether the tokens of the log probabilities make up the text, so that they can stand for it."""
    found = choice.text_logprobs
    whole = b"".join(bytes(one.bytes) for one in found).decode(errors="replace")
    return 0 < len(found) <= MAX_TOKENS_SHOWN and whole.strip() == choice.text.strip()


def _heat_map(tokens: tuple[TextLogprob, ...]) -> str:
    """Return the tokens on a ground that is the redder, the less probable each was; a hint has the probabilities."""
    return f'<div style="{TEXT}">{"".join(map(_token, tokens))}</div>'


def _token(one: TextLogprob) -> str:
    if one.logprob is None:
        return escape(one.token)
    share = math.exp(min(0.0, one.logprob))
    others = (f"{other.token!r} {math.exp(other.logprob):.1%}" for other in one.top if other.logprob is not None)
    hint = escape("\n".join([f"{one.token!r} {share:.1%}", *others]))
    return f'<span title="{hint}" style="background:rgba(220,60,40,{(1 - share) * 0.6:.2f})">{escape(one.token)}</span>'


def _text(text: str) -> str:
    return f'<div style="{TEXT}">{escape(text)}</div>'


def _reasoning(text: str) -> str:
    return f"<details><summary>reasoning</summary>{_text(text)}</details>" if text else ""


def _usage(usage: Usage, finish_reason: str) -> str:
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens, {finish_reason}"
