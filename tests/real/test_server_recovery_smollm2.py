"""A server with real weights whose engine is killed or hangs, without a visible effect on answers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llm_server import served

SAYS: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
LENGTH = {"model": "assistant", "max_tokens": 48, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 11}
NAMES: dict[str, Any] = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 3, "maxItems": 5}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "names", "strict": True, "schema": NAMES}}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SEARCH = {"use_beam_search": True, "best_of": 3, "n": 2}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", LENGTH | SAYS | {"temperature": 0}),
    ("chat/completions", LENGTH | SAYS | {"temperature": 0} | STREAM),
    ("chat/completions", LENGTH | SAYS | SAMPLED | STREAM),
    ("chat/completions", LENGTH | SAYS | SAMPLED | {"n": 2}),
    ("chat/completions", LENGTH | SAYS | SAMPLED | {"n": 2} | STREAM),
    ("chat/completions", LENGTH | SAYS | SAMPLED | FORM | STREAM),
    ("chat/completions", LENGTH | SAYS | {"temperature": 0, "model": "assistant:pirate"}),
    ("chat/completions", LENGTH | SAYS | SAMPLED | {"model": "assistant:pirate"} | STREAM),
    ("completions", LENGTH | {"prompt": "The quick brown fox", "temperature": 0}),
    ("completions", LENGTH | {"prompt": ["Once", "Twice"], **SAMPLED, "no_repeat_ngram_size": 2} | STREAM),
    ("completions", LENGTH | {"prompt": "Once", **SAMPLED, "bad_words": ["the", "and", "he", "was"]} | STREAM),
    (
        "completions",
        LENGTH | {"prompt": "Once upon a", **SEARCH, "stop": ["castle"], "bad_words": ["king"]} | STREAM,
    ),
    ("chat/completions", {"model": "assistant", "max_tokens": 48} | SAYS | SEARCH | FORM | STREAM),
]


class Server:
    """A server at ``url``, its engine found in ``runtime``."""

    def __init__(self, url: str, runtime: Path) -> None:
        self.url, self.runtime = url, runtime

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the comparable parts of an answer: texts and ends by choice, and the token counts."""
        request = urllib.request.Request(
            f"{self.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            data = answer.read().decode()
        if not body.get("stream"):
            return joined([json.loads(data)])
        *events, done = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
        assert done == "[DONE]", events[-1]
        return joined([json.loads(event) for event in events])

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=240) as answer:
            return dict(json.load(answer)["endpoints"]["assistant"])

    def engine_pid(self) -> int:
        (found,) = {int(json.loads(path.read_text())["pid"]) for path in self.runtime.glob("*/*/status.json")}
        return found


def joined(parts: list[dict[str, Any]]) -> tuple[dict[int, str], dict[int, str], tuple[int, int]]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    usage = next(part["usage"] for part in parts if part.get("usage"))
    return texts, ends, (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, assistant: Path) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("recovery")
    arguments = ("-m", f"{assistant}=assistant", "-C", "max_model_len=512", "-C", "stall_timeout=12")
    # a short path: Unix sockets' names are limited to about 100 bytes
    with tempfile.TemporaryDirectory(prefix="mll-") as runtime:
        with served(root, *arguments, XDG_RUNTIME_DIR=runtime) as url:
            yield Server(url, Path(runtime))
        until = time.monotonic() + 240
        while list(Path(runtime).glob("*/*/spec.json")) and time.monotonic() < until:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda request: server.post(*request), REQUESTS))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_no_caller_can_tell(server: Server, undisturbed: list[Any], fault: signal.Signals) -> None:
    """Chat, with an adapter too, and completions, greedy, sampled and searched, streamed and whole, have the texts,
    ends and counts of an undisturbed run when the engine is killed or stopped meanwhile."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        before = server.health()["steps"]
        answers = [pool.submit(server.post, *request) for request in REQUESTS]
        until = time.monotonic() + 240
        while server.health()["steps"] < before + 8 and time.monotonic() < until:
            time.sleep(0.02)
        pid = server.engine_pid()
        os.kill(pid, fault)
        found = [answer.result() for answer in answers]
    assert server.engine_pid() != pid
    assert found == undisturbed
