"""Files and batches of a real server with a store, through OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import openai
import psutil
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from gated_core import steps_up_to
from instant_model import write_instant_model
from server_calls import until
from serving_process import GATED_CORE, Running, running

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.frontend.worker_state import make_server
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Limits, Price, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.prices import Prices
from mlflow_llm.serving.metering.store.tables import batch_rows, batches
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True}
URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'ledger.db'}")
    prices = Prices(store)
    prices.set("*", Price(input=2_000_000, output=4_000_000))
    prices.set("batch:*", Price(input=1_000_000, output=3_000_000))
    yield store
    store.close()


@pytest.fixture(scope="module")
def secrets(store: Store) -> dict[str, str]:
    keys = Keys(store)
    return {tenant: keys.create(tenant)[0] for tenant in ("acme", "other")}


@pytest.fixture(scope="module")
def server(store: Store, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of two workers whose engine answers at once."""
    root: Path = tmp_path_factory.mktemp("batches")
    url = f"sqlite:///{store.engine.url.database}"
    bundle = write_instant_model(root)
    with running(
        bundle, workers=2, database=url, state_dir=str(root / "state"), require_keys=True, max_batch_rows=50
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running, secrets: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secrets["acme"], max_retries=0) as client:
        yield client


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT | {"max_tokens": 4} | body}


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def start(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: str = URL, **more: Any) -> str:
    created = client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **more
    )
    assert created.status == "validating"
    return created.id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "expired", "cancelled"))
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    text = client.files.content(file_id).text
    assert client.files.retrieve(file_id).bytes == len(text.encode())
    return [json.loads(one) for one in text.splitlines()]


def billed(store: Store, batch_id: str) -> list[Any]:
    """Return the ledger's rows of a batch."""
    return [row for row in Usage(store).rows(UsageFilter()) if (row.tags or {}).get("batch_id") == batch_id]


def test_each_request_is_answered_once_and_billed(client: openai.OpenAI, store: Store) -> None:
    """A batch of thirty chats, one of them invalid: outputs in the order of the input, counts, usage and bill agree."""
    lines = [line(f"row-{i}", max_tokens=1 + i % 5) for i in range(29)] + [line("wrong", temperature=9)]
    batch = ended(client, start(client, lines, metadata={"team": "search"}))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 29, 1)
    assert batch.metadata == {"team": "search"}
    found = content(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [f"row-{i}" for i in range(29)]
    assert {one["response"]["status_code"] for one in found} == {200}
    usages = [one["response"]["body"]["usage"] for one in found]
    assert [usage["completion_tokens"] for usage in usages] == [1 + i % 5 for i in range(29)]
    (wrong,) = content(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert "temperature" in wrong["response"]["body"]["error"]["message"]
    rows = billed(store, batch.id)
    assert {row.mode for row in rows} == {"batch"}
    assert sum(row.completion_tokens for row in rows) == batch.usage.output_tokens
    assert sum(row.prompt_tokens for row in rows) == batch.usage.input_tokens == sum(u["prompt_tokens"] for u in usages)
    assert sum(row.cost for row in rows) == sum(row.prompt_tokens + 3 * row.completion_tokens for row in rows)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "assistant", "prompt": "Hi", "max_tokens": 3}),
        ("/v1/embeddings", {"model": "assistant", "input": ["Hi", "there"]}),
        ("/v1/responses", {"model": "assistant", "input": "Hi", "max_output_tokens": 16}),
    ],
)
def test_the_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    """Completions, embeddings and responses run as batches, with bodies as those of their routes."""
    batch = ended(
        client, start(client, [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}], endpoint)
    )
    assert (batch.status, batch.error_file_id) == ("completed", None)
    (found,) = content(client, batch.output_file_id)
    assert found["response"]["body"]["usage"]["total_tokens"] > 0


def test_an_input_that_cannot_run_is_refused_by_line(client: openai.OpenAI) -> None:
    """A batch fails before it runs if lines are not JSON, of another endpoint, streamed or repeated."""
    lines = [line("a"), line("a"), line("b", url="/v1/completions"), line("c", stream=True), {"custom_id": "d"}]
    batch = ended(client, start(client, lines))
    assert batch.status == "failed"
    assert [(one.line, one.param) for one in batch.errors.data] == [
        (2, "custom_id"),
        (3, "url"),
        (4, "body.stream"),
        (5, "method"),
    ]
    assert batch.errors.data[0].code == "duplicate_custom_id"
    file = client.files.create(file=("in.jsonl", b"\n{nonsense\n"), purpose="batch")
    broken = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    assert [(one.code, one.line) for one in ended(client, broken.id).errors.data] == [("invalid_json_line", 2)]
    assert ended(client, start(client, [])).errors.data[0].code == "empty_file"
    assert ended(client, start(client, [line(str(i)) for i in range(51)])).errors.data[0].code == "too_many_requests"


