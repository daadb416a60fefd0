"""``endpoints``: what engines run on, and why not as they could."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli

IDLE = {"status": "ready", "running": 0, "waiting": 0, "kernels": "native"}
ANSWERS = {
    "/v1/models": {
        "data": [{"id": name, "root": "m", "max_model_len": 64} for name in ("whole", "narrow", "split", "embedder")]
    },
    "/api/2.0/endpoints/": {"endpoints": []},
    "/health": {
        "endpoints": {
            "whole": IDLE | {"kernels": "torch", "kernels_reason": "not compiled", "kv_cache_reason": "no\x1b form"},
            "narrow": IDLE | {"kv_cache_dtype": "int8"},
            "split": {
                **IDLE,
                "entities": {
                    "v1": IDLE | {"kv_cache_dtype": "int8"},
                    "v2": IDLE | {"kv_cache_dtype": "float32", "kv_cache_reason": "whole ones"},
                },
            },
            "embedder": IDLE,
        }
    },
}


class Answers:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    understood = importlib.import_module("mlflow_llm.serving.cli.http").Client.understood

    def get(self, path: str) -> Any:
        return ANSWERS[path]


def test_what_engines_run_on_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the JSON have the kernels, the type of the KV cache, the reasons and every served entity."""
    module = importlib.import_module("mlflow_llm.serving.cli.endpoints")  # its name in the package is the command's
    monkeypatch.setattr(module, "Client", Answers)
    done = CliRunner().invoke(cli, ["endpoints", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    head, *rows = (line.split() for line in done.stdout.splitlines())
    at = head.index("KV") - 1  # no task is known
    assert {row[0]: row[at] for row in rows if row[0] != "split"} == {"whole": "-", "narrow": "int8", "embedder": "-"}
    assert done.stderr.splitlines() == [
        "whole: torch's kernels, not the native ones: not compiled",
        "whole: KV cache: no\\u001b form",
        "split/v2: KV cache: whole ones",
    ]
    assert "v1, v2" in done.stdout
    listed = json.loads(CliRunner().invoke(cli, ["endpoints", "--json", "--url", "http://127.0.0.1:1"]).stdout)
    assert [one["kv_cache_dtype"] for one in listed] == ["", "int8", "int8, float32", ""]
    assert [one.get("entities") for one in listed] == [None, None, ["v1", "v2"], None]
    assert [one["kv_cache_reason"] for one in listed] == ["no\x1b form", "", "whole ones", ""]
