"""Cross-encoders packaged by the flavor: detection, refusals, and scores equal to sentence-transformers'."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from tiny_cross_encoders import PAIRS, save_cross_encoder

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.interface.bundle import CrossEncoderSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*inferred as AnyType:UserWarning")
FIRST, SECOND = [list(side) for side in zip(*PAIRS, strict=True)]
QUERY, DOCUMENTS = "w1 w2 w3", ["w4", "w5 w6", "w1 w2 w3", "w7 w8 w9"]


def reference(folder: Path, **options):
    """Return the model as a ``CrossEncoder``, imported only here because that takes seconds."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", **options)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_cross_encoder(tmp_path_factory.mktemp("cross") / "bert")


@pytest.fixture(scope="module")
def saved(bert, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "m"
    llm.save_model(path, bert)
    return path


@pytest.fixture(scope="module")
def model(saved):
    with llm.load_model(str(saved), in_process=True, threads=1) as loaded:
        yield loaded


def test_scores_are_those_of_sentence_transformers(model, bert):
    """Scores of pair lists, of one text and many, and of two texts equal sentence-transformers', with the default
    sigmoid."""
    expected = reference(bert)
    assert model.tasks == ("score",)
    assert model.score(FIRST, SECOND) == pytest.approx(expected.predict(PAIRS), abs=1e-5)
    many = expected.predict([(QUERY, document) for document in DOCUMENTS])
    assert model.score(QUERY, DOCUMENTS) == pytest.approx(many, abs=1e-5)
    assert model.score(*PAIRS[0]) == pytest.approx(float(expected.predict([PAIRS[0]])[0]), abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "xlm-roberta"])
def test_scores_with_a_template_for_pairs(tmp_path, kind):
    """Scores are right for a transformers 5 tokenizer, whose pairs are joined by a TemplateProcessing."""
    source = save_cross_encoder(tmp_path / "source", kind, templated=True)
    llm.save_model(tmp_path / "m", source)
    long = " ".join(["w1", "w2", "w3"] * 40)
    pairs = [*PAIRS, (QUERY, long), (long, QUERY)]
    with llm.load_model(str(tmp_path / "m"), in_process=True, threads=1) as loaded:
        found = loaded.score(*map(list, zip(*pairs, strict=True)), truncate_prompt_tokens=-1)
    assert found == pytest.approx(reference(source).predict(pairs), abs=1e-5)


def test_a_tokenizer_that_cuts_from_the_left_is_refused(tmp_path):
    """A tokenizer that truncates from the left is refused, because pairs are truncated at their texts' ends."""
    source = save_cross_encoder(tmp_path / "source")
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation_side": "left"}))
    with pytest.raises(MlflowException, match=r"truncation_side: 'left' is not supported .* expected 'right'"):
        llm.save_model(tmp_path / "m", source)


def test_rankings_are_those_of_sentence_transformers(model, bert):
    """Rankings are best first, with indices and texts, limited to the requested number."""
    expected = reference(bert).rank(QUERY, DOCUMENTS, top_k=3)
    found = model.rerank(QUERY, DOCUMENTS, top_n=3)
    assert [one.index for one in found] == [one["corpus_id"] for one in expected]
    assert [one.score for one in found] == pytest.approx([float(one["score"]) for one in expected], abs=1e-5)
    assert [one.document for one in found] == [DOCUMENTS[one.index] for one in found]


def test_raw_scores_without_the_activation(model, bert):
    """``use_activation: false`` returns the head's raw scores."""
    expected = reference(bert, activation_fn=torch.nn.Identity()).predict(PAIRS)
    assert model.score(FIRST, SECOND, use_activation=False) == pytest.approx(expected, abs=1e-5)


def test_truncation_is_that_of_sentence_transformers(model, bert):
    """A pair above the limit is refused, unless truncation is on; then the longer text is cut first."""
    long = " ".join(["w1", "w2", "w3"] * 40)
    with pytest.raises(MlflowException, match=r"text_2: with its query, more than 64 tokens"):
        model.score(QUERY, long)
    pairs = [(QUERY, long), (long, QUERY), (long, long)]
    found = model.score(*map(list, zip(*pairs, strict=True)), truncate_prompt_tokens=-1)
    assert found == pytest.approx(reference(bert).predict(pairs), abs=1e-5)
    shorter = reference(bert, max_length=16).predict(pairs)
    cut = [model.score(*pair, truncate_prompt_tokens=16) for pair in pairs]
    assert cut == pytest.approx([float(one) for one in shorter], abs=1e-5)


def test_asynchronous_scores(model):
    """The asynchronous API returns the same scores."""

    async def ask():
        return await asyncio.gather(model.aio.score(FIRST, SECOND), model.aio.rerank(QUERY, DOCUMENTS, top_n=2))

    scores, ranked = asyncio.run(ask())
    assert np.array_equal(scores, model.score(FIRST, SECOND))
    assert ranked == model.rerank(QUERY, DOCUMENTS, top_n=2)


