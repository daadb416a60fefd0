"""MindIE's routes over HTTP: which dialect answers where, and the settings of its servers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from mindie_examples import GENERATE, MEDIA, SINGLE

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import make_server
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints, ServedEntity
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView, Profile
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.testing.instant_engine import InstantEngine

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
MINDIE, OPENAI = "/mindie/v1/chat/completions", "/v1/chat/completions"
PROMPT = len("<user>hi<assistant>") + 1  # a byte a token, and one that ends the turn
Serve = Callable[..., FlaskClient]


@pytest.fixture
def serve(instant_bundle: Bundle, instant_text: TextModel) -> Serve:
    """Return ``serve(llama={"openAiSupport": "vllm"}, …)``, which makes a client of a server with these endpoints."""

    def build(**endpoints: dict[str, Any]) -> FlaskClient:
        engine = InstantEngine(instant_bundle, EngineSettings(max_model_len=1024))
        entities = []
        for name, settings in endpoints.items():
            profile = Profile(dialects=DialectSettings(**settings))
            view = EndpointView(name=name, info=engine.info, text=instant_text, names=(f"{name}-1",), profile=profile)
            entities.append(ServedEntity(endpoint=name, entity=f"{name}-1", view=view, engine=engine, created=1))
        return create_app(make_server(ServedEndpoints(*entities), ServerSettings())).test_client()

    return build


def ask(client: FlaskClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.get_data(as_text=True)
    return answer.get_json()


def test_the_documents_examples(serve: Serve) -> None:
    """The documented examples are answered with the documented keys, order and types."""
    found = ask(serve(llama_65b={}), MINDIE, {"model": "llama_65b", **SINGLE})
    assert list(found) == ["id", "object", "created", "model", "choices", "usage", "prefill_time", "decode_time_arr"]
    assert list(found["choices"][0]) == ["index", "message", "finish_reason"]
    prompt, completion, total = found["usage"].values()
    assert (prompt, prompt + completion) == (46, total)
    assert found["prefill_time"] > 0
    assert len(found["decode_time_arr"]) == completion - 1
    found = ask(serve(llama_65b={}), "/v2/models/llama_65b/generate", GENERATE)
    assert list(found) == ["id", "model_name", "model_version", "text_output", "details"]
    assert found["details"]["generated_tokens"] == len(found["details"]["queue_wait_time"])


def test_generated_events(serve: Serve) -> None:
    """The documented example, streamed, gives one event a token and an end, in the documented form."""
    answer = serve(llama_65b={}).post("/v2/models/llama_65b/generate_stream", json=GENERATE)
    assert answer.content_type == "text/event-stream"
    events = answer.get_data(as_text=True).split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith('data:{"id":"a123","model_name":"llama_65b",') for event in events)
    details = [json.loads(event[5:])["details"] for event in events]
    assert details[-1]["finish_reason"] in ("length", "eos_token")
    counts = [each["generated_tokens"] for each in details]
    assert counts == sorted(counts)
    assert details[-1]["queue_wait_time"] >= sum(each["queue_wait_time"] for each in details[:-1]) - len(details)


def test_dialect_of_openais_path(serve: Serve) -> None:
    """At OpenAI's path only endpoints with the setting vllm speak MindIE's dialect; errors without an endpoint are
    OpenAI's.
    """
    client = serve(ours={"openAiSupport": "vllm"}, theirs={}, others={"openAiSupport": "openai"})
    assert "prefill_time" in ask(client, OPENAI, HI | {"model": "ours"})
    assert "prefill_time" in ask(client, OPENAI, HI | {"model": "ours-1"})
    for name in ("theirs", "others"):
        assert "prefill_time" not in ask(client, OPENAI, HI | {"model": name})
        assert "prefill_time" in ask(client, MINDIE, HI | {"model": name})
    assert "error_type" in ask(client, OPENAI, HI | {"model": "ours", "max_tokens": 0}, 400)
    for body in (HI | {"model": "theirs", "max_tokens": 0}, HI | {"model": 5}):
        assert "type" in ask(client, OPENAI, body, 400)["error"]
    assert "type" in ask(client, OPENAI, HI | {"model": "nobody"}, 404)["error"]


def test_a_server_that_speaks_it_everywhere(serve: Serve) -> None:
    """If every endpoint speaks MindIE's dialect, bodies without an endpoint, or without JSON, are refused in its form
    too.
    """
    client = serve(a={"openAiSupport": "vllm"}, b={"openAiSupport": "vllm"})
    assert ask(client, OPENAI, HI | {"model": "nobody"}, 404)["error_type"] == "NotFoundError"
    answer = client.post(OPENAI, data=b"{", content_type="application/json")
    assert (answer.status_code, list(answer.get_json())) == (400, ["error", "error_type"])
    answer = client.post(OPENAI, data=b"{}", content_type="text/plain")
    assert (answer.status_code, list(answer.get_json())) == (415, ["error", "error_type"])
    assert "text_completion" in ask(client, "/v1/completions", {"model": "a", "prompt": "x"})["object"]


def test_full_texts(serve: Serve) -> None:
    """With the setting each chunk has the full text so far."""
    answer = serve(m={"fullTextEnabled": True}).post(MINDIE, json=HI | {"model": "m", "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.get_data(as_text=True).split("\n\n")[:-2]]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert chunks[-1]["full_text"] == texts[-1] == texts[-2]


def test_most_tokens_of_a_reply(serve: Serve) -> None:
    """maxIterTimes is the default and the bound of max_tokens in MindIE's chats; elsewhere more is refused."""
    client = serve(m={"maxIterTimes": 7})
    for asked, made in ((None, 7), (3, 3), (50, 7), (2**31 - 1, 7)):
        found = ask(client, MINDIE, HI | {"model": "m", "max_tokens": asked})
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (made, "length")
    assert ask(client, OPENAI, HI | {"model": "m", "max_tokens": None})["usage"]["completion_tokens"] == 7
    assert "maxIterTimes" in ask(client, OPENAI, HI | {"model": "m", "max_tokens": 8}, 400)["error"]["message"]
    more = {"model": "m", "max_tokens": 50, "temperature": 0}  # a text that is drawn may end before
    message = ask(client, "/v1/messages", {"messages": HI["messages"], **more})
    assert (message["usage"]["output_tokens"], message["stop_reason"]) == (7, "max_tokens")
    generate = "/v2/models/m/generate"
    assert len(ask(client, generate, {"text_input": "x", "parameters": {"details": True}})["details"]["batch_size"]) < 8
    refused = ask(client, generate, {"text_input": "x", "parameters": {"max_new_tokens": 8}}, 422)
    assert refused["error"].startswith("parameters.max_new_tokens: 8")


