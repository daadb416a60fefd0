"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app

TOOL = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]


def post(client: FlaskClient, path: str, body: dict) -> tuple[int, dict]:
    answer = client.post(path, json=body)
    return answer.status_code, answer.get_json()


def test_a_prompt_there_and_back(client: FlaskClient) -> None:
    """The reply has vLLM's four keys, and the text of the tokens is the prompt."""
    status, found = post(client, "/tokenize", {"model": "assistant", "prompt": "Grüße </s>"})
    assert status == 200
    assert set(found) == {"count", "max_model_len", "tokens", "token_strs"}
    assert found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] == 4096
    assert found["token_strs"] is None
    assert post(client, "/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "Grüße </s>"})


def test_strings_of_tokens(client: FlaskClient) -> None:
    """Token strings are those of the vocabulary, not pieces of the text."""
    found = post(client, "/tokenize", {"prompt": "a b", "return_token_strs": True})[1]
    assert found["token_strs"] == ["a", "Ġ", "b"]


@pytest.mark.parametrize("body", [{"prompt": "hello"}, {"messages": HI}, {"messages": HI, "tools": [TOOL]}])
def test_as_many_as_usage_says(client: FlaskClient, body: dict) -> None:
    """The count is the prompt tokens that a request with the same prompt is billed."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage = client.post(path, json={"model": "assistant", "max_tokens": 1, **body}).get_json()["usage"]
    assert post(client, "/tokenize", body)[1]["count"] == usage["prompt_tokens"]


def test_how_a_chat_ends(client: FlaskClient) -> None:
    """``add_generation_prompt`` and ``continue_final_message`` are transformers'."""

    def text(**options: object) -> str:
        messages = [*HI, {"role": "assistant", "content": "yes"}]
        found = post(client, "/tokenize", {"messages": messages, **options})[1]
        return str(post(client, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"])

    closed = "<user>hi</s><assistant>yes</s>"
    assert text() == text(add_generation_prompt=True) == closed + "<assistant>"
    assert text(add_generation_prompt=False) == closed
    assert text(continue_final_message=True) == closed.removesuffix("</s>")
    assert text(continue_final_message=True, add_generation_prompt=False) == closed.removesuffix("</s>")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/tokenize", {"messages": HI, "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "model": "assistant:none"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"),
    ],
)
def test_refusals(client: FlaskClient, path: str, body: dict, field: str) -> None:
    """An invalid request is refused in OpenAI's error form with the name of the field."""
    status, found = post(client, path, body)
    assert status in (400, 404)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["param"] == field


def test_no_tokens_are_no_text(client: FlaskClient) -> None:
    """An empty prompt gives no tokens, and no tokens give an empty prompt."""
    assert post(client, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert post(client, "/tokenize", {"prompt": ""})[1]["tokens"] == []


def test_no_engine_and_no_ledger(server: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is submitted, and nothing is admitted."""
    entity = next(server.endpoints.entities())
    monkeypatch.setattr(type(entity.engine), "submit", lambda *_: pytest.fail("it was run"))
    assert post(create_app(server).test_client(), "/tokenize", {"messages": HI})[0] == 200


def test_adapters_are_found(client: FlaskClient) -> None:
    """``model`` names an endpoint's adapter as it does in a request."""
    assert post(client, "/tokenize", {"model": "assistant:pirate", "prompt": "a"})[0] == 200
    assert post(client, "/tokenize", {"model": "model-1", "prompt": "a"})[0] == 200
    assert post(client, "/tokenize", {"model": "assistant:robber", "prompt": "a"})[0] == 404


def test_large_prompts_count_in_memory(make: Callable[..., WorkerState]) -> None:
    """Tokenize requests are subject to the memory budget and return all that they took of it."""
    server = make(max_body_bytes=10_000)
    client = create_app(server).test_client()
    assert post(client, "/tokenize", {"prompt": "a" * 9_000})[0] == 200
    status, found = post(client, "/tokenize", {"prompt": "a" * 20_000})
    assert (status, found["error"]["code"]) == (413, "request_too_large")
    assert server.memory.used == 0
