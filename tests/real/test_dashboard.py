"""docs/grafana.json over a running Prometheus, which scrapes a server with real weights: no query is left without data.

Grafana itself is no package of Debian, PyPI or npm; what a panel asks of Prometheus is asked here as Grafana asks it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from llm_server import served

from mlflow_llm.serving.metering import Keys, Store

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs/grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
EVENTS = (  # counters that are there from the first such event on, of which there is none
    "payloads_dropped",
    "shadows_dropped",
    "soft_limit_exceeded",
    "ledger_violations",
)
PROGRAM = shutil.which("prometheus")
SECONDS = 600.0
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="not installed (apt-get install prometheus)"),
    pytest.mark.timeout(900),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Yield the URL of a Prometheus with the configuration of examples/deploy, which scrapes ``target`` each second."""
    config = yaml.safe_load((ROOT / "examples/deploy/prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    assert PROGRAM is not None
    address = f"127.0.0.1:{free_port()}"
    command = [PROGRAM, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/metrics"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(60)


def answer(prometheus_url: str, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus; [] while it does not listen yet."""
    url = f"{prometheus_url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            read = json.load(reply)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return []
    assert read["status"] == "success", read
    return read["data"]


def filled(expression: str) -> str:
    """Return a query as Grafana sends it with all endpoints and adapters chosen."""
    text = expression.replace("$__rate_interval", "1m")
    return text.replace("$endpoint", ".*").replace("$adapter", ".*")


def without_data(url: str) -> list[str]:
    """Return the queries to which Prometheus answers with no series, or with series of no number."""
    found = []
    for title, expression in QUERIES:
        data = answer(url, "query", query=filled(expression))
        numbers = [float(one["value"][1]) for one in data["result"]] if data else []
        if not any(map(math.isfinite, numbers)):
            found.append(f"{title}: {expression}")
    return found


def ask(url: str, text: str, *, leave: bool = False) -> None:
    """Ask for a streamed reply, and read it to its end or leave at its beginning."""
    body = {"model": "assistant", "messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0}
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"max_tokens": 600 if leave else 24}), headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    reply.readline() if leave else reply.read()
    connection.close()


def test_no_panel_is_empty(smollm2_dir: Path, tmp_path: Path) -> None:
    """Prometheus answers every query of the dashboard with numbers, and its variables with the server's names."""
    database = f"sqlite:///{tmp_path}/serving.db"
    store = Store(database)
    Keys(store).create("acme", weight=3)
    store.close()
    probes = free_port()
    words = (f"{smollm2_dir}=assistant", "--database", database, "--probe-port", str(probes))
    with served(tmp_path, *words) as url, prometheus(tmp_path, f"127.0.0.1:{probes}") as asked:
        until = time.monotonic() + SECONDS
        empty = [expression for _, expression in QUERIES]
        while any(not any(name in one for name in EVENTS) for one in empty):
            assert time.monotonic() < until, "\n".join(empty)
            ask(url, "Write: one two three one two three one two three one two three one two")
            ask(url, "Count to a thousand.", leave=True)
            empty = without_data(asked)
        assert len(empty) == len(EVENTS), empty
        assert answer(asked, "label/endpoint/values") == ["assistant"]
        (weight,) = answer(asked, "query", query="mlflow_llm_key_weight")["result"]
        assert weight["value"][1] == "3"
