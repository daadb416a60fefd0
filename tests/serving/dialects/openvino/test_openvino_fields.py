"""OpenVINO Model Server's fields: the defaults and limits of its document, and its way to ask for a beam search."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS, dialect_of
from mlflow_llm.serving.dialects.openvino.dialect import OpenVINODialect
from mlflow_llm.serving.interface.errors import InvalidField, NotFound, Overloaded
from mlflow_llm.serving.interface.request import RawBeams, RawChat, RawCompletion, RawSampling

DIALECT = OpenVINODialect()
HI = {"model": "llama3", "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "hello"}]}


def sampling(**fields: Any) -> RawSampling:
    """Return the sampling fields read from a chat and a completion, which must agree."""
    chat = DIALECT.read({**HI, **fields}, "chat")
    completion = DIALECT.read({"model": "llama3", "prompt": "hello", **fields}, "completions")
    assert isinstance(chat, RawChat)
    assert isinstance(completion, RawCompletion)
    assert chat.sampling == completion.sampling
    return chat.sampling


def test_the_documents_defaults() -> None:
    """Fields left out have the documented defaults rather than the model's."""
    expected = RawSampling(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=0, n=1)
    assert sampling() == expected
    given = {"best_of": 1, "n": 1, "length_penalty": 1.0, "diversity_penalty": 1.0, "num_beam_groups": 1}
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": 0, "ignore_eos": None}
    assert sampling(**given, **own, stream=False, use_beam_search=False) == expected


def test_a_search_by_best_of() -> None:
    """best_of gives a search its width and the documented settings; groups have our own field and diversity_penalty
    1.0.
    """
    assert sampling(best_of=4, n=2).beams == RawBeams(width=4, field="best_of")
    assert sampling(best_of=4).n == 1
    asked = {"best_of": 4, "length_penalty": 0.5, "early_stopping": True, "use_beam_search": True}
    assert sampling(**asked).beams == RawBeams(width=4, length_penalty=0.5, early_stopping="first", field="best_of")
    grouped = RawBeams(width=4, num_groups=2, diversity_penalty=1.0, field="best_of")
    assert sampling(best_of=4, num_beam_groups=2).beams == grouped
    stronger = sampling(best_of=4, num_beam_groups=2, diversity_penalty=2.5).beams
    assert stronger is not None
    assert stronger.diversity_penalty == 2.5


def test_a_penalty_of_one_group_changes_nothing() -> None:
    """diversity_penalty changes nothing unless ``num_beam_groups`` asks for several groups."""
    assert sampling(best_of=4, diversity_penalty=3.0) == sampling(best_of=4)


def test_no_end_of_text() -> None:
    """With ``ignore_eos`` max_tokens is at most 4000, and by default that or the rest of the context."""
    found = sampling(ignore_eos=True)
    assert (found.max_tokens, found.clip_max_tokens) == (4000, True)
    assert sampling(ignore_eos=True, max_tokens=4000).max_tokens == 4000
    assert sampling(ignore_eos=False, max_tokens=4001).max_tokens == 4001
    assert sampling().max_tokens is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"n": 2}, "n"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 2, "temperature": 0.5}, "temperature"),
        ({"best_of": 2, "use_beam_search": False}, "use_beam_search"),
        ({"best_of": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"diversity_penalty": 2.0}, "diversity_penalty"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"early_stopping": True}, "early_stopping"),
        ({"ignore_eos": True, "max_tokens": 4001}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "0"}, "seed"),
        ({"stream": "no"}, "stream"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"detokenize": False}, "detokenize"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"bestof": 2}, "bestof"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], field: str) -> None:
    """An invalid field is refused with its name, the value and what is allowed."""
    for body, task in ((HI, "chat"), ({"model": "llama3", "prompt": "hello"}, "completions")):
        with pytest.raises(InvalidField) as refused:
            DIALECT.read({**body, **fields}, task)
        assert refused.value.param == field
        assert json.loads(DIALECT.error(refused.value).body) == {"error": refused.value.message}


def test_what_the_document_lists_as_unsupported() -> None:
    """OpenAI's and vLLM's fields that the document calls unsupported arrive as they do at OpenAI's own path."""
    more = {
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": 3}, "stop": ["a"], "seed": 7,
        "min_p": 0.1, "stop_token_ids": [3], "include_stop_str_in_output": True, "min_tokens": 2,
        "skip_special_tokens": False, "user": "u", "response_format": {"type": "json_object"},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"logprobs": True, "top_logprobs": 2, "tools": [tool], "tool_choice": "auto"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "n": 1}
    asked = HI | more | chat | streamed
    assert DIALECT.read(asked, "chat") == DIALECTS["openai"].read(plain | asked, "chat")  # type: ignore[attr-defined]


def test_its_errors() -> None:
    """An error is a text under ``error`` with its class's status and Retry-After, also within a stream."""
    assert (DIALECT.error(NotFound("nobody")).status, DIALECT.error(NotFound("nobody")).body) == (
        404,
        b'{"error": "nobody"}',
    )
    assert DIALECT.error(Overloaded("busy", retry_after=2)).headers == {"Retry-After": "2"}
    for path in ("/v3", "/v3/nothing", "/v1/config", "/v1/config/reload", "/v3/models/x"):
        assert dialect_of(path) is DIALECTS["openvino"]
