"""Signed receipts by header and by ``GET /api/2.0/receipts``, over a real ledger without a server around it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Price, Reservation, Store
from mlflow_llm.serving.metering.proof.chain_check import check
from mlflow_llm.serving.metering.proof.receipts import Receipt, choices_with, decode, is_genuine
from mlflow_llm.serving.modes import PayPerToken

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
HEADER = "x-mlflow-llm-receipt"
RECEIPTS, WELL_KNOWN = "/api/2.0/receipts", "/.well-known/mlflow-llm-receipts"


class Books:
    """A server with a ledger, and keys of two tenants."""

    def __init__(self, store: Store, ledger: Ledger, client: FlaskClient) -> None:
        self.store, self.ledger, self.client = store, ledger, client
        keys = Keys(store)
        self.secrets = {
            "worker": keys.create("acme")[0],
            "colleague": keys.create("acme")[0],
            "reader": keys.create("acme", scopes=("usage",))[0],
            "stranger": keys.create("zeta")[0],
            "operator": keys.create("ops", scopes=("manage",))[0],
        }

    def ask(self, path: str, body: dict[str, Any], receipt: str | None = "true") -> Any:
        headers = {"Authorization": f"Bearer {self.secrets['worker']}"}
        return self.client.post(path, json=body, headers=headers | ({HEADER: receipt} if receipt else {}))

    def get(self, who: str, request_id: str) -> Any:
        headers = {"Authorization": f"Bearer {self.secrets[who]}"}
        return self.client.get(f"{RECEIPTS}/{request_id}", headers=headers)

    @property
    def public(self) -> str:
        (key,) = self.client.get(WELL_KNOWN).json["keys"]
        assert key["algorithm"] == "Ed25519"
        return str(key["public_key"])


@pytest.fixture
def books(make: Callable[..., WorkerState], store_url: str, tmp_path: Path) -> Iterator[Books]:
    store = Store(store_url)
    ledger = Ledger(store, state_dir=tmp_path / "state")
    ledger.prices.set("*", Price(input=10**12, output=2 * 10**12))
    server = make(mode=PayPerToken(ledger), keys=Keys(store), ledger=ledger)
    yield Books(store, ledger, create_app(server).test_client())
    ledger.close()
    store.close()


def read(answer: Any) -> Receipt:
    return decode(answer.headers[HEADER].encode())


def test_a_whole_reply_has_a_receipt_of_its_row(books: Books) -> None:
    """The header has the signed row: tokens, price, model, seed and the hash of the answer; GET returns the same."""
    answer = books.ask("/v1/chat/completions", CHAT | {"seed": 7})
    receipt, text = read(answer), answer.json["choices"][0]["message"]["content"]
    content, usage = receipt["receipt"], answer.json["usage"]
    assert is_genuine(receipt, bytes.fromhex(books.public))
    assert content["request_id"] in answer.json["id"]
    assert (content["tenant"], content["endpoint"], content["status"]) == ("acme", "assistant", "ok")
    assert (content["prompt_tokens"], content["completion_tokens"]) == (usage["prompt_tokens"], 6)
    assert content["cost"] == f"{usage['prompt_tokens'] + 12}.00"
    assert content["seed"] == "7"
    assert (choices_with(receipt, text), choices_with(receipt, text + "!")) == ([0], [])
    assert books.get("worker", answer.json["id"]).json == receipt
    books.ledger.maintain()
    assert (check(books.store).rows, check(books.store).num_problems) == (1, 0)


def test_a_stream_names_the_place_of_its_receipt(books: Books) -> None:
    """The headers of a stream have the path of its receipt, which exists once the stream has ended."""
    answer = books.ask("/v1/chat/completions", CHAT | {"stream": True})
    path, body = answer.headers[HEADER], answer.get_data(as_text=True)
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert "receipt" not in body
    assert path.startswith(f"{RECEIPTS}/")
    receipt = books.get("worker", path.removeprefix(f"{RECEIPTS}/")).json
    assert choices_with(receipt, text) == [0]


def test_receipts_are_shown_to_those_who_see_the_usage(books: Books) -> None:
    """A key gets its own receipts, with "usage" its tenant's and with "manage" all; others do not find them."""
    request_id = books.ask("/v1/completions", {"model": "assistant", "prompt": "Hi", "max_tokens": 2}).json["id"]
    found = {who: books.get(who, request_id).status_code for who in books.secrets}
    assert found == {"worker": 200, "colleague": 404, "reader": 200, "stranger": 404, "operator": 200}
    assert books.get("operator", "none").status_code == 404


