"""``/score`` and ``/rerank`` of a model that embeds, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app

SCORE, RERANK = ("/v1/score", "/score"), ("/v1/rerank", "/rerank", "/v2/rerank")
DOCUMENTS = ["one", "two", "three", "four"]


def post(client: FlaskClient, path: str, body: dict) -> tuple[int, dict]:
    answer = client.post(path, json=body)
    return answer.status_code, answer.get_json()


def cosines(client: FlaskClient, query: str, documents: list[str]) -> list[float]:
    """Return the cosine similarities of the vectors that ``/v1/embeddings`` gives."""
    answer = client.post("/v1/embeddings", json={"model": "assistant", "input": [query, *documents]})
    first, *others = (np.array(entry["embedding"]) for entry in answer.get_json()["data"])
    return [float(first @ other / np.linalg.norm(first) / np.linalg.norm(other)) for other in others]


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_one_text_and_many(client: FlaskClient, path: str, names: tuple[str, str]) -> None:
    """Each score is the cosine of the two texts' embeddings, in the texts' order; all tokens are counted once."""
    status, found = post(client, path, {"model": "assistant", names[0]: "zero", names[1]: DOCUMENTS})
    assert status == 200
    assert found["object"] == "list"
    assert found["model"] == "assistant"
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2, 3]
    assert {entry["object"] for entry in found["data"]} == {"score"}
    expected = cosines(client, "zero", DOCUMENTS)
    assert [entry["score"] for entry in found["data"]] == pytest.approx(expected, abs=1e-5)
    tokens = len("zero" + "".join(DOCUMENTS))
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_as_many_as_the_other_side(client: FlaskClient) -> None:
    """Lists of one length are compared entry by entry; a single text is a list of one."""
    found = post(client, "/score", {"text_1": ["a", "b"], "text_2": ["a", "c"]})[1]
    assert found["data"][0]["score"] == pytest.approx(1.0)
    assert found["data"][1]["score"] == pytest.approx(cosines(client, "b", ["c"])[0], abs=1e-5)
    assert len(post(client, "/score", {"text_1": "a", "text_2": "b"})[1]["data"]) == 1


@pytest.mark.parametrize("path", RERANK)
def test_a_ranking(client: FlaskClient, path: str) -> None:
    """Documents come best first with their places; Cohere's newer API gives no texts back unless asked."""
    status, found = post(client, path, {"model": "assistant", "query": "zero", "documents": DOCUMENTS})
    assert status == 200
    expected = cosines(client, "zero", DOCUMENTS)
    order = sorted(range(4), key=lambda i: -expected[i])
    assert [entry["index"] for entry in found["results"]] == order
    scores = [entry["relevance_score"] for entry in found["results"]]
    assert scores == pytest.approx([expected[i] for i in order], abs=1e-5)
    for entry in found["results"]:
        text = None if path == "/v2/rerank" else {"text": DOCUMENTS[entry["index"]]}
        assert entry.get("document") == text
    assert found["usage"]["prompt_tokens"] == len("zero" + "".join(DOCUMENTS))


def test_how_many_and_whether_with_texts(client: FlaskClient) -> None:
    """``top_n`` gives the best, more than there are gives all; documents may be objects with their text."""
    asked = {"query": "q", "documents": [{"text": "a"}, "b", {"text": "c"}]}
    whole = post(client, "/rerank", asked)[1]["results"]
    assert post(client, "/rerank", {**asked, "top_n": 2})[1]["results"] == whole[:2]
    assert post(client, "/rerank", {**asked, "top_n": 9})[1]["results"] == whole
    assert post(client, "/rerank", {**asked, "top_n": 0})[1]["results"] == whole
    assert {entry["document"]["text"] for entry in whole} == {"a", "b", "c"}
    bare = post(client, "/rerank", {**asked, "return_documents": False})[1]["results"]
    assert bare == [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in whole]
    given = post(client, "/v2/rerank", {**asked, "return_documents": True})[1]["results"]
    assert given == whole


def test_equal_scores_keep_their_order(client: FlaskClient) -> None:
    """Documents with equal scores keep the order in which they were given."""
    found = post(client, "/rerank", {"query": "q", "documents": ["a", "a", "a"]})[1]["results"]
    assert [entry["index"] for entry in found] == [0, 1, 2]


def test_truncation(client: FlaskClient) -> None:
    """A text that is too long is refused by its name, unless the request says where it is to be cut."""
    asked = {"query": "q", "documents": ["short", "x" * 5000]}
    status, found = post(client, "/rerank", asked)
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, "documents[1]", "context_length_exceeded")
    used = [
        post(client, "/rerank", {**asked, **more})[1]["usage"]["prompt_tokens"]
        for more in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 4}, {"max_tokens_per_doc": 7})
    ]
    assert used == [1 + 5 + 4096, 1 + 4 + 4, 1 + 5 + 7]
    whole, cut = (
        post(client, "/score", {"text_1": "x" * n, "text_2": "y", "truncate_prompt_tokens": 10})[1]["data"]
        for n in (10, 11)
    )
    assert whole == cut


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"text_1": "a", "documents": ["b"]}, "documents"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
        ("/score", {"text_1": [], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [["c"]]}, "text_2[0]"),
        ("/score", {"text_1": "a", "text_2": [{"text": 1}]}, "text_2[0].text"),
        ("/score", {"text_1": "a", "text_2": "b", "top_n": 1}, "top_n"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].title"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"], "stream": True}, "stream"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/rerank", {"query": "\ud800", "documents": ["b"]}, "query"),
    ],
)
def test_refusals(client: FlaskClient, path: str, body: dict, field: str) -> None:
    """An invalid request is refused in OpenAI's error form with the name of the field."""
    status, found = post(client, path, body)
    assert status in (400, 404)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["param"] == field


def test_mlflows_form(client: FlaskClient) -> None:
    """An endpoint's invocations take both forms, told apart by their fields; the reply is the same."""
    path = "/endpoints/assistant/invocations"
    ranked = post(client, path, {"query": "q", "documents": ["a", "b"], "top_n": 1})[1]
    assert (
        ranked["results"] == post(client, "/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1})[1]["results"]
    )
    scored = post(client, path, {"text_1": "q", "text_2": ["a", "b"]})[1]
    assert scored["data"] == post(client, "/score", {"text_1": "q", "text_2": ["a", "b"]})[1]["data"]
    databricks = post(client, "/serving-endpoints/assistant/invocations", {"query": "q", "documents": ["a"]})
    assert databricks[0] == 200
    status, found = post(client, path, {"query": "q", "text_1": "a"})
    assert (status, found["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_a_model_that_only_writes(make: Callable[..., WorkerState]) -> None:
    """A model that has neither vectors nor scores says what it does instead."""
    server = make()
    entity = next(server.endpoints.entities())
    object.__setattr__(entity.view, "info", msgspec.structs.replace(entity.view.info, tasks=("chat",)))
    status, found = post(create_app(server).test_client(), "/rerank", {"query": "a", "documents": ["b"]})
    assert (status, found["error"]["message"]) == (400, "query: this model does chat, not score")
