"""The effect of ``mlflow-llm serve --profile`` on a server's answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_processes import await_line, llm_command

from mlflow_llm.plugin.processes import free_port

DATABRICKS, OPENAI = "/serving-endpoints/assistant/invocations", "/v1/completions"
TWICE_TWO: dict[str, Any] = {"model": "assistant", "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "ignore_eos": True}


def post(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return str(answer.read().decode())


def indices(url: str) -> list[int]:
    """Return the indices of a whole reply's choices, in their order."""
    return [choice["index"] for choice in json.loads(post(url, TWICE_TWO))["choices"]]


def ends(url: str) -> Counter[int]:
    """Return how often a stream ends a choice of each index, after checking that other chunks have these indices."""
    *events, done = [line[6:] for line in post(url, TWICE_TWO | {"stream": True}).split("\n\n") if line]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    found = Counter(choice["index"] for choice in choices if choice["finish_reason"])
    assert {choice["index"] for choice in choices} == set(found)
    return found


def test_the_profile_numbers_choices_by_prompt(saved_model: Path, place: Path) -> None:
    """With a Databricks profile the choices of a completion have their prompt's index on Databricks' routes, whole and
    streamed, and OpenAI's flat index on OpenAI's; fields that the profile does not take are a 400."""
    port = free_port()
    words = ["-m", f"{saved_model}=assistant", "--profile", "databricks-provisioned", "--port", str(port)]
    with llm_command(place, "serve", "serve", *words) as log:
        await_line(log, "listening on")
        url = f"http://127.0.0.1:{port}"
        assert indices(url + DATABRICKS) == [0, 0, 1, 1]
        assert ends(url + DATABRICKS) == {0: 2, 1: 2}
        assert indices(url + OPENAI) == [0, 1, 2, 3]
        assert ends(url + OPENAI) == {0: 1, 1: 1, 2: 1, 3: 1}
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url + DATABRICKS, TWICE_TWO | {"error_behavior": "truncate"})
        with refused.value as answer:
            assert (answer.code, "pay-per-token" in answer.read().decode()) == (400, True)
