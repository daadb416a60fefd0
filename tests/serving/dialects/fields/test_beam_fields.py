"""Beam search in OpenAI's dialects: vLLM's fields, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from mlflow_llm.serving.dialects.fields.decode import decode
from mlflow_llm.serving.dialects.fields.tables import OPENAI
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import RawBeams, RawChat, RawCompletion

HI = [{"role": "user", "content": "hi"}]


def beams(**fields: Any) -> RawBeams | None:
    """Return the beam search fields read from a chat and a completion, which must agree."""
    chat = decode(OPENAI, {"messages": HI, **fields}, "chat")
    completion = decode(OPENAI, {"prompt": "hi", **fields}, "completions")
    assert isinstance(chat, RawChat)
    assert isinstance(completion, RawCompletion)
    assert chat.sampling.beams == completion.sampling.beams
    return chat.sampling.beams


def test_the_fields_of_a_search() -> None:
    """A search has ``best_of`` beams, or n, and every search setting arrives."""
    assert beams(use_beam_search=True, n=3) == RawBeams(width=3, field="n")
    asked = beams(
        use_beam_search=True, best_of=6, n=2, length_penalty=-0.5, early_stopping="never", num_beam_groups=3,
        diversity_penalty=1.5, temperature=0, top_k=-1, top_p=1,
    )  # fmt: skip
    assert asked == RawBeams(
        width=6, length_penalty=-0.5, early_stopping="never", num_groups=3, diversity_penalty=1.5, field="best_of"
    )
    early = beams(use_beam_search=True, n=2, early_stopping=False)
    assert early is not None
    assert early.early_stopping == "heuristic"


def test_no_search() -> None:
    """Without ``use_beam_search`` nothing is searched, and ``best_of`` may only say what n says."""
    assert beams() is None
    assert beams(use_beam_search=False, n=2, best_of=2) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 4, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"use_beam_search": True, "n": 4, "diversity_penalty": 1.0}, "diversity_penalty"),
        ({"use_beam_search": True, "n": 4, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 4, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "n": 4, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "n": 4, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "n": 4, "early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": True, "n": 4, "length_penalty": 11}, "length_penalty"),
    ],
)
def test_what_contradicts_a_search(fields: dict[str, Any], field: str) -> None:
    """A field that contradicts a beam search is refused with its name, its value and what is allowed."""
    with pytest.raises(InvalidField) as error:
        beams(**fields)
    assert error.value.param == field
    assert repr(fields[field]).strip("'") in error.value.message
