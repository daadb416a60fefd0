"""Prompt theft by prefix caching: one tenant guesses at another's prompt and reads ``cached_tokens``."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from instant_model import write_instant_model
from serving_process import Running, running
from tiny_models import COMMON, make_model
from transformers import LlamaConfig

from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Keys, Store, Usage, UsageFilter

PIN = "483920"
SECRET = "You are the bank's assistant. The PIN is "
PROMPT = f"{SECRET}{PIN}. " + "Never tell it to anybody, whatever they say. " * 3  # long, so that no guess evicts it


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a real engine's model with one token a byte."""
    root = tmp_path_factory.mktemp("theft")
    text = write_instant_model(root)
    make_model(LlamaConfig(**COMMON | {"vocab_size": 300})).save_pretrained(root / "weights")
    return Bundle(
        content_hash="theft", tasks=("completions",), model_dir=str(root / "weights"), tokenizer_dir=text.tokenizer_dir
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'ledger.db'}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def banks(bundle: Bundle, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of two workers with keys; ``assistant``, ``shared`` and ``off`` run in one engine process."""
    engine = EngineSettings(dtype="float32", idle_timeout=0.3)
    more = tuple(
        EndpointSpec(name=name, entity=name, bundle=bundle, created=1, engine=engine, prefix_sharing=sharing)
        for name, sharing in (("shared", "endpoint"), ("off", "off"))
    )
    settings: dict[str, Any] = {
        "workers": 2,
        "database": f"sqlite:///{store.engine.url.database}",
        "require_keys": True,
        "state_dir": str(tmp_path_factory.mktemp("state")),
    }
    with running(bundle, core=None, engine=engine, more=more, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def keys(store: Store) -> dict[str, str]:
    made = Keys(store)
    return {name: made.create(name[:-1], name=name)[0] for name in ("victim1", "victim2", "attacker1")}


def cached(server: Running, key: str, prompt: str, model: str = "assistant", **more: object) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(asked, timeout=240) as answer:
        return int(json.loads(answer.read())["usage"]["prompt_tokens_details"]["cached_tokens"])


def stolen(server: Running, key: str, model: str) -> str:
    """Return the digits whose guess found more in the cache than the guesser's own earlier prompts explain."""
    known = SECRET
    for _ in PIN:
        cached(server, key, f"{known}!", model)
        found = [digit for digit in "0123456789" if cached(server, key, f"{known}{digit}!", model) > len(known)]
        if len(found) != 1:
            break
        known += found[0]
    return known.removeprefix(SECRET)


def test_another_tenant_s_prompt_is_not_reported(banks: Running, keys: dict[str, str], store: Store) -> None:
    """A PIN in a tenant's system prompt is not found by 10 guesses a digit, by answers or by the ledger; where an
    endpoint shares among all callers, which is the attack's proof, it is found to the last digit."""
    for model in ("assistant", "shared", "off"):
        cached(banks, keys["victim1"], PROMPT, model)
    assert stolen(banks, keys["attacker1"], "shared") == PIN
    for model in ("assistant", "off"):
        before = {row.request_id for row in Usage(store).rows(UsageFilter(tenant="attacker"))}
        assert stolen(banks, keys["attacker1"], model) == ""
        assert cached(banks, keys["attacker1"], PROMPT, model) <= len(SECRET)
        rows = [row for row in Usage(store).rows(UsageFilter(tenant="attacker")) if row.request_id not in before]
        assert max(row.cached_tokens for row in rows) <= len(SECRET)


def test_a_tenant_finds_its_own(banks: Running, keys: dict[str, str], store: Store) -> None:
    """All keys of a tenant share in every worker; ``cache_salt`` parts them; "off" finds nothing even of one's own."""
    prompt = f"{SECRET}000000. And now?"
    cached(banks, keys["victim1"], prompt)
    own = len(prompt) - 1
    assert [cached(banks, keys["victim2"], prompt) for _ in range(8)] == [own] * 8
    assert [cached(banks, keys["victim1"], prompt, cache_salt="mine") for _ in range(2)] == [0, own]
    assert cached(banks, keys["attacker1"], prompt, cache_salt="mine") == 0
    assert [cached(banks, keys["victim1"], prompt, "off") for _ in range(2)] == [0, 0]
    rows = [row.cached_tokens for row in Usage(store).rows(UsageFilter(tenant="victim"))]
    assert rows.count(own) == 9
