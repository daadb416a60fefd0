"""Guardrails of an endpoint over HTTP, in the forms of the dialects: blocked and masked requests and replies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.guardrails import KEYWORD, Guardrails, Pii, TextRules
from mlflow_llm.serving.metering import Ledger, Store, Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints
from mlflow_llm.serving.tasks.text_filter import filtered

CHAT: dict[str, Any] = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 40,
    "temperature": 0,
}
OPENAI, ANTHROPIC, RESPONSES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
MASK, BLOCK = Pii(behavior="MASK"), Pii(behavior="BLOCK")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    opened = Ledger(store, state_dir=tmp_path)
    yield opened
    opened.close()
    store.close()


@pytest.fixture
def serve(make: Callable[..., WorkerState], ledger: Ledger) -> Callable[..., FlaskClient]:
    def client(**rules: TextRules) -> FlaskClient:
        server = make(mode=PayPerToken(ledger), ledger=ledger)
        (entity,) = server.endpoints.entities()
        served = ServedEndpoints(dataclasses.replace(entity, guardrails=Guardrails(**rules)))
        return create_app(dataclasses.replace(server, endpoints=served)).test_client()

    return client


def said(client: FlaskClient, **changes: Any) -> str:
    """Return the text of a reply."""
    answer = client.post(OPENAI, json=CHAT | changes)
    assert answer.status_code == 200, answer.json
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def streamed(client: FlaskClient, **changes: Any) -> tuple[str, str]:
    """Return the text of a streamed reply, and why it ended."""
    answer = client.post(OPENAI, json=CHAT | changes | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(one["delta"].get("content") or "" for one in choices), choices[-1]["finish_reason"]


def test_a_blocked_request_is_a_400_that_names_the_rule(serve: Callable[..., FlaskClient], ledger: Ledger) -> None:
    """In the form of each dialect, with the rule and without the text that it has found; nothing runs or is billed."""
    client = serve(input=TextRules(invalid_keywords=("project x",), pii=BLOCK))
    for text, rule in (("about Project X?", "invalid_keywords"), ("I am ada@example.org", "email")):
        messages = [{"role": "user", "content": text}]
        parts = [{"role": "user", "content": [{"type": "text", "text": text[:6]}, {"type": "text", "text": text[6:]}]}]
        asked = [
            (OPENAI, CHAT | {"messages": messages}),
            (OPENAI, CHAT | {"messages": parts}),
            (ANTHROPIC, CHAT | {"messages": messages}),
            (RESPONSES, {"model": "assistant", "input": text}),
            (TEXT, {"model": "assistant", "prompt": text}),
            ("/v1/embeddings", {"model": "assistant", "input": [text]}),
        ]
        for path, body in asked:
            refused = client.post(path, json=body)
            assert refused.status_code == 400, (path, refused.json)
            assert f"the input guardrail '{rule}' of this endpoint blocks the request" in refused.text
            assert "ada@" not in refused.text
            assert "roject" not in refused.text
    assert client.post(TEXT, json={"model": "assistant", "prompt": [1, 2]}).status_code == 400
    assert list(Usage(ledger.store).rows(UsageFilter())) == []
    assert client.post(OPENAI, json=CHAT).status_code == 200


def test_a_masked_request_reaches_the_model_masked(serve: Callable[..., FlaskClient]) -> None:
    """The model answers as if the caller had written the mask."""
    masked, plain = serve(input=TextRules(pii=MASK)), serve()
    sent, seen = "I am ada@example.org.", "I am [redacted]."
    found = [
        client.post(OPENAI, json=CHAT | {"messages": [{"role": "user", "content": text}]}).json
        for client, text in ((masked, sent), (plain, seen), (plain, sent))
    ]
    tokens = [one["usage"]["prompt_tokens"] for one in found]
    assert tokens[0] == tokens[1] != tokens[2]
    assert found[0]["choices"][0]["message"] == found[1]["choices"][0]["message"]


def test_a_blocked_reply_ends_before_the_text(serve: Callable[..., FlaskClient], ledger: Ledger) -> None:
    """Streamed or whole, it ends in the dialect's own way, and the tokens that were generated are billed."""
    whole = said(serve())
    pairs = [whole[i : i + 2] for i in range(4, len(whole)) if KEYWORD.fullmatch(whole[i : i + 2])]
    rules = next(one for pair in pairs if filtered(whole, one := TextRules(invalid_keywords=(pair,)))[1])
    client = serve(output=rules)
    answer = client.post(OPENAI, json=CHAT).json
    text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
    assert (text, "invalid_keywords", reason) == (*filtered(whole, rules), "content_filter")
    assert len(text) < len(whole)
    assert streamed(client) == (text, "content_filter")
    assert client.post(ANTHROPIC, json=CHAT).json["stop_reason"] == "refusal"
    body = {"model": "assistant", "input": "Hi", "max_output_tokens": 40, "temperature": 0}
    ended = client.post(RESPONSES, json=body).json
    assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    rows = list(Usage(ledger.store).rows(UsageFilter()))
    assert {row.finish_reason for row in rows[1:]} == {"content_filter"}
    assert all(row.completion_tokens > 0 for row in rows)
    assert answer["usage"]["completion_tokens"] in {row.completion_tokens for row in rows}


def test_numbers_that_say_what_was_said_are_refused(serve: Callable[..., FlaskClient]) -> None:
    """Log probabilities have the texts of tokens, so that an endpoint with output guardrails gives none."""
    refused = serve(output=TextRules(pii=MASK)).post(OPENAI, json=CHAT | {"logprobs": True})
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "logprobs")
    assert serve(input=TextRules(pii=MASK)).post(OPENAI, json=CHAT | {"logprobs": True}).status_code == 200
