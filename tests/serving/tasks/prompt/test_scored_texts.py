"""The token sequences that an engine gets of a request that compares texts."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tiny_cross_encoders import PAIRS, save_cross_encoder, tokenizer

from mlflow_llm.serving.dialects.fields.decode import decode
from mlflow_llm.serving.dialects.fields.tables import MLFLOW
from mlflow_llm.serving.interface.bundle import Bundle, CrossEncoderSpec, EmbeddingSpec
from mlflow_llm.serving.interface.errors import ContextTooLong, InvalidField, RequestError
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt.text import TextModel


def _raw(**body):
    return decode(MLFLOW, body, None)


def _sequences(valid):
    return [sequence.prompt_token_ids for sequence in valid.sequences]


@pytest.fixture(scope="module")
def cross_text(tmp_path_factory):
    folder = save_cross_encoder(tmp_path_factory.mktemp("cross"))
    return TextModel(
        Bundle(
            content_hash="x",
            tasks=("score",),
            model_dir=str(folder),
            tokenizer_dir=str(folder),
            cross_encoder=CrossEncoderSpec(activation="tanh", max_length=48),
        )
    )


@pytest.fixture
def cross(endpoint_of, cross_text):
    return endpoint_of(context=64, tasks=("score",), model=cross_text)


def test_a_ranking_takes_the_models_prompts(endpoint_of, text, monkeypatch):
    """A ranking puts query and document behind their own prompts; plain comparison uses the default prompt."""
    prompts = {"query": "query: ", "passage": "doc: ", "plain": "p: "}
    monkeypatch.setattr(text, "embedding", EmbeddingSpec(prompts=prompts, default_prompt="plain"))
    endpoint = endpoint_of(tasks=("embeddings",))

    def embedded(words, name):
        return _sequences(prepare(_raw(input=words, instruction=name), endpoint))

    ranked = prepare(_raw(query="fox", documents=["dog", "world"]), endpoint)
    assert _sequences(ranked) == [*embedded("fox", "query"), *embedded(["dog", "world"], "passage")]
    scored = prepare(_raw(text_1="fox", text_2=["dog", "world"]), endpoint)
    assert _sequences(scored) == _sequences(prepare(_raw(input=["fox", "dog", "world"]), endpoint))
    assert (ranked.scoring.num_queries, ranked.second_from) == (1, ())


def test_encoder_texts_are_cut_before_their_special_tokens(endpoint_of, text, monkeypatch):
    """A text that is cut keeps what the tokenizer puts around it."""
    monkeypatch.setattr(text, "embedding", EmbeddingSpec(max_length=8))
    endpoint = endpoint_of(tasks=("embeddings",))
    long = "hello world " * 20
    whole, cut = _sequences(prepare(_raw(text_1=long, text_2="fox", truncate_prompt_tokens=5), endpoint))
    assert (len(whole), whole[0]) == (5, text.leading_ids[0])
    assert cut == text.encode("fox")
    with pytest.raises(ContextTooLong, match="text_1: more than 8 tokens"):
        prepare(_raw(text_1=long, text_2="fox"), endpoint)


def test_pairs_are_those_of_the_tokenizer(cross):
    """Pairs have transformers' ids and token types, and the activation logged with the model."""
    first, second = (list(side) for side in zip(*PAIRS, strict=True))
    valid = prepare(_raw(text_1=first, text_2=second, truncate_prompt_tokens=-1), cross)
    expected = tokenizer("bert", 64)([list(pair) for pair in PAIRS], truncation="longest_first", max_length=48)
    assert [list(ids) for ids in _sequences(valid)] == expected["input_ids"]
    assert list(valid.second_from) == [types.index(1) for types in expected["token_type_ids"]]
    assert (valid.scoring.num_queries, valid.scoring.activation) == (0, "tanh")
    raw = prepare(_raw(text_1="w1", text_2="w2", use_activation=False), cross)
    assert raw.scoring.activation == "identity"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"query": "w1", "documents": ["w1", "w2 " * 60]}, "documents[1]"),
        ({"text_1": "w1 " * 60, "text_2": "w1"}, "text_2"),
        ({"text_1": "w1", "text_2": "w1", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens"),
        ({"text_1": "w1", "text_2": "w1", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": "w1"}, "input"),
        ({"prompt": "w1"}, "prompt"),
    ],
)
def test_refusals(cross, body, field):
    """Overlong pairs, unsupported bounds and tasks are refused by name."""
    with pytest.raises(RequestError) as refused:
        prepare(_raw(**body), cross)
    assert refused.value.param == field


def test_a_long_query_does_not_multiply_without_end(cross):
    """The tokens of all pairs together are bounded: the query counts once for each document."""
    narrow = dataclasses.replace(cross, profile=dataclasses.replace(cross.profile, max_copied_tokens=400))
    body = {"query": "w1 " * 30, "documents": ["w2"] * 20}
    with pytest.raises(InvalidField, match=r"documents: '20 texts' .* may have 400 tokens, and these have 680"):
        prepare(_raw(**body), narrow)
    assert len(prepare(_raw(**body), cross).sequences) == 20


def test_megabytes_are_read_at_their_beginning(cross, cross_text, monkeypatch):
    """Only as much of a text of megabytes is tokenised as can fit the context."""
    seen = []
    encode = cross_text.backend.__class__.encode_batch_fast
    backend = cross_text.backend

    class Counting:
        def __getattr__(self, name):
            return getattr(backend, name)

        def encode_batch_fast(self, texts, **options):
            seen.extend(map(len, texts))
            return encode(backend, texts, **options)

    monkeypatch.setattr(cross_text, "backend", Counting())
    body = {"text_1": "w1 " * 10**6, "text_2": "w2 " * 10**6, "truncate_prompt_tokens": -1}
    (ids,) = _sequences(prepare(_raw(**body), cross))
    assert len(ids) == 48
    assert max(seen, default=0) < 2000


def test_defaults_of_the_model(cross):
    """A model's logged defaults of truncation and of the number of results apply."""
    own = _raw(query="", documents="", top_n=1, truncate_prompt_tokens=-1)
    endpoint = dataclasses.replace(cross, defaults=lambda task: own if task == "score" else None)
    valid = prepare(_raw(query="w1", documents=["w1", "w2 " * 60]), endpoint)
    assert valid.scoring.top_n == 1
    assert msgspec.structs.asdict(valid.scoring)["documents"] == ("w1", "w2 " * 60)
