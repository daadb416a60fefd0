"""Webhooks: events of rollouts are kept with what they tell of, signed, and sent until they are accepted."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from mlflow.webhooks import constants

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.webhooks import GIVE_UP_SECONDS, WebhookSender, read_secret
from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.gateways import Fence
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.accounts.audit import Actor
from mlflow_llm.serving.metering.store.outbox import MAX_WAITING, EventOutbox
from mlflow_llm.serving.metering.store.tables import webhook_deliveries

SECRET = b"a secret of more than thirty-two bytes"
LEADS = Fence(holder="a", number=1)
CONFIG = {"served_entities": [{"name": "main", "entity_name": "assistant", "entity_version": "1"}]}


class AtOnce(Executor):
    """An executor that runs what it is given before it returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **options))
        return done


class Receiver:
    """A webhook that answers with ``status``, and keeps what it was sent."""

    def __init__(self) -> None:
        self.status, self.got = 200, []  # type: ignore[var-annotated]
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.got.append((self.path, self.headers, body))
                self.send_response(receiver.status)
                if 300 <= receiver.status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def events(self) -> list[str]:
        return [json.loads(body)["type"] for _, _, body in self.got]


class Place:
    """A store with endpoints, a webhook, and a sender under one clock."""

    def __init__(self, url: str, receiver: Receiver) -> None:
        self.now = 1_800_000_000.5
        self.store, self.receiver = Store(url), receiver
        self.outbox = EventOutbox(self.store, (receiver.url,), clock=lambda: self.now)
        bundle = Bundle(content_hash="7" * 64, tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
        self.endpoints = EndpointStore(
            self.store,
            locate=lambda found: tuple(ModelSource(uri=one.uri, bundle=bundle) for one in found),
            outbox=self.outbox,
        )
        self.sender = self.new_sender()

    def new_sender(self) -> WebhookSender:
        return WebhookSender(self.outbox, SECRET, clock=lambda: self.now, monotonic=lambda: self.now, thread=AtOnce())

    def run(self, seconds: float = 1.0, fence: Fence | None = LEADS) -> None:
        self.now += seconds
        for _ in range(2):  # an attempt is recorded in the tick after it
            self.sender.tick(fence)

    @property
    def waiting(self) -> int:
        count = sa.select(sa.func.count()).select_from(webhook_deliveries)
        return int(self.store.read(lambda connection: connection.execute(count).scalar_one()))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path, receiver: Receiver) -> Iterator[Place]:
    made = Place(f"sqlite:///{tmp_path / 'serving.db'}", receiver)
    yield made
    made.store.close()


@pytest.fixture
def anywhere(store_url: str, receiver: Receiver) -> Iterator[Place]:
    """Yield a place in each kind of database."""
    made = Place(store_url, receiver)
    yield made
    made.store.close()


def test_the_rollouts_of_an_endpoint_are_told(anywhere: Place) -> None:
    """Begin, end and failure, each once, in their order, with what is served and why."""
    place = anywhere
    place.endpoints.create({"name": "chat", "config": CONFIG})
    place.run()
    place.endpoints.mark_ready("chat", 1)
    place.endpoints.update_config("chat", CONFIG, by=Actor(name="key-1", via="http"))
    place.run()
    place.endpoints.mark_failed("chat", 2, "no memory")
    place.run()
    place.run(100)
    assert sorted(place.receiver.events) == [
        "rollout.failed",
        "rollout.finished",
        "rollout.started",
        "rollout.started",
    ]
    assert (place.receiver.events[0], place.receiver.events[-1]) == ("rollout.started", "rollout.failed")
    data = json.loads(place.receiver.got[-1][2])["data"]
    entity = {"name": "main", "model": "assistant/1", "content_hash": "7" * 64, "traffic_percentage": 100}
    assert data == {
        "endpoint": "chat",
        "config_version": 2,
        "by": "key-1",
        "message": "no memory",
        "served_entities": [entity],
    }
    assert place.waiting == 0


