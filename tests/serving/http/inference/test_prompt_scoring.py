"""``max_tokens: 0`` with ``echo`` scores a prompt, as evaluation harnesses ask for it."""

from __future__ import annotations

import json

import pytest
from flask.testing import FlaskClient

SCORE = {"model": "assistant", "prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}


def post(client: FlaskClient, path: str = "/v1/completions", **body: object) -> tuple[int, dict]:
    answer = client.post(path, json={**SCORE, **body})
    return answer.status_code, answer.get_json()


def test_the_prompt_and_its_scores(client: FlaskClient) -> None:
    """The text is the prompt, each token but the first has its log probability, and nothing is generated."""
    status, found = post(client)
    assert status == 200
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None
    assert all(isinstance(one, float) for one in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2]
    assert found["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_same_scores_as_with_a_token(client: FlaskClient) -> None:
    """One generated token changes nothing about the prompt's scores."""
    none, one = (post(client, max_tokens=n, temperature=0)[1]["choices"][0]["logprobs"] for n in (0, 1))
    for name, values in none.items():
        assert values == one[name][: len(values)]
        assert len(one[name]) == len(values) + 1


def test_prompts_of_token_ids(client: FlaskClient) -> None:
    """A batch of token lists has a choice each, in order."""
    ids = client.post("/tokenize", json={"prompt": "hello"}).get_json()["tokens"]
    choices = post(client, prompt=[ids, ids[:2]])[1]["choices"]
    assert [choice["text"] for choice in choices] == ["hello", "he"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5, 2]


def test_streamed(client: FlaskClient) -> None:
    """A stream has the scored prompt, an end with "length", and usage."""
    answer = client.post("/v1/completions", json={**SCORE, "stream": True, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in answer.get_data(as_text=True).split("\n\n") if line]
    *chunks, usage = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 0


def test_without_logprobs(client: FlaskClient) -> None:
    """Echo alone gives the prompt back, and counts its tokens."""
    found = post(client, logprobs=None)[1]
    assert (found["choices"][0]["text"], found["choices"][0]["logprobs"]) == ("abc", None)
    assert found["usage"]["total_tokens"] == 3


def test_a_prompt_that_fills_the_context(client: FlaskClient) -> None:
    """A prompt that is only scored needs no room after it."""
    assert post(client, prompt="a" * 4096)[1]["usage"]["prompt_tokens"] == 4096
    assert post(client, prompt="a" * 4096, max_tokens=None)[1]["error"]["code"] == "context_length_exceeded"
    assert post(client, prompt="a" * 4097)[1]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"echo": False}, "max_tokens"),
        ("/v1/completions", {"echo": None}, "max_tokens"),
        ("/v1/completions", {"min_tokens": 1}, "min_tokens"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"use_beam_search": True, "beam_width": 2}, "beam_width"),
        ("/v1/completions", {"guided_regex": "a+"}, "guided_regex"),
        ("/v1/chat/completions", {}, "max_tokens"),
    ],
)
def test_refusals(client: FlaskClient, path: str, body: dict, field: str) -> None:
    """A request with nothing to generate or score is refused by name, and so is echo in a chat."""
    if "chat" in path:
        answer = client.post(path, json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 0})
        status, found = answer.status_code, answer.get_json()
    else:
        status, found = post(client, path, **body)
    assert (status, found["error"]["param"]) == (400, field)
