"""``Answer``, what the object API returns for a request, and the conversions that its two faces share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...serving.dialects import openai_replies
from ...serving.dialects.scoring_replies import order
from ...serving.errors import InvalidField
from ...serving.reply import Choice, Delta, Done, Ended, Piece, Reply, ReplyCall, Usage
from ...serving.request import ValidRequest
from ...serving.tasks.pieces import Gathered

Messages = str | Sequence[Mapping[str, Any]]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """A whole reply. ``str(answer)`` is the text of its first choice.

    Attributes:
        choices: one for each prompt and each of ``n``, in order: text, reasoning, tool calls, finish reason, log
            probabilities.
        usage: tokens of the prompt (``prompt_tokens``, ``cached_tokens``) and of all choices (``completion_tokens``,
            of which ``reasoning_tokens``; of drafts ``draft_tokens`` and ``accepted_draft_tokens``).
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
        """What the model thought before the text of the first choice; "" where it does not say."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ReplyCall, ...]:
        """The tools that the first choice calls: ``id``, ``name`` and ``arguments``, which are JSON."""
        return self.choices[0].calls

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message in OpenAI's form, to be sent back before what the tools have answered."""
        return openai_replies.message(self.choices[0])

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended: ``stop``, ``length`` or ``tool_calls``."""
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        more = f", {len(self.choices)} choices" if len(self.choices) > 1 else ""
        tokens = f"{self.usage.prompt_tokens}+{self.usage.completion_tokens} tokens"
        calls = "".join(f", {call.name}({call.arguments})" for call in self.tool_calls)
        return f"Answer({self.text!r}{calls}, {self.finish_reason}, {tokens}{more})"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document of a ranking: its place in the request, how relevant it is, and its text."""

    index: int
    score: float
    document: str


def scores_of(reply: Reply, first: str | list[str], second: str | list[str]) -> Any:
    """The score of two texts, or an array of scores where lists were compared."""
    if isinstance(first, str) and isinstance(second, str):
        return reply.scores[0]
    return np.array(reply.scores, dtype=np.float32)


def ranked_of(request: ValidRequest, reply: Reply) -> list[Ranked]:
    """Best first."""
    assert request.scoring is not None
    texts = request.scoring.documents or ("",) * len(reply.scores)
    return [Ranked(index, reply.scores[index], texts[index]) for index in order(request, reply)]


class StreamedText:
    """What the text streams of threads and of coroutines have in common: what has been said so far."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self._calls = Gathered()
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    def take(self, piece: Piece) -> str:
        """The new text that ``piece`` has; what else it says is kept."""
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
        """The tools that have been called so far, the last one with as much of its arguments as there is."""
        return self._calls.calls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, {self.finish_reason or 'running'})"


def turns_of(messages: Messages) -> Any:
    """``messages`` as a request has them: a text is one message of the user. Checked where requests are."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def check_streamable(request: ValidRequest) -> None:
    """Raises ``InvalidField`` for more than one choice: a ``TextStream`` is one text."""
    if len(request.sequences) > 1:
        raise InvalidField("stream", True, "false with more than one choice; predict_stream streams several")


def vector_of(data: bytes) -> Vectors:
    """Little-endian float32 as an array ``[dim]``."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
