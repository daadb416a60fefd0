"""Past answers of a server with real weights, repeated byte for byte from the prompt and the ledger."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from llm_server import served

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.proof.recorded import request_of
from mlflow_llm.serving.metering.store.tables import ledger, payloads

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}], "max_tokens": 40}
SAMPLED = {**CHAT, "temperature": 1.3, "top_p": 0.95}


class Place:
    """A server with a ledger."""

    def __init__(self, url: str, database: str, runtime: Path) -> None:
        self.url, self.database, self.runtime = url, database, runtime

    def post(self, path: str, body: bytes) -> Any:
        asked = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(asked, timeout=240)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.post(path, json.dumps(body).encode()) as answer:
            return json.loads(answer.read())

    def run(self, command: str, request_id: str, *given: str, text: bytes | str = "") -> Result:
        words = [command, request_id, "--database", self.database, *given]
        return CliRunner().invoke(cli, words, input=text)

    def replay(self, request_id: str, text: bytes | str) -> Result:
        return self.run("replay", request_id, "--url", self.url, "--prompt", "-", text=text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("replay")
    llm.save_model(folder / "chat", smollm2_dir, link_files=True)
    database = f"sqlite:///{folder / 'ledger.db'}"
    words = ("-m", f"{folder / 'chat'}=assistant", "--database", database)
    with tempfile.TemporaryDirectory(prefix="mll-") as runtime:  # short: a socket's path has 107 bytes
        with served(folder, *words, MLFLOW_LLM_STATE=str(folder / "state"), XDG_RUNTIME_DIR=runtime) as url:
            yield Place(url, database, Path(runtime))
        end = time.monotonic() + 60
        while list(Path(runtime).glob("*/*/spec.json")) and time.monotonic() < end:  # the engine ends by itself
            time.sleep(0.05)


def streamed(place: Place, body: dict[str, Any], at_first: Callable[[], object] = lambda: None) -> tuple[str, str]:
    """Return the id and the text of a streamed chat; ``at_first`` is called once the first text has come."""
    request_id, text = "", ""
    with place.post("/v1/chat/completions", json.dumps(body | {"stream": True}).encode()) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            request_id = chunk["id"]
            for choice in chunk["choices"]:
                if (new := choice["delta"].get("content")) and not text:
                    at_first()
                text += new or ""
    return request_id, text


def test_a_sampled_answer_comes_again(place: Place) -> None:
    """A sampled answer without a seed of the caller's comes again from its body, and another one from no other seed."""
    body = json.dumps(SAMPLED).encode()
    with place.post("/v1/chat/completions", body) as answer:
        reply = json.loads(answer.read())
    text = reply["choices"][0]["message"]["content"]
    assert place.ask("/v1/chat/completions", SAMPLED)["choices"][0]["message"]["content"] != text
    again = place.replay(reply["id"], body)
    assert (again.exit_code, again.stdout, again.stderr) == (0, text + "\n", "same\n")


def test_a_body_is_taken_from_the_payload_log(place: Place) -> None:
    """Without --prompt, the body is that of the payload log; one that was redacted there is not the request's."""
    reply = place.ask("/v1/chat/completions", SAMPLED)
    store = Store(place.database)
    texts = ("endpoint", "entity", "tenant", "key_id", "codes")
    numbers = ("status_code", "started_ms", "duration_ms", "sample", "size", "expires_ms")
    logged = dict.fromkeys(texts, "") | dict.fromkeys(numbers, 0)
    row = sa.insert(payloads).values(logged | {"request_id": request_of(reply["id"]), "request": json.dumps(SAMPLED)})
    store.write(lambda connection: connection.execute(row))
    again = place.run("replay", reply["id"], "--url", place.url)
    assert (again.exit_code, again.stderr) == (0, "same\n"), again.output
    redacted = json.dumps(SAMPLED).replace("lighthouse", "[redacted]")
    store.write(lambda connection: connection.execute(sa.update(payloads).values(request=redacted)))
    store.close()
    assert "its hash is another" in place.run("replay", reply["id"], "--url", place.url).stderr


