"""Requests for logits: what is refused before anything runs, and which sequence has the context's."""

import msgspec
import pytest

from mlflow_llm.serving.interface.engine import Capabilities
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import RawBeams, RawCompletion, RawSampling
from mlflow_llm.serving.tasks.prepare import prepare


@pytest.fixture
def ask(endpoint):
    def build(prompts=((5, 6, 7),), *, stream=False, maximum=10**6, **sampling):
        can = Capabilities(beam_search=True)
        info = msgspec.structs.replace(endpoint.info, vocab_size=1000, max_logits_bytes=maximum, capabilities=can)
        raw = RawCompletion(prompts=prompts, stream=stream, sampling=RawSampling(**{"max_tokens": 2, **sampling}))
        return prepare(raw, type(endpoint)(name="x", info=info, text=endpoint.text))

    return build


@pytest.mark.parametrize(
    ("asked", "field", "size"),
    [
        ({"context_logits": True}, "context_logits", 12_000),
        ({"generation_logits": True, "n": 4}, "generation_logits", 32_000),
        ({"context_logits": True, "generation_logits": True, "n": 2}, "generation_logits", 28_000),
        ({"context_logits": True, "prompts": ((5, 6), (7,)), "n": 2}, "context_logits", 12_000),
        ({"generation_logits": True, "beams": RawBeams(width=3)}, "generation_logits", 24_000),
    ],
)
def test_too_many(ask, asked, field, size):
    """The error has the size in bytes and the bound, with one float32 row a token and all beams counted."""
    ask(**asked, maximum=size)
    with pytest.raises(InvalidField, match=f"^{field}: .*{size} bytes.*at most {size - 1} bytes.*max_logits_bytes"):
        ask(**asked, maximum=size - 1)


@pytest.mark.parametrize("field", ["context_logits", "generation_logits"])
def test_no_streams(ask, field):
    """Logits are refused for streams."""
    with pytest.raises(InvalidField, match=f"^{field}: True is not allowed; expected false with stream"):
        ask(stream=True, **{field: True})
    assert ask(stream=True, **{field: False}).stream


def test_an_engine_that_gives_none(ask):
    """An engine whose bound is 0 has no logits and refuses them by name."""
    with pytest.raises(InvalidField, match=r"^context_logits: .* at most 0 bytes"):
        ask(context_logits=True, maximum=0)


def test_the_first_choice_has_the_context(ask):
    """Only the first choice of a prompt has its context logits, since the others would be the same."""
    valid = ask(prompts=((5, 6, 7), (8, 9)), context_logits=True, n=2)
    assert [sequence.context_logits_from for sequence in valid.sequences] == [0, 3, 0, 2]


def test_a_prompt_alone(ask):
    """max_tokens 0 is allowed with context logits and has no generation logits."""
    assert ask(context_logits=True, max_tokens=0).sampling.max_tokens == 0
    with pytest.raises(
        InvalidField, match=r"^generation_logits: True is not allowed; expected false with max_tokens 0"
    ):
        ask(context_logits=True, generation_logits=True, max_tokens=0)
