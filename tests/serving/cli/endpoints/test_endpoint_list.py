"""``endpoints``: the models, splits and states of a server, what its engines run on, and why not as they could."""

from __future__ import annotations

import importlib
import json
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli

IDLE = {"status": "ready", "running": 0, "waiting": 0, "kernels": "native"}
ANSWERS = {
    "/v1/models": {
        "data": [{"id": name, "root": "m", "max_model_len": 64} for name in ("whole", "narrow", "split", "embedder")]
    },
    "/api/2.0/endpoints/": {"endpoints": []},
    "/api/2.0/serving-endpoints": {
        "endpoints": [
            {
                "name": "split",
                "state": {"ready": "READY", "config_update": "UPDATE_FAILED", "message": "out of\x1b memory"},
                "config": {
                    "config_version": 3,
                    "traffic_config": {
                        "routes": [
                            {"served_model_name": "v1", "traffic_percentage": 90},
                            {"served_model_name": "v2", "traffic_percentage": 10},
                        ]
                    },
                },
            },
            {
                "name": "new",
                "task": "llm/v1/chat",
                "state": {"ready": "NOT_READY", "config_update": "IN_PROGRESS"},
                "pending_config": {
                    "config_version": 1,
                    "served_entities": [{"name": "first"}],
                },
            },
        ]
    },
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

    def get_text(self, path: str) -> str:
        raise click.ClickException("403: no")


def test_what_engines_run_on_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the JSON have the kernels, the type of the KV cache, the reasons and every served entity."""
    module = importlib.import_module("mlflow_llm.serving.cli.endpoints.command")
    monkeypatch.setattr(module, "Client", Answers)
    done = CliRunner().invoke(cli, ["endpoints", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    head, *rows = (line.split() for line in done.stdout.splitlines())
    at = head.index("KV") - 1  # no task is known
    whole = [row for row in rows if row[0] not in ("split", "new")]
    assert {row[0]: row[at] for row in whole} == {"whole": "-", "narrow": "int8", "embedder": "-"}
    assert done.stderr.splitlines() == [
        "whole: torch's kernels, not the native ones: not compiled",
        "whole: KV cache: no\\u001b form",
        "split/v2: KV cache: whole ones",
        "split: the last update failed: out of\\u001b memory",
        "new: an update to version 1 is in progress",
        "replicas and tokens/s are not known: 403: no",
    ]
    assert "v1, v2" in done.stdout
    assert "ready, update failed" in done.stdout
    assert "v1 90 %, v2 10 %" in done.stdout
    assert "starting, updating" in done.stdout
    listed = json.loads(CliRunner().invoke(cli, ["endpoints", "--json", "--url", "http://127.0.0.1:1"]).stdout)
    assert [one["kv_cache_dtype"] for one in listed] == ["", "int8", "int8, float32", "", ""]
    assert [one.get("entities") for one in listed] == [None, None, ["v1", "v2"], None, ["first"]]
    assert [one["kv_cache_reason"] for one in listed[:-1]] == ["no\x1b form", "", "whole ones", ""]


def test_gateways_that_lack_an_endpoint_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says how many gateways serve an endpoint, and below it what each of them says if one does not."""
    module = importlib.import_module("mlflow_llm.serving.cli.endpoints.command")
    routes = [{"served_model_name": "v1", "traffic_percentage": 100}]
    gateways = [
        {"gateway": "a:8000", "state": "READY", "config_version": 2},
        {"gateway": "b:8000", "state": "FAILED", "config_version": 1, "message": "no directory /m\x1b"},
        {"gateway": "c:8000", "state": "LOADING"},
    ]
    endpoint = {
        "name": "whole",
        "state": {"ready": "NOT_READY", "config_update": "NOT_UPDATING", "message": "gateway b:8000: no directory"},
        "config": {"config_version": 2, "traffic_config": {"routes": routes}},
        "gateways": gateways,
    }

    class Several(Answers):
        def get(self, path: str) -> Any:
            return {"endpoints": [endpoint]} if path == "/api/2.0/serving-endpoints" else super().get(path)

    monkeypatch.setattr(module, "Client", Several)
    done = CliRunner().invoke(cli, ["endpoints", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    assert "ready, 1 of 3 gateways" in done.stdout
    for line in (
        "whole: gateway b:8000: no directory",
        "whole: gateway a:8000: serves version 2",
        "whole: gateway b:8000: failed, serves version 1: no directory /m\\u001b",
        "whole: gateway c:8000: loading, serves nothing of it",
    ):
        assert line in done.stderr
    done = CliRunner().invoke(cli, ["endpoints", "--json", "--url", "http://127.0.0.1:1"])
    assert next(one for one in json.loads(done.stdout) if one["id"] == "whole")["gateways"] == gateways
