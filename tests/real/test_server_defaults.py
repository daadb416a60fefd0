"""A model that was logged with a default adapter and request defaults, on a server and in a notebook."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import mlflow
import pytest
from llm_server import served

from mlflow_llm.flavors import llm

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture(scope="module")
def inclined(smollm2_dir: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inclined") / "assistant"
    adapters = {name: adapters_dir / name for name in ("pirate", "json")}
    llm.save_model(
        path,
        model=smollm2_dir,
        adapters=adapters,
        default_adapter="pirate",
        defaults={"max_tokens": 24, "temperature": 0},
        link_files=True,
    )
    return path


def test_server_and_notebook_say_the_same(inclined: Path, tmp_path: Path) -> None:
    """Server and notebook give the same text, usage and answering name, by default and with another adapter named."""
    model = mlflow.pyfunc.load_model(str(inclined))
    with served(tmp_path, "-m", str(inclined), "--name", "llm") as url:
        for body in (CHAT, CHAT | {"adapter": "json", "max_tokens": 12}):
            here = model.predict(body)
            asked = urllib.request.Request(
                f"{url}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=240) as answer:
                there = json.load(answer)
            for reply in (here, there):  # one engine serves both, so the number of cached tokens depends on the order
                del reply["usage"]["prompt_tokens_details"]
            for field in ("choices", "usage", "model"):
                assert there[field] == here[field]
            assert there["usage"]["completion_tokens"] <= body.get("max_tokens", 24)
            assert there["model"] == f"llm:{body.get('adapter', 'pirate')}"
    assert there["choices"][0]["message"]["content"].startswith("{")
