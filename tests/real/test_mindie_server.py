"""The examples of MindIE's documents, sent as printed to a server with real weights, and their bills."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_server import served
from mindie_examples import CHATS, GENERATE, MEDIA

from mlflow_llm.flavors import llm
from mlflow_llm.serving.metering import Store, Usage, UsageFilter

MODEL = "gpt-3.5-turbo"
MAX_REPLY_TOKENS = 24  # tokens of a reply: maxIterTimes
GENERATED = f"/v2/models/{MODEL}/generate"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mindie")


@pytest.fixture(scope="module")
def mindie(place: Path, smollm2_dir: Path) -> Iterator[str]:
    """Serve as one of MindIE's servers would be set up, with a ledger."""
    llm.save_model(place / "chat", smollm2_dir, link_files=True)
    own = (
        "--openAiSupport",
        "vllm",
        "--maxIterTimes",
        str(MAX_REPLY_TOKENS),
        "--maxSeqLen",
        "1024",
        "--maxPrefillTokens",
        "256",
    )
    store = ("--database", f"sqlite:///{place / 'ledger.db'}")
    with served(place, "-m", f"{place / 'chat'}={MODEL}", *own, *store, MLFLOW_LLM_STATE=str(place / "state")) as url:
        yield url


@pytest.fixture(scope="module")
def store(place: Path, mindie: str) -> Iterator[Store]:
    found = Store(f"sqlite:///{place / 'ledger.db'}")
    yield found
    found.close()


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=240) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def rows(store: Store) -> dict[str, Any]:
    return {row.request_id: row for row in Usage(store).rows(UsageFilter())}


def billed(store: Store, before: dict[str, Any]) -> tuple[int, int]:
    """Return prompt and completion tokens of the one row that was added since ``before``."""
    until = time.monotonic() + 240
    while True:
        new = [row for name, row in rows(store).items() if name not in before]
        if new and new[0].status != "open":
            (row,) = new
            return row.prompt_tokens, row.completion_tokens
        assert time.monotonic() < until, new
        time.sleep(0.02)


def same_shape(found: Any, printed: Any) -> bool:
    """Return whether objects have the same keys in the same order, and lists of them the printed ones' keys."""
    if isinstance(printed, dict):
        return list(found) == list(printed) and all(same_shape(found[key], printed[key]) for key in printed)
    if isinstance(printed, list) and printed and found:
        return all(same_shape(entry, printed[0]) for entry in found)
    return type(found) is type(printed) or {type(found), type(printed)} <= {int, float, str, type(None), list}


PRINTED: dict[str, Any] = {
    "id": "chatcmpl-123",
    "object": "chat.completion",
    "created": 1677652288,
    "model": "gpt-3.5-turbo-0613",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21},
    "prefill_time": 200,
    "decode_time_arr": [56, 28, 28],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_chats(mindie: str, store: Store, name: str, stream: bool) -> None:
    """A chat at OpenAI's path is answered in the printed shape, with at most maxIterTimes tokens, and billed as
    reported."""
    before = rows(store)
    body = {**CHATS[name], "model": MODEL, "stream": stream}
    status, text = post(f"{mindie}/v1/chat/completions", body)
    assert status == 200, text
    if stream:
        *chunks, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        read = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in read)
        assert [("usage" in chunk) for chunk in read] == [False] * (len(read) - 1) + [True]
        assert list(read[-1]) == ["id", "object", "created", "model", "usage", "choices"]
        reply, reason = read[-1], read[-1]["choices"][0]["finish_reason"]
    else:
        reply = json.loads(text)
        message = reply["choices"][0]["message"]
        printed = PRINTED | {"choices": [PRINTED["choices"][0] | {"message": dict.fromkeys(message, "")}]}
        assert same_shape(reply, printed)
        assert list(message) == ["role", "content", *(["tool_calls"] if "tools" in body else [])]
        assert reply["prefill_time"] > 0
        assert len(reply["decode_time_arr"]) <= reply["usage"]["completion_tokens"] - 1
        assert all(ms >= 0 for ms in reply["decode_time_arr"])
        reason = reply["choices"][0]["finish_reason"]
    assert reason in ("stop", "length", "tool_calls")
    usage = reply["usage"]
    assert usage["completion_tokens"] <= min(MAX_REPLY_TOKENS, body["max_tokens"])
    assert billed(store, before) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_a_call_that_is_required(mindie: str) -> None:
    """A tool round gives the printed reply: empty content, an id as printed, arguments that the schema allows."""
    body = {**CHATS["first-round"], "model": MODEL, "tool_choice": "required", "stop": None, "stop_token_ids": None}
    _, text = post(f"{mindie}/mindie/v1/chat/completions", body)
    choice = json.loads(text)["choices"][0]
    (call,) = choice["message"]["tool_calls"][:1]
    assert choice["message"]["content"] == ""
    assert list(call) == ["function", "id", "type"]
    assert list(call["function"]) == ["arguments", "name"]
    assert re.fullmatch("call_[A-Za-z0-9]{8}", call["id"])
    assert choice["finish_reason"] in ("tool_calls", "length")
    if choice["finish_reason"] == "tool_calls":
        assert list(json.loads(call["function"]["arguments"])) == ["order_id"]


def test_media(mindie: str) -> None:
    """The printed request with an image is refused by the image's place."""
    status, text = post(f"{mindie}/v1/chat/completions", {**MEDIA, "model": MODEL})
    assert status == 400
    assert json.loads(text)["error"].startswith("messages[0].content[1].image_url: ")


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_generated(mindie: str, store: Store, how: str) -> None:
    """Generation is answered as printed but for max_new_tokens, which maxIterTimes bounds; the details' count is
    billed."""
    before = rows(store)
    url = f"{mindie}/v2/models/{MODEL}/{how}"
    status, text = post(url, GENERATE)
    assert (status, json.loads(text)["error_type"]) == (422, "Input Validation Error")
    parameters = {**GENERATE["parameters"], "max_new_tokens": MAX_REPLY_TOKENS}
    status, text = post(url, {**GENERATE, "parameters": parameters})
    assert status == 200, text
    if how == "generate":
        reply = json.loads(text)
        details = reply["details"]
        assert len(details["batch_size"]) == len(details["queue_wait_time"]) <= details["generated_tokens"]
    else:
        *events, rest = text.split("\n\n")
        assert rest == ""
        assert all(event.startswith('data:{"id":"a123","model_name":') for event in events)
        reply = json.loads(events[-1].removeprefix("data:"))
        details = reply["details"]
    assert list(reply) == ["id", "model_name", "model_version", "text_output", "details"]
    assert next(iter(details)) == "finish_reason"
    assert billed(store, before) == (8, details["generated_tokens"])


def test_the_same_text_either_way(mindie: str) -> None:
    """A seed gives one text, streamed or whole, and at a versioned path; an unknown version is not found."""
    body = {**GENERATE, "parameters": {**GENERATE["parameters"], "max_new_tokens": 12}}
    whole = json.loads(post(f"{mindie}{GENERATED}", body)[1])["text_output"]
    _, text = post(f"{mindie}{GENERATED}_stream", body)
    said = [json.loads(event[5:])["text_output"] for event in text.split("\n\n") if event]
    assert "".join(said) == whole
    status, text = post(f"{mindie}/v2/models/{MODEL}/versions/9/generate", body)
    assert (status, json.loads(text)["error_type"]) == (404, "NotFoundError")
    status, text = post(f"{mindie}/v2/models/{MODEL}/versions/1/generate", body)
    assert (json.loads(text)["text_output"], json.loads(text)["model_version"]) == (whole, "1")
