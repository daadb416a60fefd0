"""Limits of end users over HTTP: named by a trusted front end in the body or a header, and set by API and command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from flask.testing import FlaskClient

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.store import tables
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


def left(place: Place, headers: dict[str, str], **query: str) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    """Return the limits of end users in a caller's account, by scope, kind and end user."""
    found = place.client.get("/api/2.0/account", query_string=query, headers=headers)
    assert found.status_code == 200, found.json
    assert all((one["end_user"] is not None) == one["scope"].endswith("_user") for one in found.json["limits"])
    shown = [one for one in found.json["limits"] if one["end_user"] is not None]
    return {(one["scope"], one["kind"], one["end_user"]): one for one in shown}


def test_a_front_end_sees_what_is_left_for_an_end_user(place: Place) -> None:
    """The account has the limits of the end user that is named, on the key, its tenant and its endpoints: used, left
    and when they are free again, as a refusal says it; an own limit stands in place of that of each."""
    front = place.key("invoke", "end_users")
    key_id = place.keys.list("acme")[0].key_id
    limit(place, scope="tenant_user", subject="acme", limits={"qpm": 3, "budget_month": "1.50"})
    limit(place, scope="tenant_user", subject="acme", end_user="eve", limits={"qpm": 2})
    limit(place, scope="key_user", subject=key_id, limits={"otpm": 50})
    limit(place, scope="endpoint_user", subject="assistant", limits={"qph": 4})
    place.client.put("/api/2.0/limits", json={"scope": "key", "subject": key_id, "limits": {"qph": 9}})
    for user in ("ada", "ada", "eve"):
        assert place.client.post(OPENAI, json=CHAT | {"user": user}, headers=front).status_code == 200
    ada = left(place, front, end_user="ada")
    assert {(*at[:2], one["allowed"], one["used"], one["remaining"]) for at, one in ada.items()} == {
        ("tenant_user", "qpm", 3, 2, 1),
        ("tenant_user", "budget_month", "1.50", "0.00", "1.50"),
        ("key_user", "otpm", 50, 4, 46),
        ("endpoint_user", "qph", 4, 2, 2),
    }
    assert 0 < ada["tenant_user", "qpm", "ada"]["reset_seconds"] <= 61
    assert ada["endpoint_user", "qph", "ada"]["endpoint"] == "assistant"
    own = left(place, front, end_user="eve")["tenant_user", "qpm", "eve"]
    assert (own["allowed"], own["used"]) == (2, 1)
    assert left(place, front) == {}
    assert left(place, front | {HEADER: "ada"}, end_user="eve") == left(place, front, end_user="ada")


def test_asking_for_end_users_that_never_were_writes_nothing(place: Place) -> None:
    """A name that was made up has all of its limits left, and no window in the store."""
    front = place.key("invoke", "end_users")
    limit(place, scope="tenant_user", subject="acme", limits={"qpm": 3})
    for number in range(5):
        assert left(place, front, end_user=f"made up {number}")["tenant_user", "qpm", f"made up {number}"]["used"] == 0
    query = sa.select(sa.func.count()).select_from(tables.windows)
    assert place.store.read(lambda connection: connection.execute(query).scalar_one()) == 0


def test_nobody_else_sees_end_users(place: Place) -> None:
    """A key without the scope names none, by parameter or header; another tenant's "ada" is another; and a wrong
    parameter is named."""
    front, other = place.key("invoke", "end_users"), place.key("invoke", "usage", "manage")
    stranger = {"Authorization": f"Bearer {place.keys.create('zeta', scopes=('invoke', 'end_users'))[0]}"}
    limit(place, scope="endpoint_user", subject="assistant", limits={"qpm": 3})
    assert place.client.post(OPENAI, json=CHAT | {"user": "ada"}, headers=front).status_code == 200
    account = "/api/2.0/account"
    assert place.client.get(f"{account}?end_user=ada", headers=other).status_code == 403
    assert place.client.get(account, headers=other | {HEADER: "ada"}).status_code == 403
    assert left(place, stranger, end_user="ada")["endpoint_user", "qpm", "ada"]["used"] == 0
    for query in ("end_user=", f"end_user={'a' * 257}", "end_user=a%00b", "user=ada", "end_user=a&end_user=b"):
        refused = place.client.get(f"{account}?{query}", headers=front)
        assert (refused.status_code, refused.json["message"].startswith(query.partition("=")[0])) == (400, True)
