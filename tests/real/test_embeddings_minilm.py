"""all-MiniLM-L6-v2 beside sentence-transformers."""

import numpy as np
from sentence_transformers import SentenceTransformer

from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.sentence_files import read_spec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

TEXTS = [
    "A cat sleeps on the sofa.",
    "Naïve café — 東京, Ωmega?",
    "The ledger counts every token of every request, and settles on success, error and disconnect alike. " * 6,
    "x",
    "word " * 400,
    "Kittens nap.",
]


def test_equal_to_sentence_transformers(minilm_dir):
    """Texts of mixed lengths, one cut at max_seq_length, equal sentence-transformers' to 1e-5 in cosine, with length
    1."""
    peer = SentenceTransformer(str(minilm_dir), device="cpu")
    bundle = Bundle(
        content_hash="",
        tasks=("embeddings",),
        model_dir=str(minilm_dir),
        tokenizer_dir=str(minilm_dir),
        embedding=read_spec(minilm_dir),
    )
    ours = load_embedder(bundle, EngineSettings())
    encoded = peer.tokenizer(TEXTS, truncation=True, max_length=ours.max_length)["input_ids"]
    vectors = ours.embed(encoded)
    assert vectors.dtype == np.float32
    assert np.all(1 - (vectors * peer.encode(TEXTS)).sum(1) < 1e-5)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[5] > vectors[0] @ vectors[2]
