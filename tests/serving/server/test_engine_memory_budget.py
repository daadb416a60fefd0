"""Two models in the memory of one, on real servers: they take turns in it, and no request is lost."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from instant_model import write_instant_model
from server_calls import BODY, ask, until
from server_processes import ENGINE
from serving_process import INSTANT_CORE, Running, running

from mlflow_llm.serving.cli.endpoints.command import endpoints
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.interface.bundle import Bundle

BALLAST = 192 << 20
ONE, BOTH = 384 << 20, 1024 << 20


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    roots = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    made = [write_instant_model(root, ballast=BALLAST) for root in roots]
    return [msgspec.structs.replace(bundle, adapters={}) for bundle in made]


@pytest.fixture(scope="module")
def servers(bundles: list[Bundle]) -> Iterator[tuple[Running, Running]]:
    """Yield a server whose budget has room for one engine, and one with room for both."""
    second = EndpointSpec(name="second", entity="model-2", bundle=bundles[1], core=INSTANT_CORE, engine=ENGINE)
    with (
        running(bundles[0], engine=ENGINE, more=(second,), workers=2, engine_memory_budget=ONE) as small,
        running(bundles[0], engine=ENGINE, more=(second,), engine_memory_budget=BOTH) as large,
    ):
        yield small, large


def get(server: Running, path: str) -> str:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=240) as answer:
        return str(answer.read().decode())


def unloaded(server: Running) -> dict[str, str]:
    """Return the endpoints whose engines are unloaded, with the reasons."""
    found = json.loads(get(server, "/health"))["endpoints"]
    return {name: entry["unloaded"] for name, entry in found.items() if "unloaded" in entry}


def said(server: Running, model: str) -> str:
    status, text = ask(server, BODY | {"model": model})
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


def test_two_models_take_turns_in_the_memory_of_one(servers: tuple[Running, Running]) -> None:
    """With room for one engine a request to the other endpoint unloads the idle one and gets the same text as with room
    for both; page, metrics, log and command say so.
    """
    small, large = servers
    assert unloaded(large) == {}
    entities = {"assistant": "assistant/model-1", "second": "second/model-2"}
    ((away, why),) = unloaded(small).items()  # what they take was not known before both were loaded
    assert why.startswith("engines took more than engine_memory_budget has: ")
    (here,) = entities.keys() - {away}
    for model, other in ((away, here), (here, away)) * 2:
        assert said(small, model) == said(large, model)
        until(lambda other=other: list(unloaded(small)) == [other])
        assert unloaded(small)[other].endswith(f" GiB were needed for {entities[model]}")
    figures = get(small, "/metrics")
    name, entity = entities[here].split("/")
    assert f'mlflow_llm_engine_unloaded{{endpoint="{name}",entity="{entity}",reason=""}} 0.0' in figures
    name, entity = entities[away].split("/")
    assert f'mlflow_llm_engine_unloaded{{endpoint="{name}",entity="{entity}",reason="its ' in figures
    assert "a request brings it back in about " in small.log()
    listed = CliRunner().invoke(endpoints, ["--url", small.url])
    rows = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert ("ready, unloaded" in rows[away], "unloaded" in rows[here]) == (True, False)
    assert f"{away}: unloaded until a request comes: {unloaded(small)[away]}" in listed.stderr
    assert unloaded(large) == {}
    assert "unloaded" not in large.log()


def test_a_model_larger_than_the_budget_ends_the_start(bundles: list[Bundle], tmp_path: Path) -> None:
    """A model larger than the budget is refused by name and size, and the server does not start."""
    weights = tmp_path / "model" / "model.safetensors"
    bundle = write_instant_model(tmp_path)
    with weights.open("wb") as file:
        file.truncate(BOTH + 1)
    with (
        pytest.raises(AssertionError, match=r"assistant/model-1 has files of 1\.00 GiB, more than engine_memory"),
        running(bundle, engine=ENGINE, engine_memory_budget=BOTH),
    ):
        pass