def test_most_tokens_of_a_prompt(serve: Serve) -> None:
    """maxInputTokenLen bounds prompts of every dialect, maxSeqLen prompt and reply together."""
    client = serve(m={"maxInputTokenLen": PROMPT - 1}, n={"maxInputTokenLen": PROMPT, "maxSeqLen": PROMPT + 2})
    assert "maxInputTokenLen" in ask(client, MINDIE, HI | {"model": "m"}, 400)["error"]
    assert "maxInputTokenLen" in ask(client, OPENAI, HI | {"model": "m"}, 400)["error"]["message"]
    assert ask(client, MINDIE, HI | {"model": "n"})["usage"]["completion_tokens"] == 2
    assert "context length" in ask(client, OPENAI, HI | {"model": "n"}, 400)["error"]["message"]
    long = {"text_input": "x" * PROMPT}
    assert ask(client, "/v2/models/m/generate", long, 422)["error"].startswith(f"text_input: {PROMPT} tokens")


def test_a_prompt_leaves_room_for_the_longest_reply(serve: Serve) -> None:
    """Triton's generate takes prompts of at most maxSeqLen less maxIterTimes, and top_k below the vocabulary."""
    client = serve(m={"maxSeqLen": 30, "maxIterTimes": 10})
    path, one = "/v2/models/m/generate", {"max_new_tokens": 1}
    ask(client, path, {"text_input": "x" * 20, "parameters": one})
    refused = ask(client, path, {"text_input": "x" * 21, "parameters": one}, 422)
    assert refused["error"].startswith("text_input: 21 tokens; at most 20")
    refused = ask(client, path, {"text_input": "x", "parameters": {"top_k": 10**6}}, 422)
    assert refused["error"].startswith("parameters.top_k: 1000000")


def test_media_within_what_is_allowed(serve: Serve, tmp_path: Path) -> None:
    """A file is only looked for below the allowed directory, links resolved; then the model refuses the medium."""
    inside, outside = tmp_path / "media", tmp_path / "other"
    for place in (inside, outside):
        place.mkdir()
        (place / "a.png").write_bytes(b"x")
    (inside / "empty.png").write_bytes(b"")
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "b.png").mkdir()
    client = serve(m={"allowedLocalMediaPath": str(inside), "allowedMediaDomains": ("h.example",)}, none={})

    def refusal(url: str, model: str = "m") -> str:
        content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": url}]
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        return str(ask(client, MINDIE, body, 400)["error"])

    text_only = "messages[0].content[1].type: 'image_url' is not allowed; expected \"text\": this model reads text only"
    local = f"{inside}/a.png"
    for url in (local, f"file://{local}", "https://H.example:443/a.png", "data:image/png;base64,aGk="):
        assert refusal(url) == text_only
    below = f"expected a path below {inside} (allowedLocalMediaPath)"
    for path in (f"{outside}/a.png", f"{outside}/none.png", f"{inside}/../other/a.png", f"{inside}/link.png"):
        assert below in refusal(path)
    for path in (f"{inside}/none.png", f"{inside}/b.png"):
        assert "expected a file that is there" in refusal(path)
    assert "0 bytes" in refusal(f"{inside}/empty.png")
    assert "allowedMediaDomains" in refusal("http://169.254.169.254/a.png")
    assert "allowedLocalMediaPath allows none" in refusal(f"{inside}/a.png", "none")
    assert "none are allowed" in refusal("http://h.example/a.png", "none")
    assert ask(client, MINDIE, {"model": "none", **MEDIA}, 400)["error"].startswith(
        "messages[0].content[1].image_url: '/xxxx/test.png'"
    )


def test_long_stop_strings(serve: Serve) -> None:
    """Stop strings of the documented maximum length are accepted and matched."""
    stop = ["a" * 16384, "b" * 16384]
    assert ask(serve(m={}), MINDIE, HI | {"model": "m", "stop": stop})["usage"]["completion_tokens"] == 4


def test_times_of_the_current_profile(serve: Serve) -> None:
    """Details have the times that the document leaves null."""
    body = {"text_input": "x", "parameters": {"details": True}}
    path = "/v2/models/m/generate"
    assert ask(serve(m={}), path, body)["details"]["first_token_cost"] is None
    assert ask(serve(m={"generateProfile": "current"}), path, body)["details"]["first_token_cost"] > 0


def test_generate_at_paths_that_are_not_there(serve: Serve) -> None:
    """An unknown model is a 404 in the document's form."""
    assert ask(serve(m={}), "/v2/models/x/generate", {"text_input": "x"}, 404)["error_type"] == "NotFoundError"