def test_a_text_suffices_for_a_plain_prompt(place: Place) -> None:
    """The text of the only message, or the body in another form, is checked by its token ids."""
    reply = place.ask("/v1/chat/completions", SAMPLED)
    for given in (CHAT["messages"][0]["content"], json.dumps({"messages": CHAT["messages"]}, indent=1)):
        again = place.replay(reply["id"], given)
        assert (again.exit_code, again.stderr) == (0, "same\n"), again.output
    other = place.replay(reply["id"], "Tell me a story about a mill.")
    assert other.exit_code == 1
    assert "the prompt is not that of request" in other.stderr


def test_a_completion_with_settings_comes_again(place: Place) -> None:
    """A completion with stop strings, penalties and a seed comes again from its text alone."""
    body = {"model": "assistant", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0.9, "seed": 2**64 - 5}
    reply = place.ask("/v1/completions", body | {"stop": ["zebra"], "frequency_penalty": 0.4, "top_k": 40})
    again = place.replay(reply["id"], "Once upon a time")
    assert (again.exit_code, again.stdout) == (0, reply["choices"][0]["text"] + "\n"), again.output


def test_a_stream_that_was_resumed_comes_again(place: Place) -> None:
    """A streamed answer whose engine was killed in the middle comes again whole, and is recognised by its text."""

    def kill() -> None:
        (pid,) = {int(json.loads(path.read_text())["pid"]) for path in place.runtime.glob("*/*/status.json")}
        os.kill(pid, signal.SIGKILL)

    request_id, text = streamed(place, SAMPLED | {"max_tokens": 120, "ignore_eos": True}, at_first=kill)
    until_settled(place, request_id)
    known = place.run("verify", request_id, "--text", "-", text=text)
    assert (known.exit_code, known.stdout[:13]) == (0, "yes: choice 0"), known.output
    again = place.run(
        "replay", request_id, "--url", place.url, "--prompt", "-", text=json.dumps(SAMPLED | {"ignore_eos": True})
    )
    assert again.exit_code == 0, again.output
    assert again.stdout == text + "\n"
    other = place.run("verify", request_id, "--text", "-", text=text[:-1])
    assert (other.exit_code, "was answered with another text" in other.stderr) == (1, True)


def until_settled(place: Place, request_id: str) -> None:
    end = time.monotonic() + 60
    while "its status is open" in place.run("verify", request_id, "--text", "-", text="x").stderr:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_cannot_be_repeated_is_told(place: Place) -> None:
    """Requests with a schema need their body; other routes, unknown ids and unmetered tasks are refused by name."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    body = json.dumps(CHAT | {"response_format": schema, "max_tokens": 5}).encode()
    with place.post("/v1/chat/completions", body) as answer:
        formed = json.loads(answer.read())
    assert "byte for byte" in place.replay(formed["id"], CHAT["messages"][0]["content"]).stderr
    again = place.replay(formed["id"], body)
    assert (again.exit_code, again.stderr) == (0, "same\n"), again.output
    assert "is not in the ledger" in place.replay("chatcmpl-none", "x").stderr
    message = place.ask("/v1/messages", CHAT | {"model": "assistant"})
    assert "came by /v1/messages" in place.replay(message["id"], "x").stderr
    text = message["content"][0]["text"]
    assert place.run("verify", message["id"], "--text", "-", text=text).exit_code == 0
    nothing = place.run("replay", formed["id"], "--url", place.url)
    assert "the payload log does not have the request" in nothing.stderr
    store, row = Store(place.database), ledger.c.request_id == request_of(formed["id"])
    store.write(lambda connection: connection.execute(sa.update(ledger).where(row).values(content_hash="f00")))
    store.close()
    assert "assistant is answered by another version now" in place.replay(formed["id"], body).stderr