def test_predict(saved, model):
    """``predict`` scores a request with a query or with pairs and a frame of rows; usage counts every pair's tokens."""
    loaded = mlflow.pyfunc.load_model(str(saved), model_config={"in_process": True})
    found = loaded.predict({"query": QUERY, "documents": DOCUMENTS, "top_n": 2})
    assert [entry["index"] for entry in found["results"]] == [one.index for one in model.rerank(QUERY, DOCUMENTS)[:2]]
    assert found["usage"]["prompt_tokens"] == sum(3 + len((QUERY + " " + text).split()) for text in DOCUMENTS)
    rows = loaded.predict(pd.DataFrame({"text_1": FIRST, "text_2": SECOND}))
    assert [row["data"][0]["score"] for row in rows] == pytest.approx(model.score(FIRST, SECOND).tolist(), abs=1e-6)
    with pytest.raises(MlflowException, match="documents"):
        loaded.predict("w1")
    with pytest.raises(MlflowException, match="this model does score, not chat"):
        loaded.predict({"messages": [{"role": "user", "content": "hi"}]})
    loaded.get_raw_model().close()


@pytest.mark.parametrize(
    ("key", "value", "activation"),
    [
        ("sentence_transformers", {"activation_fn": "torch.nn.modules.linear.Identity"}, "identity"),
        ("sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh", "tanh"),
        ("unrelated", 1, "sigmoid"),
    ],
)
def test_the_activation_that_the_files_name(bert, tmp_path, key, value, activation):
    """The activation is read from the places where sentence-transformers wrote it before it had its own file."""
    source = shutil.copytree(bert, tmp_path / "source")
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    llm.save_model(tmp_path / "m", source)
    bundle = read_bundle(tmp_path / "m")
    assert bundle.tasks == ("score",)
    assert bundle.cross_encoder == CrossEncoderSpec(activation=activation, max_length=64)
    with llm.load_model(str(tmp_path / "m"), in_process=True, threads=1) as model:
        assert model.score(FIRST, SECOND) == pytest.approx(reference(source).predict(PAIRS), abs=1e-5)


def test_a_directory_saved_by_sentence_transformers(bert, tmp_path):
    """A directory saved by sentence-transformers, with modules and its own activation, gives the same scores."""
    original = reference(bert, activation_fn=torch.nn.Identity())
    original.save_pretrained(str(tmp_path / "source"))
    llm.save_model(tmp_path / "m", tmp_path / "source", task="score")
    with llm.load_model(str(tmp_path / "m"), in_process=True, threads=1) as model:
        assert model.score(FIRST, SECOND) == pytest.approx(original.predict(PAIRS), abs=1e-5)


def test_unsupported_cross_encoders_are_refused(bert, tmp_path, bert_dir, llama_dir):
    """Several labels, no head, a generating model, other tasks beside it and an activation of foreign code are
    refused."""
    three = save_cross_encoder(tmp_path / "three", labels=3)
    for source, reason in (
        (three, r"needs a cross-encoder.*BertForSequenceClassification of 3 labels"),
        (bert_dir, "needs a cross-encoder.*this one is BertModel"),
        (llama_dir, "needs a cross-encoder.*this one is LlamaForCausalLM"),
    ):
        with pytest.raises(MlflowException, match=reason):
            llm.save_model(tmp_path / "m", source, task="score")
    with pytest.raises(MlflowException, match=r"expected (score|embeddings) alone or none"):
        llm.save_model(tmp_path / "m", bert, task=["score", "embeddings"])
    with pytest.raises(MlflowException, match="'chat' needs a causal language model"):
        llm.save_model(tmp_path / "m", bert, task="chat")
    config = bert / "config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"sentence_transformers": {"activation_fn": "os.system"}}))
    try:
        with pytest.raises(MlflowException, match=r"activation_fn: 'os\.system' is not supported"):
            llm.save_model(tmp_path / "m", bert)
    finally:
        config.write_text(before)
    assert not (tmp_path / "m").exists()


def test_it_can_be_logged_for_embeddings(bert, tmp_path):
    """A task of embeddings is honoured; without one a head of one label is a cross-encoder and one of three is
    refused."""
    llm.save_model(tmp_path / "m", bert, task="embeddings")
    assert read_bundle(tmp_path / "m").tasks == ("embeddings",)
    with pytest.raises(MlflowException, match=r"has a head of 3 labels .* task='embeddings' logs its encoder"):
        llm.save_model(tmp_path / "n", save_cross_encoder(tmp_path / "three", labels=3))


def test_embedding_models_compare_texts(bert_dir, tmp_path):
    """An embedding model's scores are the cosines of its vectors."""
    llm.save_model(tmp_path / "m", bert_dir)
    with llm.load_model(str(tmp_path / "m"), in_process=True, threads=1) as model:
        vectors = model.embed(["one", "two", "three"])
        cosines = vectors[1:] @ vectors[0] / np.linalg.norm(vectors[1:], axis=1) / np.linalg.norm(vectors[0])
        assert model.score("one", ["two", "three"]) == pytest.approx(cosines, abs=1e-5)
        assert [one.index for one in model.rerank("one", ["two", "one"])] == [1, 0]
