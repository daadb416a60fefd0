"""``Answer``, what the object API returns for a request, and the conversions that its two faces share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...serving.errors import InvalidField
from ...serving.reply import Choice, Usage
from ...serving.request import ValidRequest

Messages = str | Sequence[Mapping[str, Any]]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """A whole answer. ``str(answer)`` is its text; ``choices`` has all of them where ``n`` or prompts were more."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        more = f", {len(self.choices)} choices" if len(self.choices) > 1 else ""
        tokens = f"{self.usage.prompt_tokens}+{self.usage.completion_tokens} tokens"
        return f"Answer({self.text!r}, {self.finish_reason}, {tokens}{more})"


def turns_of(messages: Messages) -> Any:
    """A text is what the user says; what is no conversation is refused by its name, as in a request."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def check_streamable(request: ValidRequest) -> None:
    if len(request.sequences) > 1:
        raise InvalidField("stream", True, "false with more than one choice; predict_stream streams several")


def vector_of(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