def test_an_event_is_signed_as_mlflow_signs(place: Place) -> None:
    """A receiver of MLflow's own webhooks verifies it: the id of the event, the time and the body are signed, under
    MLflow's names of headers."""
    place.endpoints.create({"name": "chat", "config": CONFIG})
    place.run()
    ((path, headers, body),) = place.receiver.got
    sent_at = headers[constants.WEBHOOK_TIMESTAMP_HEADER]
    assert (path, sent_at) == ("/hook", "1800000001")
    found = json.loads(body)
    assert found["id"] == headers[constants.WEBHOOK_DELIVERY_ID_HEADER]
    assert found["timestamp"] == "2027-01-15T08:00:00.500+00:00"
    version, _, signature = headers[constants.WEBHOOK_SIGNATURE_HEADER].partition(",")
    expected = hmac.digest(SECRET, f"{found['id']}.{sent_at}.{body}".encode(), hashlib.sha256)
    assert (version, base64.b64decode(signature)) == (constants.WEBHOOK_SIGNATURE_VERSION, expected)


@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_webhook_that_refuses_is_asked_again(place: Place, status: int) -> None:
    """At growing intervals, with the same id, also by another process; a redirection is not followed."""
    place.receiver.status = status
    place.endpoints.create({"name": "chat", "config": CONFIG})
    place.run()
    place.run(9)
    assert len(place.receiver.got) == 1
    place.run(1)
    place.run(19)
    assert len(place.receiver.got) == 2
    place.sender = place.new_sender()
    place.receiver.status = 204
    place.run(1)
    assert (len(place.receiver.got), place.waiting) == (3, 0)
    assert len({headers["X-MLflow-Delivery-Id"] for _, headers, _ in place.receiver.got}) == 1
    assert {path for path, _, _ in place.receiver.got} == {"/hook"}


def test_an_event_is_given_up_after_a_day(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A webhook that never answers does not fill the database, and the log says which event it lacks."""
    place.receiver.close()
    place.endpoints.create({"name": "chat", "config": CONFIG})
    for _ in range(60):
        place.run(GIVE_UP_SECONDS / 40)
    assert place.waiting == 0
    assert "(rollout.started) is given up" in caplog.text
    place.receiver.server, place.receiver.thread = (other := Receiver()).server, other.thread


def test_only_the_leader_sends(place: Place) -> None:
    """Other gateways leave the events where they are."""
    place.endpoints.create({"name": "chat", "config": CONFIG})
    place.run(fence=None)
    assert (place.receiver.got, place.waiting) == ([], 1)


def test_the_events_that_wait_are_bounded(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond the bound, the oldest go, and the log says how many."""
    rows = [{"id": f"{n:032}", "url": "http://a", "at_ms": n, "type": "t", "body": "{}", "attempts": 0, "due_ms": n}
            for n in range(MAX_WAITING)]  # fmt: skip
    place.store.write(lambda connection: connection.execute(sa.insert(webhook_deliveries), rows))
    place.endpoints.create({"name": "chat", "config": CONFIG})
    assert place.waiting == MAX_WAITING
    assert "1 events were given up" in caplog.text


def test_without_webhooks_no_event_is_kept(place: Place) -> None:
    """A server without webhooks writes nothing for them."""
    place.outbox = EventOutbox(place.store, ())
    endpoints = EndpointStore(place.store, locate=lambda found: (), outbox=place.outbox)
    place.endpoints.create({"name": "chat", "config": CONFIG})
    before = place.waiting
    endpoints.mark_ready("chat", 1)
    assert place.waiting == before


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"webhook_urls": "ftp://a/b", "webhook_secret_file": "s"}, "webhook_urls"),
        ({"webhook_urls": "https://", "webhook_secret_file": "s"}, "webhook_urls"),
        ({"webhook_urls": "https://me:secret@a/b", "webhook_secret_file": "s"}, "webhook_urls"),
        ({"webhook_urls": "https://a:port/b", "webhook_secret_file": "s"}, "webhook_urls"),
        ({"webhook_urls": "https://a/b"}, "webhook_secret_file"),
        ({"webhook_secret_file": "s"}, "webhook_secret_file"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, str], field: str) -> None:
    """Each by its name; a password in a URL is not repeated."""
    with pytest.raises(InvalidField) as refused:
        ServerSettings(**settings)  # type: ignore[arg-type]
    assert refused.value.param == field
    assert "secret@" not in str(refused.value)


def test_the_secret_is_in_a_file_of_its_owner(tmp_path: Path) -> None:
    """A file that others can read is refused, by the name of the setting."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    settings = ServerSettings(webhook_urls="https://a/b, https://c/d", webhook_secret_file=str(file))
    assert (read_secret(settings), settings.webhooks) == (SECRET, ("https://a/b", "https://c/d"))
    file.chmod(0o644)
    with pytest.raises(PackagingError, match=r"^webhook_secret_file .* can be read by others"):
        read_secret(settings)
    assert read_secret(ServerSettings()) is None
