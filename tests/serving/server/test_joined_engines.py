"""A server whose engines run on hosts that have joined its database, each in processes of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from gated_core import steps_more
from instant_model import write_instant_model
from joined_host import JoinedHost, joined_host
from remote_calls import replicas
from server_calls import BODY, LONG, asking, text_and_usage, until
from serving_process import GATED_CORE, Running, running

from mlflow_llm.serving.metering import Store, Usage, UsageFilter
from mlflow_llm.serving.metering.usage.usage import UsageRow
from mlflow_llm.serving.model_files.adapter_contents import CONFIG, WEIGHTS, content_of
from mlflow_llm.serving.transport.auth import write_key

TEXT = re.compile(rb'"content": ?"[^"]')
BEFORE = 12  # steps before the host is lost


class Joined:
    """A server, its database and the hosts of its two engines."""

    def __init__(self, server: Running, store: Store, hosts: tuple[JoinedHost, JoinedHost], adapters: Path) -> None:
        self.server, self.store, self.hosts, self.adapters = server, store, hosts, adapters

    def rows(self) -> list[UsageRow]:
        return sorted(Usage(self.store).rows(UsageFilter()), key=lambda row: row.started_ms)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    """Yield a server with two engines, each on a host that has joined."""
    place = tmp_path_factory.mktemp("joined")
    bundle = write_instant_model(place / "model")
    key, url = str(place / "key"), f"sqlite:///{place / 'serving.db'}"
    write_key(key)
    with ExitStack() as stack, closing(Store(url)) as store:
        one, two = (stack.enter_context(joined_host(url, key, name, bundle)) for name in ("a", "b"))
        options = {"database": url, "state_dir": str(place / "state"), "engine_key_file": key}
        options["adapter_sources"] = str(place / "adapters")
        server = stack.enter_context(running(bundle, core=GATED_CORE, hosts=2, **options))
        until(lambda: replicas(server) == 2)
        yield Joined(server, store, (one, two), place / "adapters")


def test_a_stream_outlives_the_host_of_its_engine(joined: Joined) -> None:
    """After kill -9 of everything on the host of a stream's engine, it continues on another host with the same text; it
    has one row, whose counts are exact once the host is back.
    """
    server = joined.server
    with asking(server, LONG) as answer:
        expected = text_and_usage(answer.read())
    tokens = LONG["max_tokens"]
    until(lambda: [(row.completion_tokens, row.generated_tokens) for row in joined.rows()] == [(tokens, tokens)])
    with ExitStack() as gate:
        gate.enter_context(steps_more(server.model_dir, BEFORE))
        with asking(server, LONG) as answer:
            until(lambda: sum(host.counting() for host in joined.hosts) == BEFORE)
            (lost,) = (host for host in joined.hosts if host.counting())
            first = b""
            while not TEXT.search(first):
                first += answer.readline()
            lost.kill()
            gate.close()
            whole = first + answer.read()
    assert text_and_usage(whole) == expected
    until(lambda: all(row.generated_tokens for row in joined.rows()))
    moved = joined.rows()[1]
    assert (moved.completion_tokens, moved.status) == (tokens, "ok")
    assert moved.generated_tokens < tokens  # the other host has counted only its own part
    lost.start()
    until(lambda: joined.rows()[1].generated_tokens >= tokens)
    assert len(joined.rows()) == 2
    until(lambda: replicas(server) == 2)


def test_hosts_fetch_the_adapters_that_their_engines_need(joined: Joined) -> None:
    """An adapter that only the gateway's host has answers on both joined hosts, replaced weights too; its row has the
    hash.
    """
    server, place = joined.server, joined.adapters / "legal"
    place.mkdir(parents=True)
    (place / CONFIG).write_text("{}")
    texts: dict[str, set[str]] = {}
    for weights in (b"old", b"new"):
        (place / WEIGHTS).write_bytes(weights)
        content_hash = content_of(place).content_hash
        call = {"lora_name": "legal", "lora_path": str(place), "load_inplace": True}
        with asking(server, call, "/v1/load_lora_adapter") as answer:
            assert answer.status == 200, answer.read()
            answer.read()
        for _ in range(4):  # no prefix, so requests go to either engine
            with asking(server, BODY | {"model": "assistant:legal"}) as answer:
                assert answer.status == 200
                reply = json.loads(answer.read())
            texts.setdefault(content_hash, set()).add(reply["choices"][0]["message"]["content"])
        until(lambda: joined.rows()[-1].adapter_hash == content_hash)  # noqa: B023 - asked before the next one
    old, new = texts.values()
    assert len(old) == len(new) == 1
    assert old != new
    with asking(server, {"lora_name": "legal"}, "/v1/unload_lora_adapter") as answer:
        assert answer.status == 200
        answer.read()
