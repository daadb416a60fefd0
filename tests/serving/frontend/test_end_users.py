"""Limits of end users over HTTP: named by a trusted front end in the body or a header, and set by API and command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Store, Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken

CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
OPENAI, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEADER = "X-End-User"


class Place:
    """A server with keys and a ledger whose header of end users is ``HEADER``, or another."""

    def __init__(self, make: Callable[..., WorkerState], root: Path) -> None:
        self.url = f"sqlite:///{root}/ledger.db"
        self._make, self.store = make, Store(self.url)
        self.keys, self.ledger = Keys(self.store), Ledger(self.store, state_dir=root)
        self.client = self.served(end_user_header=HEADER)

    def served(self, **settings: Any) -> FlaskClient:
        server = self._make(keys=self.keys, ledger=self.ledger, mode=PayPerToken(self.ledger), **settings)
        return create_app(server).test_client()

    def key(self, *scopes: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys.create('acme', scopes=scopes)[0]}"}


@pytest.fixture
def place(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[Place]:
    found = Place(make, tmp_path)
    yield found
    found.ledger.close()
    found.store.close()


def limit(place: Place, **given: Any) -> None:
    done = place.client.put("/api/2.0/limits", json=given, headers=place.key("manage"))
    assert done.status_code == 200, done.json


def test_the_field_of_each_dialect_names_the_end_user(place: Place) -> None:
    """OpenAI's user, Anthropic's metadata.user_id and the Responses API's user count together, by their name."""
    front = place.key("invoke", "end_users")
    limit(place, scope="tenant_user", subject="acme", limits={"qpm": 3})
    answers = [
        place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=front),
        place.client.post(ANTHROPIC, json=CHAT | {"metadata": {"user_id": "ada"}}, headers=front),
        place.client.post(RESPONSES, json={"model": "assistant", "input": "Hi", "user": "ada"}, headers=front),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200], answers[-1].json
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    refused = place.client.post(ANTHROPIC, json=CHAT | {"metadata": {"user_id": "ada"}}, headers=front)
    assert (refused.status_code, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert "qpm: the limit of each end user of the tenant is 3 queries a minute" in refused.json["error"]["message"]
    refused = place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=front)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert int(refused.headers["Retry-After"]) <= 61
    assert place.client.post(OPENAI, json=CHAT | {"user": "bo"}, headers=front).status_code == 200
    assert place.client.post(OPENAI, json=CHAT, headers=front).status_code == 200


def test_an_untrusted_key_names_nobody(place: Place) -> None:
    """The user of other keys is a label: it neither has limits nor uses up those of a real end user."""
    front, other = place.key("invoke", "end_users"), place.key("invoke")
    limit(place, scope="tenant_user", subject="acme", limits={"qpm": 1})
    for _ in range(3):
        assert place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=other).status_code == 200
    assert place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=front).status_code == 200
    assert place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=front).status_code == 429
    refused = place.client.post(OPENAI, json=CHAT, headers=other | {HEADER: "ada"})
    assert (refused.status_code, refused.json["error"]["message"].startswith(f"{HEADER}: only")) == (403, True)


def test_the_header_goes_before_the_body(place: Place) -> None:
    """A front end passes on a body that its user has written; the header decides, and the ledger has its name."""
    front = place.key("invoke", "end_users")
    limit(place, scope="key_user", subject=place.keys.list()[0].key_id, limits={"qpm": 1})
    for user in ("x", "y"):
        answer = place.client.post(OPENAI, json=CHAT | {"user": user}, headers=front | {HEADER: "ada"})
    assert answer.status_code == 429
    assert [row.end_user for row in Usage(place.store).rows(UsageFilter())] == ["ada"]
    for bad in ("", "a" * 257):
        refused = place.client.post(OPENAI, json=CHAT, headers=front | {HEADER: bad})
        assert (refused.status_code, refused.json["error"]["param"]) == (400, HEADER)
    without = place.served()
    assert without.post(OPENAI, json=CHAT | {"user": "z"}, headers=front | {HEADER: "ada"}).status_code == 200


def test_limits_of_end_users_by_api_and_command(place: Place) -> None:
    """A rule and a named end user's own limit are set, listed and removed, each by itself."""
    manage = place.key("manage")
    limit(place, scope="endpoint_user", subject="assistant", limits={"qpm": 2, "budget_day": "0.5"})

    def run(*words: str) -> list[str]:
        done = CliRunner().invoke(cli, ["limits", *words], env={"MLFLOW_LLM_DATABASE": place.url})
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    own = ("endpoint_user", "assistant", "--end-user", "ada")
    assert run("set", *own, "qpm=9")[0] == "endpoint_user assistant ada: 9 queries a minute"
    listed = place.client.get("/api/2.0/limits?scope=endpoint_user&subject=assistant", headers=manage).json["limits"]
    assert [(one["end_user"], one["kind"], one["value"]) for one in listed] == [
        ("", "budget_day", "0.50"), ("", "qpm", 2), ("ada", "qpm", 9)
    ]  # fmt: skip
    head, *lines = run("list")
    assert head.split() == ["scope", "subject", "end", "user", "kind", "value", "unit"]
    assert lines[-1].split()[:5] == ["endpoint_user", "assistant", "ada", "qpm", "9"]
    run("remove", *own, "qpm")
    gone = place.client.delete(
        "/api/2.0/limits?scope=endpoint_user&subject=assistant&kind=qpm&end_user=ada", headers=manage
    )
    assert (gone.status_code, "of its own for 'ada'" in str(gone.json)) == (404, True)
    assert len(run("list")) == 3
    wrong = place.client.put(
        "/api/2.0/limits",
        json={"scope": "tenant_user", "subject": "acme", "limits": {"budget": "1"}},
        headers=manage,
    )
    assert (wrong.status_code, "for end users one of" in str(wrong.json)) == (400, True)
