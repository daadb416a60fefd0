"""Every field of every document, sent to a running server with real weights; see docs/dialects.md."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conformance import Mode, Part, Row, Seen, test_id
from conformance_rows import PARTS
from llm_server import served

from mlflow_llm.flavors.llm import load_bundle
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Keys, Store

ROWS = [(part, name) for part in PARTS for name in part.rows]
PLAIN = Row(body={})
AT_ONCE = 48
MIGRATE = Path(__file__).parents[2] / "docs" / "migrate.md"
Key = tuple[str, str, Mode]  # part, field ("" for the plain request), whole or streamed


class Table:
    """A server and its answers to every row."""

    def __init__(self, url: str, secrets: Mapping[str, str], store: Path, key_ids: Mapping[str, str]) -> None:
        self._place = urlsplit(url)
        self._secrets = secrets
        self.port = self._place.port
        self.secret = secrets["example"]
        self.store = store
        self.key_ids = key_ids
        asked: dict[Key, tuple[Part, Row]] = {}
        for part in PARTS:
            for mode in part.modes:
                asked[part.name, "", mode] = part, PLAIN
                asked |= {
                    (part.name, name, mode): (part, row) for name, row in part.rows.items() if self._has(row, mode)
                }
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = pool.map(lambda one: self._ask(one[1][0], one[1][1], one[0][2]), asked.items())
            self.seen = dict(zip(asked, answers, strict=True))

    @staticmethod
    def _has(row: Row, mode: Mode) -> bool:
        return mode in row.modes

    def _ask(self, part: Part, row: Row, mode: Mode) -> Seen | str:
        path, headers, body = part.request(row, mode)
        connection = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=600)
        with contextlib.closing(connection):
            authorization = {"Authorization": f"Bearer {self._secrets[part.name]}"}
            connection.request("POST", path, body, {"Content-Type": "application/json"} | headers | authorization)
            answer = connection.getresponse()
            data = answer.read()
        if answer.status == 200:
            return part.read(answer.status, dict(answer.headers), data)
        return f"{answer.status} {data.decode()}"


@pytest.fixture(scope="module")
def table(assistant: Path, embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    """Serve a pay-per-token endpoint, a provisioned one of the same model, and an embedding one; a key for each
    part."""
    root = tmp_path_factory.mktemp("conformance")
    database = f"sqlite:///{root}/ledger.db"
    store = Store(database)
    made = {name: Keys(store).create(name) for name in (*(part.name for part in PARTS), "example")}
    store.close()
    engine = EngineSettings(max_model_len=512, quantization="int8")  # takes half the time, and is equally deterministic
    bundle = load_bundle(assistant)
    reserved: dict[str, Any] = {"min_provisioned_throughput": 1, "max_provisioned_throughput": 1}
    endpoints = (
        EndpointSpec(name="assistant", entity="assistant", bundle=bundle, engine=engine),
        EndpointSpec(name="reserved", entity="reserved", bundle=bundle, engine=engine, **reserved),
        EndpointSpec(name="embedder", entity="embedder", bundle=load_bundle(embedder)),
    )
    spec = ServeSpec(endpoints=endpoints, settings=ServerSettings(database=database, require_keys=True))
    with served(root, spec=spec) as url:
        secrets = {name: secret for name, (secret, _) in made.items()}
        yield Table(url, secrets, root / "ledger.db", {name: key.key_id for name, (_, key) in made.items()})


@pytest.mark.parametrize(("part", "name"), ROWS, ids=[test_id(part, name) for part, name in ROWS])
def test_field(table: Table, part: Part, name: str) -> None:
    """A field is honoured with the same text streamed and not, or refused by its name with the reason."""
    row = part.rows[name]
    texts = []
    for mode in part.modes:
        if mode not in row.modes:
            continue
        seen, plain = table.seen[part.name, name, mode], table.seen[part.name, "", mode]
        assert isinstance(plain, Seen), plain
        if row.refused is not None:
            assert isinstance(seen, str), "it was answered"
            assert seen.startswith("4"), seen
            assert (row.named or name) in seen, seen
            assert row.refused in json.loads(seen[4:]).__repr__(), seen
            continue
        assert isinstance(seen, Seen), seen
        assert row.shows(seen, plain), seen
        texts.append(seen.texts)
    assert not texts or all(one == texts[0] for one in texts)


SNIPPETS = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", MIGRATE.read_text(), re.MULTILINE | re.DOTALL)
)


@pytest.mark.parametrize("system", SNIPPETS)
def test_a_client_moves_by_its_base_url(table: Table, system: str) -> None:
    """The examples of docs/migrate.md run unchanged but for the port and the key."""
    code = SNIPPETS[system].replace("localhost:8000", f"127.0.0.1:{table.port}").replace("sk-…", table.secret)
    found: dict[str, Any] = {}
    exec(code, found)
    if "client" in found:
        found["client"].close()
    assert isinstance(found["text"], str)
    assert found["text"].strip()


def test_openais_client_below_v3(table: Table) -> None:
    """OpenAI's client gets chats, streamed and not, completions, embeddings and models by OpenVINO Model Server's
    paths."""
    import openai

    messages: Any = [{"role": "user", "content": "Count: one, two, three,"}]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{table.port}/v3", api_key=table.secret) as client:
        whole = client.chat.completions.create(model="assistant", messages=messages, max_tokens=6)
        chunks = client.chat.completions.create(model="assistant", messages=messages, max_tokens=6, stream=True)
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert joined == whole.choices[0].message.content
        text = client.completions.create(model="assistant", prompt="One, two,", max_tokens=4)
        assert text.choices[0].finish_reason == "length"
        assert len(client.embeddings.create(model="embedder", input=["a", "b"]).data) == 2
        assert {model.id for model in client.models.list()} >= {"assistant", "embedder"}
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.chat.completions.create(model="assistant", messages=messages, n=2)


def test_every_system_has_an_example() -> None:
    """Every system in docs/migrate.md has an example that is tried."""
    assert len(SNIPPETS) == 5


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_usage_agrees_with_the_ledger(table: Table, part: Part) -> None:
    """Each answer has a ledger row with the prompt and completion tokens of its usage."""
    replies = [seen for key, seen in table.seen.items() if key[0] == part.name and isinstance(seen, Seen)]
    counted = [one for one in replies if one.prompt is not None or one.completion is not None]
    assert counted
    rows = _settled(table, part.name)
    assert len(rows) >= len(replies)
    for kind in ("prompt", "completion"):
        place = ("prompt", "completion").index(kind)
        told = Counter(getattr(one, kind) for one in counted if getattr(one, kind) is not None)
        missing = told - Counter(row[place] for row in rows)
        assert not missing, f"{kind}: replies say {missing} and the ledger does not"
    both = Counter((one.prompt, one.completion) for one in counted if None not in (one.prompt, one.completion))
    if len(counted) == len(replies) and sum(both.values()) == len(replies):
        assert both == Counter(rows)


def _settled(table: Table, part: str) -> list[tuple[int, int]]:
    """Return (prompt, completion) of the part's rows, when none is open any more."""
    until = time.monotonic() + 120
    while True:
        with contextlib.closing(sqlite3.connect(table.store)) as store:
            query = "SELECT prompt_tokens, completion_tokens, status FROM ledger WHERE key_id = ?"
            rows = store.execute(query, (table.key_ids[part],)).fetchall()
        if all(row[2] != "open" for row in rows):
            assert all(row[2] == "ok" for row in rows), Counter(row[2] for row in rows)
            return [(row[0], row[1]) for row in rows]
        assert time.monotonic() < until, "rows stay open"
        time.sleep(0.05)
