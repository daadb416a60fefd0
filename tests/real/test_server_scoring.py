"""Scores by running servers: real MiniLM, and a tiny cross-encoder beside it with a ledger."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_server import WARNINGS_OF_CLIENTS, served
from mlflow.deployments import get_deploy_client
from tiny_cross_encoders import save_cross_encoder

from mlflow_llm.flavors import llm

pytestmark = WARNINGS_OF_CLIENTS
QUERY = "What is the capital of France?"
DOCUMENTS = [
    "Bananas are yellow.",
    "Paris is the capital of France.",
    "Berlin is in Germany.",
    "The Seine flows by Paris.",
]
WORDS = ["w4", "w5 w6", "w1 w2 w3"]


def post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def place(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scoring")
    llm.save_model(root / "embedder", minilm_dir, link_files=True)
    save_cross_encoder(root / "bert")
    llm.save_model(root / "reranker", root / "bert")
    return root


@pytest.fixture(scope="module")
def scorer(place: Path) -> Iterator[str]:
    """Serve both models, metered, and provide the URL."""
    models = ["-m", f"{place}/embedder=embedder", "-m", f"{place}/reranker=reranker"]
    with served(place, *models, "--database", f"sqlite:///{place}/ledger.db") as url:
        yield url


def test_minilm_ranks_as_sentence_transformers(scorer: str, minilm_dir: Path) -> None:
    """On real weights cosines are within 1e-5 of sentence-transformers', the answer comes first, the same in both
    forms."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(minilm_dir), device="cpu")
    query, *documents = peer.encode([QUERY, *DOCUMENTS], normalize_embeddings=True)
    expected = [float(query @ one) for one in documents]
    ranked = post(scorer, "/v1/rerank", {"model": "embedder", "query": QUERY, "documents": DOCUMENTS})["results"]
    assert ranked[0]["document"]["text"] == DOCUMENTS[1]
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    scored = post(scorer, "/v1/score", {"model": "embedder", "text_1": QUERY, "text_2": DOCUMENTS})["data"]
    assert [one["score"] for one in scored] == pytest.approx(expected, abs=1e-5)


def test_a_cross_encoder_is_served(scorer: str, place: Path) -> None:
    """Scores are sentence-transformers', usage counts every pair, and a pair that is too long is refused by name."""
    from sentence_transformers import CrossEncoder

    expected = CrossEncoder(str(place / "bert"), device="cpu").predict([("w1 w2", word) for word in WORDS])
    found = post(scorer, "/score", {"model": "reranker", "text_1": "w1 w2", "text_2": WORDS})
    assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(5 + len(word.split()) for word in WORDS)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(scorer, "/rerank", {"model": "reranker", "query": "w1", "documents": ["w1", "w2 " * 70]})
    assert json.load(refused.value)["error"]["param"] == "documents[1]"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(scorer, "/v1/embeddings", {"model": "reranker", "input": "w1"})
    assert post(scorer, "/tokenize", {"model": "reranker", "prompt": "w1 w2"})["count"] == 4


def test_clients(scorer: str) -> None:
    """litellm's rerank and MLflow's deployments client work unmodified."""
    import litellm

    found = litellm.rerank(
        model="hosted_vllm/reranker", api_base=scorer, api_key="x", query="w1 w2", documents=WORDS, top_n=2
    )
    ours = post(scorer, "/rerank", {"model": "reranker", "query": "w1 w2", "documents": WORDS, "top_n": 2})["results"]
    assert [one["index"] for one in found.results] == [one["index"] for one in ours]
    assert [one["relevance_score"] for one in found.results] == [one["relevance_score"] for one in ours]
    client = get_deploy_client(scorer)
    answer = client.predict(endpoint="reranker", inputs={"query": "w1 w2", "documents": WORDS, "top_n": 2})
    assert answer["results"] == ours


def test_the_ledger_counts_scores(scorer: str, place: Path) -> None:
    """The ledger has a row for each request, of task "score", with the prompt's tokens and none generated."""
    body = {"model": "reranker", "query": "w1 w2", "documents": WORDS}
    used = post(scorer, "/rerank", body)["usage"]["prompt_tokens"]
    with contextlib.closing(sqlite3.connect(place / "ledger.db")) as store:
        rows = store.execute(
            "SELECT prompt_tokens, completion_tokens, status FROM ledger WHERE task = 'score'"
        ).fetchall()
    assert (used, 0, "ok") in rows


def test_prompts_are_scored(url: str) -> None:
    """On real weights ``max_tokens: 0`` gives the prompt scores that a request for one token also gives."""
    body = {
        "model": "assistant",
        "prompt": "The capital of France is Paris",
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    none, one = (post(url, "/v1/completions", {**body, "max_tokens": n})["choices"][0] for n in (0, 1))
    assert none["finish_reason"] == "length"
    assert none["logprobs"]["token_logprobs"] == one["logprobs"]["token_logprobs"][:-1]
    assert none["logprobs"]["token_logprobs"][-1] > none["logprobs"]["token_logprobs"][1]
