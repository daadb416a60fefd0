"""The fields of a request about single tokens: their values for the engine, and refusals."""

import numpy as np
import pytest
from msgspec.structs import replace

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import RawCompletion, RawSampling
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.token_lists import spellings


def _sampling(endpoint, **asked):
    return prepare(RawCompletion(prompts=("hello",), sampling=RawSampling(**asked)), endpoint).sampling


def _bias(*values):
    return np.array(values, dtype="<f4").tobytes()


def test_a_bad_word_is_meant_however_it_is_written(any_text):
    """A bad word gives its distinct token sequences at the beginning, after a space and within a line; leading spaces
    are ignored.
    """
    found, *others = spellings(["dog", "  dog", "  "], any_text)
    assert {any_text.encode("dog", False), any_text.encode(" dog", False)} <= set(found)
    assert others == [found, ()]
    line = any_text.encode("\ndog", False)
    assert any(line[-len(run) :] == run for run in found)
    assert len(set(found)) == len(found)


def test_fields_that_say_nothing_change_nothing(endpoint):
    """Empty lists, 0, -1 and a bias of zeros are as if they were not there."""
    V = endpoint.info.vocab_size
    nothing = {
        "bad_words": (),
        "stop_sequences": (),
        "no_repeat_ngram_size": 0,
        "embedding_bias": _bias(*[0.0] * V),
        "end_id": -1,
        "penalize_prompt": False,
    }
    assert _sampling(endpoint, **nothing) == _sampling(endpoint)


def test_lists_of_tokens(endpoint, text):
    """Words as texts and tokens are one list; stop sequences of one token are stop tokens; a bias stays as it is."""
    bias = _bias(*range(endpoint.info.vocab_size - 1), -np.inf)
    found = _sampling(
        endpoint,
        bad_words=("dog", (5, 6), (5, 6)),
        stop_sequences=((7, 8), (9,), (7, 8)),
        stop_token_ids=(10,),
        no_repeat_ngram_size=3,
        embedding_bias=bias,
        penalize_prompt=True,
    )
    assert found.bad_words == (*spellings(["dog"], text)[0], (5, 6))
    assert (found.stop_sequences, found.stop_token_ids) == (((7, 8),), (*text.eos_token_ids, 9, 10))
    assert (found.no_repeat_ngram_size, found.embedding_bias, found.penalize_prompt) == (3, bias, True)


def test_an_end_of_the_callers_own(endpoint):
    """end_id takes the place of the model's ends of text, and of them alone."""
    assert _sampling(endpoint, end_id=5).stop_token_ids == (5,)
    assert _sampling(endpoint, end_id=5, stop_token_ids=(6,)).stop_token_ids == (5, 6)
    assert _sampling(endpoint, end_id=-1, ignore_eos=True).stop_token_ids == ()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"bad_words": ("x",) * 1025}, "bad_words"),
        ({"bad_words": ("x" * 70_000,)}, "bad_words"),
        ({"bad_words": ((5,) * 20_000,)}, "bad_words"),
        ({"bad_words": ("x", "  ")}, "bad_words[1]"),
        ({"bad_words": ((5, 10**6),)}, "bad_words[0]"),
        ({"bad_words": ((),)}, "bad_words[0]"),
        ({"stop_sequences": ((5, 6),) * 65}, "stop_sequences"),
        ({"stop_sequences": ((5,) * 40_000,)}, "stop_sequences"),
        ({"stop_sequences": ((5, 6), (-1,))}, "stop_sequences[1]"),
        ({"stop_sequences": ((),)}, "stop_sequences[0]"),
        ({"embedding_bias": b"123"}, "embedding_bias"),
        ({"embedding_bias": _bias(1.0, 2.0)}, "embedding_bias"),
        ({"end_id": -2}, "end_id"),
        ({"end_id": 10**6}, "end_id"),
        ({"end_id": 5, "ignore_eos": True}, "end_id"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ],
)
def test_what_is_refused(endpoint, asked, field):
    """An invalid value is refused with its name and what is allowed, in one line."""
    with pytest.raises(InvalidField) as caught:
        _sampling(endpoint, **asked)
    assert caught.value.param == field
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (np.nan, "embedding_bias[3]"),
        (np.inf, "embedding_bias[3]"),
        (2e9, "embedding_bias[3]"),
        (None, "embedding_bias"),
    ],
)
def test_invalid_biases_are_refused(endpoint, value, field):
    """Biases that are too large, or leave no token, are refused."""
    values = np.full(endpoint.info.vocab_size, -np.inf if value is None else 0.0)
    values[3] = -np.inf if value is None else value
    with pytest.raises(InvalidField) as caught:
        _sampling(endpoint, embedding_bias=_bias(*values))
    assert caught.value.param == field


def test_fields_of_requests(endpoint, text):
    """vLLM's bad_words, which may also be tokens, and transformers' no_repeat_ngram_size are accepted."""
    body = {"prompt": "hello", "bad_words": ["dog", [5, 6]], "no_repeat_ngram_size": 2, "seed": 0}
    found = prepare(DIALECTS["openai"].read(body), endpoint).sampling
    asked = {"bad_words": ("dog", (5, 6)), "no_repeat_ngram_size": 2}
    assert found == _sampling(endpoint, **asked)
    assert replace(found, bad_words=(), no_repeat_ngram_size=0) == _sampling(endpoint)


@pytest.mark.parametrize("words", ["dog", [""], [1], [[]], [["a"]], [[-1]], [[1.5]], ["x"] * 1025, {"a": 1}])
def test_invalid_bad_words_are_refused(words):
    """Anything but texts and lists of token ids is refused with its place."""
    with pytest.raises(InvalidField, match=r"^bad_words"):
        DIALECTS["openai"].read({"prompt": "hello", "bad_words": words})
