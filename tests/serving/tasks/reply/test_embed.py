"""Embeddings: order, dimensions, errors."""

import copy

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.errors import ContextTooLong, InvalidField
from mlflow_llm.serving.interface.events import Embedded
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply import embed
from mlflow_llm.serving.tasks.reply.pieces import gather


def _ask(endpoint, **body):
    return prepare(DIALECTS["mlflow"].read(body), endpoint)


def test_vectors_in_input_order(endpoint):
    """Vectors that come in any order are returned in the order of the inputs, with usage of every token fed."""
    vectors = np.eye(2, 16, dtype="<f4")
    request = _ask(endpoint, input=["the dog", "fox"])
    engine = ScriptedEngine([Embedded(1, vectors[1].tobytes()), Embedded(0, vectors[0].tobytes())])
    reply = gather(embed.run(engine, request))
    assert reply.vectors == (vectors[0].tobytes(), vectors[1].tobytes())
    assert reply.usage.prompt_tokens == sum(len(s.prompt_token_ids) for s in request.sequences)


def test_dimensions_cut_and_renormalise(endpoint):
    """dimensions keeps the first values at length one."""
    vector = np.random.default_rng(0).normal(size=16).astype("<f4")
    for dimensions in (1, 4, 16):
        request = _ask(endpoint, input="dog", dimensions=dimensions)
        reply = gather(embed.run(ScriptedEngine([Embedded(0, vector.tobytes())]), request))
        kept = vector[:dimensions].astype(np.float64)
        assert reply.vectors[0] == (kept / np.linalg.norm(kept)).astype("<f4").tobytes()


def test_vectors_without_dimensions(endpoint):
    """Without dimensions the engine's own vectors are returned, bit for bit; a truncated zero vector stays zero."""
    vector = np.arange(16, dtype="<f4").tobytes()
    whole = gather(embed.run(ScriptedEngine([Embedded(0, vector)]), _ask(endpoint, input="dog")))
    assert whole.vectors == (vector,)
    cut = gather(embed.run(ScriptedEngine([Embedded(0, bytes(64))]), _ask(endpoint, input="dog", dimensions=3)))
    assert cut.vectors == (bytes(12),)


def test_instruction_is_prefixed(endpoint, text):
    """An instruction goes before the text with a space; the name of one of the model's prompts means that prompt."""
    own = _ask(endpoint, input="dog", instruction="find:").sequences[0].prompt_token_ids
    named = _ask(endpoint, input="dog", instruction="query").sequences[0].prompt_token_ids
    assert text.decode(own) == "find: dog"
    assert text.decode(named) == "query: dog"


def test_long_input_is_refused_or_cut(endpoint_of):
    """An input over the limit is an error, or is cut at its end with error_behavior truncate, a 5 MB one too."""
    endpoint = endpoint_of(context=8)
    for text in ("the quick brown fox " * 5, "the dog " * 600_000):
        with pytest.raises(ContextTooLong, match="8 tokens"):
            _ask(endpoint, input=text)
        assert len(_ask(endpoint, input=text, error_behavior="truncate").sequences[0].prompt_token_ids) == 8


@pytest.mark.parametrize("bad", [{"dimensions": 17}, {"input": [[1, 2], [10**6]]}, {"input": ""}])
def test_limits_of_the_model(endpoint_of, fallback_text, bad):
    """More dimensions than the model has, ids outside the vocabulary and empty texts are refused by name."""
    with pytest.raises(InvalidField):
        _ask(endpoint_of(model=fallback_text), **{"input": "dog", **bad})


def _framed(text, lead, tail):
    """Return ``text``'s tokenizer with special tokens before and after each text."""
    from tokenizers import Tokenizer, processors

    framed = copy.copy(text)
    framed.__dict__.pop("_frame", None)
    backend = Tokenizer.from_str(text.backend.to_str())
    single = f"{lead} $A {tail}".split()
    ids = [(name, backend.token_to_id(name)) for name in {lead, tail} if name]
    backend.post_processor = processors.TemplateProcessing(single=" ".join(single), special_tokens=ids)
    framed.backend = backend
    return framed


FOREIGN = [9906, 1917, 374, 264], [9], [5, 6, 7]


@pytest.mark.parametrize(("lead", "tail"), [("<|start|>", "<|end|>"), ("<|start|>", ""), ("", "<|end|>")])
def test_ids_of_the_models_own_tokenizer_are_taken(endpoint_of, text, lead, tail, monkeypatch):
    """Ids as the tokenizer gives them, with its special tokens, are the text; others are refused by the input's name,
    and the error says what to set in the client."""
    framed = _framed(text, lead, tail)
    if not (lead and tail):  # the ids of the tiny tokenizer's special tokens are as low as those of bytes elsewhere
        with pytest.raises(InvalidField, match="embeddingTokenIds"):
            _ask(endpoint_of(model=framed), input=list(framed.encode_input("the quick brown fox")))
        monkeypatch.setattr("mlflow_llm.serving.tasks.prompt.text.NUM_FREQUENT_IDS", 2)
    endpoint = endpoint_of(model=framed)
    own = list(framed.encode_input("the quick brown fox"))
    assert _ask(endpoint, input=[own, own]).sequences[1].prompt_token_ids == tuple(own)
    for ids in ([i % endpoint.info.vocab_size for i in foreign] for foreign in FOREIGN):
        with pytest.raises(InvalidField, match=r"input\[1\].*check_embedding_ctx_length=False") as refused:
            _ask(endpoint, input=[own, ids])
        assert (lead or tail) in str(refused.value)
    for cut in (own[1:], own[:-1]) if lead and tail else ():
        with pytest.raises(InvalidField, match="input"):
            _ask(endpoint, input=cut)


def test_any_ids_where_the_endpoint_says_so(endpoint_of, text):
    """``embeddingTokenIds`` takes ids without special tokens; a tokenizer that has none takes them only so."""
    framed = _framed(text, "<s>", "</s>")
    for model in (framed, _framed(text, "", "")):
        with pytest.raises(InvalidField, match="embeddingTokenIds"):
            _ask(endpoint_of(model=model), input=[1, 2, 3])
        settings = DialectSettings(embeddingTokenIds=True)
        found = _ask(endpoint_of(model=model, dialects=settings), input=[1, 2, 3])
        assert found.sequences[0].prompt_token_ids == (1, 2, 3)
