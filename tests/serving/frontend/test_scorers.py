"""Scorers of MLflow's as guardrails: whole texts are judged in a process beside the worker, streams too."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.scorers import Scorers
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.guardrails import Guardrails, ScorerRule, TextRules
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

NAMES = "judges:polite, judges:nothing,judges:broken,judges:slow,judges:plain,no_such_module:x"
CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    """Return scorers with one process for all tests; the one that is too slow costs a process."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    found = Scorers(NAMES)
    yield found
    found.close()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def serve(make: Callable[..., WorkerState], scorers: Scorers) -> Callable[..., FlaskClient]:
    def client(**rules: TextRules) -> FlaskClient:
        server = make()
        (entity,) = server.endpoints.entities()
        served = ServedEndpoints(dataclasses.replace(entity, guardrails=Guardrails(**rules)))
        return create_app(dataclasses.replace(server, endpoints=served, scorers=scorers)).test_client()

    return client


def by(name: str, **more: Any) -> TextRules:
    return TextRules(scorers=(ScorerRule(scorer=name, **more),))


def test_a_scorer_judges_requests(serve: Callable[..., FlaskClient]) -> None:
    """A request that it lets pass is answered, and one that it blocks is a 400 that names the scorer."""
    client = serve(input=by("judges:polite", timeout=100))
    assert client.post(PATH, json=CHAT).status_code == 200
    refused = client.post(PATH, json=CHAT | {"messages": [{"role": "user", "content": "be rude"}]})
    assert (refused.status_code, "input guardrail 'judges:polite'" in refused.text) == (400, True)


def test_a_scorer_judges_replies(serve: Callable[..., FlaskClient]) -> None:
    """Whole or streamed, a blocked reply has no text and ends with content_filter; another one is as it was."""
    body = CHAT | {"temperature": 0}
    plain = serve().post(PATH, json=body).json["choices"][0]
    assert serve(output=by("judges:polite", timeout=100)).post(PATH, json=body).json["choices"][0] == plain
    client = serve(output=by("judges:nothing", timeout=100))
    whole = client.post(PATH, json=body).json
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == ("", "content_filter")
    assert whole["usage"]["completion_tokens"] > 0
    lines = client.post(PATH, json=body | {"stream": True}).text.split("\n\n")[:-2]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == "content_filter"


@pytest.mark.parametrize("name", ["judges:broken", "judges:plain", "no_such_module:x", "not:allowed"])
def test_a_failure_blocks_or_passes_as_the_rule_says(serve: Callable[..., FlaskClient], name: str) -> None:
    """A request without verdict is a 503, a reply is filtered; with PASS both go on."""
    refused = serve(input=by(name, timeout=100)).post(PATH, json=CHAT)
    assert (refused.status_code, "gave no verdict" in refused.text) == (503, True)
    assert serve(input=by(name, on_error="PASS", timeout=100)).post(PATH, json=CHAT).status_code == 200
    blocked = serve(output=by(name, timeout=100)).post(PATH, json=CHAT).json["choices"][0]
    assert blocked["finish_reason"] == "content_filter"
    passed = serve(output=by(name, on_error="PASS", timeout=100)).post(PATH, json=CHAT).json["choices"][0]
    assert passed["finish_reason"] != "content_filter"


def test_a_scorer_has_a_time_limit(serve: Callable[..., FlaskClient]) -> None:
    """One that does not answer is a failure, and its process gives way to another, which answers again."""
    assert serve(input=by("judges:slow", timeout=0.2)).post(PATH, json=CHAT).status_code == 503
    assert serve(input=by("judges:polite", timeout=100)).post(PATH, json=CHAT).status_code == 200


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_text_waits_for_its_turn_no_longer_than_its_request(
    make: Callable[..., WorkerState], scorers: Scorers, side: str
) -> None:
    """While another text is judged, a request ends as timed out when its own time is over."""
    own = Scorers(NAMES)
    server = make()
    (entity,) = server.endpoints.entities()
    guardrails = Guardrails(**{side: by("judges:polite", on_error="PASS", timeout=100)})
    served = ServedEndpoints(dataclasses.replace(entity, guardrails=guardrails))
    client = create_app(dataclasses.replace(server, endpoints=served, scorers=own)).test_client()
    before = gevent.spawn(own.passes, ScorerRule(scorer="judges:slow", timeout=120), {}, "Hi")
    gevent.sleep(0)  # it has its turn from now on, and never ends
    try:
        answer = client.post(PATH, json=CHAT, headers={"X-Request-Timeout": "0.05"})
        assert answer.status_code == 504
    finally:
        before.kill()
        own.close()