def test_an_x_request_id_is_told_which_id_is_meant(books: Books) -> None:
    """The id in the header finds no receipt: the error names the reply's. It does not show whether others have one."""
    answer = books.ask("/v1/completions", {"model": "assistant", "prompt": "Hi", "max_tokens": 2})
    unknown = books.get("worker", answer.headers["X-Request-Id"])
    message = unknown.json["message"]
    assert unknown.status_code == 404
    assert all(part in message for part in ("`id` of the reply", "`reply_id`", "X-Request-Id"))
    assert books.get("stranger", answer.json["id"]).json == unknown.json


def test_a_receipt_is_on_request_only(books: Books, client: FlaskClient) -> None:
    """Without the header, and with "false", there is none; other values, and servers without a ledger, refuse it by
    name."""
    for value in (None, "false"):
        assert HEADER not in books.ask("/v1/chat/completions", CHAT, value).headers
    wrong = books.ask("/v1/chat/completions", CHAT, "yes")
    assert (wrong.status_code, HEADER in wrong.json["error"]["message"]) == (400, True)
    nowhere = client.post("/v1/chat/completions", json=CHAT, headers={HEADER: "true"})
    assert (nowhere.status_code, "--database" in nowhere.json["error"]["message"]) == (400, True)
    assert client.get(WELL_KNOWN).status_code == 404


def test_a_running_request_has_no_receipt_yet(books: Books) -> None:
    """The receipt of a request that is not settled is a conflict, not an empty one."""
    names = {"tenant": "acme", "endpoint": "assistant", "entity": "model-1", "mode": "pay_per_token", "task": "chat"}
    lease = books.ledger.reserve(Reservation(request_id="r1", key_id="k", input_tokens=1, max_output_tokens=1, **names))
    assert books.get("operator", "r1").status_code == 409
    lease.settle()
    assert books.get("operator", "r1").json["receipt"]["cost"] == "1.00"


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_the_command_verifies_receipts(books: Books, tmp_path: Path) -> None:
    """``receipt verify`` accepts JSON and the header's value, names a text that is not the answer, and refuses whatever
    was altered or signed by somebody else."""
    answer = books.ask("/v1/chat/completions", CHAT)
    text = tmp_path / "text"
    text.write_text(answer.json["choices"][0]["message"]["content"] + "\n")

    def verify(given: bytes | str, *more: str) -> Any:
        return CliRunner().invoke(cli, ["receipt", "verify", "-", "--public-key", books.public, *more], input=given)

    receipt = read(answer)
    for given in (answer.headers[HEADER], json.dumps(receipt, indent=2)):
        done = verify(given, "--text", str(text))
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("genuine: request ")
        assert done.stdout.endswith(", and the text is its answer\n")
    text.write_text("another")
    assert "the text is not the answer" in verify(json.dumps(receipt), "--text", str(text)).stderr
    for name, value in (("cost", "0.00"), ("completion_tokens", 5), ("tenant", "zeta")):
        altered = receipt | {"receipt": receipt["receipt"] | {name: value}}
        assert "not genuine" in verify(json.dumps(altered)).stderr
    forged = receipt | {"signature": base64.b64encode(b"x" * 64).decode()}
    assert (verify(json.dumps(forged)).exit_code, verify("nothing").exit_code) == (1, 2)
    other = CliRunner().invoke(cli, ["receipt", "verify", "-", "--public-key", "00"], input=json.dumps(receipt))
    assert "64 hexadecimal digits" in other.stderr