def test_files_are_listed_shown_and_deleted(client: openai.OpenAI) -> None:
    """A file is found by its tenant in lists and by id until it is deleted, and has the bytes that were uploaded."""
    file_id = upload(client, [line("a")])
    assert [one["custom_id"] for one in content(client, file_id)] == ["a"]
    listed = client.files.list(purpose="batch", limit=1)
    assert [one.id for one in listed.data] == [file_id]
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)


def test_another_tenant_sees_nothing(client: openai.OpenAI, server: Running, secrets: dict[str, str]) -> None:
    """Files and batches of one tenant do not exist for the key of another."""
    file_id = upload(client, [line("a")])
    batch_id = start(client, [line("a")])
    ended(client, batch_id)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secrets["other"], max_retries=0) as other:
        assert (list(other.files.list()), list(other.batches.list())) == ([], [])
        for call in (
            lambda: other.files.retrieve(file_id),
            lambda: other.files.content(file_id),
            lambda: other.files.delete(file_id),
            lambda: other.batches.retrieve(batch_id),
            lambda: other.batches.cancel(batch_id),
            lambda: other.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


def test_wrong_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    """Each wrong field of a new file or batch, or parameter of a list, gets a 400 that names it."""
    file_id = upload(client, [line("a")])
    good: dict[str, Any] = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    for field, value in (
        ("completion_window", "1d"),
        ("completion_window", "0h"),
        ("endpoint", "/v1/rerank"),
        ("metadata", {"a": 1}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        ("priority", 1),
    ):
        with pytest.raises(openai.BadRequestError, match=field):
            client.post("/batches", body=good | {field: value}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\]"):
        client.files.create(file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    batch_id = start(client, [line("a")])
    ended(client, batch_id)
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(batch_id)


def workers(server: Running) -> list[psutil.Process]:
    """Return the worker processes of a server."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "control.main" not in " ".join(child.cmdline())]


Gated: TypeAlias = tuple[Running, openai.OpenAI, Store]


@contextlib.contextmanager
def gated_server(root: Path, number: int = 1, **settings: Any) -> Iterator[tuple[Running, openai.OpenAI, Store]]:
    """Yield a server whose engine a test holds back, a client of it, and its database, which is that of all numbers."""
    url, state = f"sqlite:///{root / 'ledger.db'}", str(root / "state")
    bundle = write_instant_model(root / str(number))
    with (
        contextlib.closing(Store(url)) as store,
        running(bundle, core=GATED_CORE, database=url, state_dir=state, drain_timeout=1.0, **settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client, store


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, openai.OpenAI, Store]]:
    """Yield a server of one worker that runs two rows at once."""
    root = tmp_path_factory.mktemp("gated")
    quotas = {"max_open_batch_rows": 6, "max_file_storage": 20_000}
    with gated_server(root, workers=1, batch_concurrency=2, **quotas) as found:
        yield found


def running_rows(store: Store) -> int:
    query = sa.select(sa.func.count()).select_from(batch_rows).where(batch_rows.c.status == "running")
    return store.read(lambda connection: connection.execute(query).scalar_one())


def check_exactly_once(client: openai.OpenAI, store: Store, batch: Any, rows: int, tokens: int) -> None:
    """Check that each row is in the output once, and that the bill is that of the output."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = content(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [str(i) for i in range(rows)]
    until(lambda: all(row.status != "open" for row in billed(store, batch.id)))
    paid = [row for row in billed(store, batch.id) if row.completion_tokens]
    assert [row.completion_tokens for row in paid] == [tokens] * rows
    assert sum(row.prompt_tokens for row in billed(store, batch.id)) == sum(
        one["response"]["body"]["usage"]["prompt_tokens"] for one in found
    )


def test_the_end_of_processes_loses_and_repeats_no_row(tmp_path: Path) -> None:
    """Workers are killed in the middle of a batch, then the whole server ends and another one starts: each row is in
    the output once, and billed once."""
    with (
        gated_server(tmp_path, workers=2, batch_concurrency=3) as (server, client, store),
        steps_up_to(server.model_dir, 4),
    ):
        batch_id = start(client, [line(str(i), max_tokens=8) for i in range(14)])
        until(lambda: running_rows(store) == 6)
        before = len(billed(store, batch_id))
        for worker in workers(server):
            worker.kill()
        until(lambda: len(billed(store, batch_id)) > before)  # other workers run rows
        server.terminate()
        server.process.wait(240)
    with gated_server(tmp_path, 2, workers=2) as (_, client, store):
        check_exactly_once(client, store, ended(client, batch_id), 14, 8)


def test_a_cancelled_batch_bills_nothing_that_it_interrupts(gated: Gated) -> None:
    """A batch that is cancelled while rows run ends as cancelled, and bills none of these."""
    server, client, store = gated
    with steps_up_to(server.model_dir, 0):
        batch_id = start(client, [line(str(i)) for i in range(6)])
        until(lambda: running_rows(store) == 2)
        assert client.batches.cancel(batch_id).status == "cancelling"
        batch = ended(client, batch_id)
    assert (batch.status, batch.output_file_id, batch.request_counts.completed) == ("cancelled", None, 0)
    until(lambda: all(row.status != "open" for row in billed(store, batch_id)))
    assert sum(row.cost + row.prompt_tokens for row in billed(store, batch_id)) == 0


def test_a_batch_that_expires_says_so_of_each_request(gated: Gated) -> None:
    """When the window is over, requests without an answer are in the error file, with the code batch_expired."""
    server, client, store = gated
    with steps_up_to(server.model_dir, 0):
        batch_id = start(client, [line(name) for name in "abc"])
        until(lambda: running_rows(store) == 2)
        early = sa.update(batches).where(batches.c.id == batch_id).values(expires_ms=1)
        store.write(lambda connection: connection.execute(early))
        batch = ended(client, batch_id)
    assert (batch.status, batch.request_counts.failed) == ("expired", 3)
    found = content(client, batch.error_file_id)
    assert [(one["custom_id"], one["error"]["code"]) for one in found] == [(name, "batch_expired") for name in "abc"]


def test_a_request_that_is_refused_for_the_moment_is_tried_again(gated: Gated) -> None:
    """A request over a limit waits for it, and is answered when the limit is removed."""
    _, client, store = gated
    limits = Limits(store)
    limits.set("endpoint", "assistant", "qph", len(list(Usage(store).rows(UsageFilter()))) + 2)
    batch_id = start(client, [line(str(i), max_tokens=4) for i in range(3)])
    until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 2)
    waiting = sa.select(batch_rows.c.number).where(batch_rows.c.batch_id == batch_id, batch_rows.c.retry_ms > 0)
    until(lambda: store.read(lambda connection: connection.execute(waiting).all()))
    assert client.batches.retrieve(batch_id).status == "in_progress"
    limits.remove("endpoint", "assistant", "qph")
    again = sa.update(batch_rows).values(retry_ms=0)
    store.write(lambda connection: connection.execute(again))
    check_exactly_once(client, store, ended(client, batch_id), 3, 4)


def test_quotas_of_a_tenant(gated: Gated) -> None:
    """More open requests or bytes of files than a tenant may have are a 429 that says how many it has."""
    server, client, _ = gated
    with steps_up_to(server.model_dir, 0):
        batch_id = start(client, [line(str(i)) for i in range(6)])
        until(lambda: client.batches.retrieve(batch_id).status == "in_progress")
        with pytest.raises(openai.RateLimitError, match="6 requests in batches"):
            start(client, [line("c")])
        with pytest.raises(openai.RateLimitError, match="may have 20000"):
            client.files.create(file=("big.jsonl", b" " * 20_000), purpose="batch")
        with pytest.raises(openai.ConflictError, match="has not ended"):
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    assert ended(client, batch_id).status == "completed"


def test_a_server_without_a_database_says_so(tmp_path: Path) -> None:
    """Without a database, files and batches get a 404 that says how to have them."""
    client = create_app(make_server(ServedEndpoints())).test_client()
    for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
        answer = client.get(path)
        assert (answer.status_code, "--database" in answer.json["error"]["message"]) == (404, True)


def test_the_command_runs_a_file_as_a_job(server: Running, secrets: dict[str, str], tmp_path: Path) -> None:
    """``batch --job`` writes the same lines as ``batch`` does for the same rows, and leaves no note."""
    rows: list[dict[str, Any]] = [{"messages": CHAT["messages"], "max_tokens": 3, "temperature": 0} for _ in range(5)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "temperature": 9}]))
    found = []
    for name, more in (("direct", []), ("job", ["--job", "--window", "2h"])):
        output = tmp_path / name
        asked = ["batch", str(source), "-o", str(output), "--url", server.url, "--key", secrets["acme"], *more]
        result = CliRunner().invoke(cli, asked)
        assert result.exit_code == 1, result.output  # a row failed
        found.append([json.loads(one) for one in output.read_text().splitlines()])
    for lines in found:
        for one in lines:
            for volatile in ("id", "created"):
                one["response"]["body"].pop(volatile, None)
            one["response"].pop("request_id")
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["direct", "in.jsonl", "job"]


def test_the_command_finds_its_job_again(gated: Gated, tmp_path: Path) -> None:
    """A command that is started again after it was killed waits for the batch that the first one created."""
    server, client, _ = gated
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "x", "max_tokens": 3}) + "\n")
    asked = ["batch", str(source), "-o", str(output), "--url", server.url, "--job"]
    with steps_up_to(server.model_dir, 0):
        first = subprocess.Popen([sys.executable, "-m", "mlflow_llm.serving.cli", *asked], stderr=subprocess.DEVNULL)
        until(lambda: output.with_name("out.jsonl.job").exists())
        first.kill()
        first.wait()
    before = [one.id for one in client.batches.list()]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "y", "max_tokens": 3}) + "\n")
    refused = CliRunner().invoke(cli, ["batch", str(other), *asked[2:]])
    assert (refused.exit_code, before[0] in refused.output) == (2, True)
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    assert [one.id for one in client.batches.list()] == before
    assert len(output.read_text().splitlines()) == 1
