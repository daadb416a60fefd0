"""``Answer``, the object API's reply to a request, and the conversions shared by its threaded and asyncio forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ....serving.dialects.openai import replies
from ....serving.dialects.openai.scoring_replies import order
from ....serving.interface.errors import InvalidField
from ....serving.interface.reply import Choice, Delta, Done, Ended, Piece, Reply, ReplyCall, Usage
from ....serving.interface.request import ValidRequest
from ....serving.tasks.reply.pieces import Gathered
from . import html

Messages = str | Sequence[Mapping[str, Any]]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """A whole reply. ``str(answer)`` is the text of its first choice.

    Attributes:
        choices: ``n`` choices for each prompt, in order, with text, reasoning, tool calls, finish reason and log
            probabilities.
        usage: tokens of the prompt (``prompt_tokens``, including ``cached_tokens``) and of all choices
            (``completion_tokens``, including ``reasoning_tokens``); ``draft_tokens`` and ``accepted_draft_tokens``
            count speculative decoding.
    """

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def texts(self) -> list[str]:
        """The text of each choice."""
        return [choice.text for choice in self.choices]

    @property
    def reasoning(self) -> str:
        """The reasoning that the model wrote before the text of the first choice; "" if there is none."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ReplyCall, ...]:
        """The tool calls of the first choice: ``id``, ``name`` and ``arguments`` (JSON text)."""
        return self.choices[0].calls

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message in OpenAI's form, to send back ahead of the tools' results."""
        return dict(replies.message(self.choices[0]))

    @property
    def finish_reason(self) -> str:
        """Return why the first choice ended: ``stop``, ``length`` or ``tool_calls``."""
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        more = f", {len(self.choices)} choices" if len(self.choices) > 1 else ""
        tokens = f"{self.usage.prompt_tokens}+{self.usage.completion_tokens} tokens"
        calls = "".join(f", {call.name}({call.arguments})" for call in self.tool_calls)
        return f"Answer({self.text!r}{calls}, {self.finish_reason}, {tokens}{more})"

    def _repr_html_(self) -> str:
        return html.of_answer(self.choices, self.usage)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The answers of several adapters to one prompt, by adapter; ``base`` is the model without one.

    A notebook shows it as a table; ``frame`` has the same as a DataFrame.
    """

    answers: dict[str, Answer]

    @property
    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each adapter: text, finish reason and tokens."""
        rows = {
            name: (answer.text, answer.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)
            for name, answer in self.answers.items()
        }
        columns = ["text", "finish_reason", "prompt_tokens", "completion_tokens"]
        found = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
        return found.rename_axis("adapter")

    def __getitem__(self, adapter: str) -> Answer:
        return self.answers[adapter]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {answer.text}" for name, answer in self.answers.items())

    def _repr_html_(self) -> str:
        return html.table((name, answer._repr_html_()) for name, answer in self.answers.items())


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked document: its index in the request, its relevance score, and its text."""

    index: int
    score: float
    document: str


def scores_of(reply: Reply, first: str | list[str], second: str | list[str]) -> Any:
    """Return the score of two texts, or an array of scores if lists were compared."""
    if isinstance(first, str) and isinstance(second, str):
        return reply.scores[0]
    return np.array(reply.scores, dtype=np.float32)


def ranked_of(request: ValidRequest, reply: Reply) -> list[Ranked]:
    """Return the documents of ``reply``, best first."""
    assert request.scoring is not None
    texts = request.scoring.documents or ("",) * len(reply.scores)
    return [Ranked(index, reply.scores[index], texts[index]) for index in order(request, reply)]


class StreamedText:
    """The state shared by the text streams of threads and of coroutines: the reply so far."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self._calls = Gathered()
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    def take(self, piece: Piece) -> str:
        """Return the new text in ``piece``, and keep everything else that it holds."""
        if isinstance(piece, Done):
            self.usage = piece.usage
        elif isinstance(piece, Ended):
            self.finish_reason = piece.finish_reason
        elif isinstance(piece, Delta):
            self.text += piece.text
            if piece.reasoning or piece.calls:
                self.reasoning += piece.reasoning
                self._calls.add(piece)
            return piece.text
        return ""

    @property
    def tool_calls(self) -> tuple[ReplyCall, ...]:
        """The tool calls so far; the arguments of the last may still be incomplete."""
        return self._calls.calls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, {self.finish_reason or 'running'})"

    def _repr_html_(self) -> str:
        return html.of_text(self.text, self.reasoning, self.usage, self.finish_reason)


def turns_of(messages: Messages) -> Any:
    """Return ``messages`` in a request's form: a text becomes one user message. They are checked with the request."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def check_streamable(request: ValidRequest) -> None:
    """Raise ``InvalidField`` for more than one choice: a ``TextStream`` is one text."""
    if len(request.sequences) > 1:
        raise InvalidField("stream", True, "false with more than one choice; predict_stream streams several")


def vector_of(data: bytes) -> Vectors:
    """Return little-endian float32 bytes as an array ``[dim]``."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
