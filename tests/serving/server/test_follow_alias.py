"""A server that follows an alias of a real registry: a canary is promoted, the next one is rolled back."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
from mlflow import MlflowClient
from server_calls import BODY, asking, until
from serving_process import INSTANT_CORE, Running, running
from stores import empty_store

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import manifest as manifests
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.canary import Canary
from mlflow_llm.serving.interface.settings import EngineSettings

CANARY = Canary(traffic_percentage=50, duration_s=1.0, min_requests=6, max_error_rate=0.2, min_scores={"quality": 0.5})
QUALITY = (None, 0.9, None)  # that MLflow has of the run of each version
ENDPOINT = "/api/2.0/serving-endpoints/chat"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save a model for the instant engine for each version."""
    base = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(base)
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(base)
    saved = tmp_path_factory.mktemp("saved") / "1"
    llm.save_model(path=saved, model=base)
    found = []
    for number in range(len(QUALITY)):
        root = saved.parent / f"v{number}"
        shutil.copytree(saved, root)
        made = {"vocab_size": 257, "max_model_len": 200 + number}  # each has a content of its own
        add_file(root, "model/instant.json", json.dumps(made))
        found.append(root)
    return found


def add_file(root: Path, name: str, text: str) -> None:
    """Add a file to a saved model, and to its manifest."""
    (root / name).write_text(text)
    manifest = manifests.read(root)
    entry = manifests.FileEntry(size=len(text.encode()), sha256=hashlib.sha256(text.encode()).hexdigest())
    files = manifest.files | {name: entry}
    manifest = msgspec.structs.replace(manifest, files=files, content_hash=manifests.content_hash_of(files))
    manifests.write(manifest, root)


@pytest.fixture
def registry(tmp_path: Path, versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Return the client of a registry in which the alias ``champion`` means version 1."""
    store = empty_store(tmp_path, f"mlflow-{uuid.uuid4().hex}.db")  # MLflow caches stores by URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    client = MlflowClient(store, store)
    client.create_registered_model("assistant")
    experiment = client.create_experiment("evaluations", artifact_location=str(tmp_path / "artifacts"))
    for root, quality in zip(versions, QUALITY, strict=True):
        run = client.create_run(experiment).info.run_id
        client.create_model_version("assistant", source=str(root), run_id=run)
        if quality is not None:
            client.log_metric(run, "quality", quality)
    client.set_registered_model_alias("assistant", "champion", "1")
    return client


@pytest.fixture
def server(registry: MlflowClient, versions: list[Path], instant_bundle: Bundle, tmp_path: Path) -> Iterator[Running]:
    """Yield a server whose endpoint ``chat`` follows the alias."""
    engine = EngineSettings(idle_timeout=0.3)
    spec = EndpointSpec(
        name="chat",
        entity="models:/assistant@champion",
        uri="models:/assistant/1",
        bundle=read_bundle(versions[0]),
        core=INSTANT_CORE,
        engine=engine,
        follow_alias=True,
        canary=CANARY,
    )
    database = f"sqlite:///{tmp_path / 'serving.db'}"
    options: dict[str, Any] = {"database": database, "state_dir": str(tmp_path / "state"), "alias_poll": 0.5}
    with running(instant_bundle, engine=engine, more=(spec,), **options) as running_server:
        yield running_server


def history(server: Running) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}{ENDPOINT}/config-versions", timeout=240) as answer:
        found: list[dict[str, Any]] = json.load(answer)["versions"]
    return found


def asked_until(server: Running, states: list[str]) -> set[tuple[str, int]]:
    """Ask until the versions of the config are in ``states``, the newest first; return who answered, and how."""
    seen = set()

    def done() -> bool:
        body = BODY | {"model": "chat", "max_tokens": 1}
        with asking(server, body) as answer:
            answer.read()
            seen.add((answer.headers["served-model-name"], answer.status))
        return [one["state"] for one in history(server)] == states

    until(done)
    return seen


def test_an_alias_is_followed_by_canaries(server: Running, registry: MlflowClient) -> None:
    """The alias moves, the canary answers its share, and then everything; the next version lacks the score that is
    asked for, and is taken back."""
    registry.set_registered_model_alias("assistant", "champion", "2")
    seen = asked_until(server, ["active", "promoted", "superseded"])
    base = "assistant-champion"
    assert {name.partition("~")[0] for name, _ in seen} == {base}
    assert len({name for name, _ in seen}) == 2
    assert {status for _, status in seen} == {200}
    (entity,) = history(server)[0]["config"]["served_entities"]
    assert (entity["name"], entity["resolved_version"], entity["canary"]["traffic_percentage"]) == (base, "2", 50)

    registry.set_registered_model_alias("assistant", "champion", "3")
    seen = asked_until(server, ["active", "rolled_back", "superseded", "promoted", "superseded"])
    assert len({name for name, _ in seen}) == 2
    newest, canary = history(server)[:2]
    assert canary["message"] == "MLflow has no metric quality of the version"
    assert (newest["restores"], newest["creator"]) == (3, "follow_alias")
    (entity,) = newest["config"]["served_entities"]
    assert entity["resolved_version"] == "2"

    shown = CliRunner().invoke(cli, ["endpoints", "history", "chat", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert canary["message"] in shown.output
    assert "rolled_back" in shown.output
