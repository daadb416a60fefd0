"""Aliases of models and the default endpoint, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from mlflow_llm.serving.cli.serve.command import serve
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Keys, Ledger, Store
from mlflow_llm.serving.metering.usage.filter import filter_of
from mlflow_llm.serving.metering.usage.usage import Usage
from mlflow_llm.serving.modes import PayPerToken

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ALIASES = {"gpt-4o": "assistant", "claude-*": "assistant:pirate"}


@pytest.fixture
def client(make: Callable[..., WorkerState]) -> FlaskClient:
    return create_app(make(model_aliases=ALIASES, default_endpoint="assistant")).test_client()


@pytest.mark.parametrize(
    ("path", "model", "answers"),
    [
        ("/v1/chat/completions", "gpt-4o", "assistant"),
        ("/v1/chat/completions", "gpt-4o:pirate", "assistant:pirate"),
        ("/v1/chat/completions", None, "assistant"),
        ("/v1/messages", "claude-sonnet-4", "assistant:pirate"),
        ("/endpoints/gpt-4o/invocations", None, "assistant"),
    ],
)
def test_a_reply_names_the_true_endpoint(client: FlaskClient, path: str, model: str | None, answers: str) -> None:
    """A request to an alias is answered by its endpoint or adapter, which the reply names."""
    answer = client.post(path, json=BODY | ({} if model is None else {"model": model}))
    assert (answer.status_code, answer.json["model"]) == (200, answers), answer.json


def test_lists_have_no_aliases(client: FlaskClient) -> None:
    """``/v1/models`` lists each model once, by its own name; a model asked for by an alias is shown by its own name."""
    assert [one["id"] for one in client.get("/v1/models").json["data"]] == ["assistant", "assistant:pirate"]
    assert client.get("/v1/models/gpt-4o").json["id"] == "assistant"
    assert client.get("/v1/models/gpt-5").status_code == 404


def test_ledger_and_rights_are_of_the_endpoint(make: Callable[..., WorkerState], tmp_path: Path) -> None:
    """The ledger's row has the endpoint's name, and a key for other endpoints cannot use an alias."""
    store = Store(f"sqlite:///{tmp_path}/serving.db")
    ledger, keys = Ledger(store, state_dir=tmp_path / "state"), Keys(store)
    server = make(mode=PayPerToken(ledger), ledger=ledger, keys=keys, model_aliases={"gpt-4o": "assistant"})
    client = create_app(server).test_client()

    def ask(*endpoints: str) -> Any:
        secret, _ = keys.create("t", endpoints=endpoints)
        headers = {"Authorization": f"Bearer {secret}"}
        return client.post("/v1/chat/completions", json=BODY | {"model": "gpt-4o"}, headers=headers)

    assert ask("assistant").status_code == 200
    assert ask("other").status_code == 404
    assert [row.endpoint for row in Usage(store).rows(filter_of({}))] == ["assistant"]
    store.close()


@pytest.mark.parametrize("aliases", [{"": "assistant"}, {"a": ""}, {"a": "no such name"}, {"a": "b:c:d"}])
def test_bad_aliases_are_refused(aliases: dict[str, str]) -> None:
    """An alias without a name, or of what cannot be an endpoint, is refused by the setting's name."""
    with pytest.raises(InvalidField, match=r"^model_aliases: "):
        ServerSettings(model_aliases=aliases)


@pytest.mark.parametrize("given", ["gpt-4o", "=assistant", "gpt-4o="])
def test_the_option_names_what_is_missing(given: str) -> None:
    """``--model-alias`` without a name, "=" or endpoint is refused before anything starts."""
    found = CliRunner().invoke(serve, ["-m", "models:/a/1", "--model-alias", given])
    assert (found.exit_code, "expected NAME=ENDPOINT" in " ".join(found.output.split())) == (2, True), found.output
