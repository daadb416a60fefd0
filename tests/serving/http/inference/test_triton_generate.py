"""Triton's own generate extension at the paths that it shares with MindIE's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from instant_model import write_instant_model

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.dialects.triton.dialect import is_meant
from mlflow_llm.serving.frontend.worker_state import make_server
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints, ServedEntity
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.testing.instant_engine import InstantEngine

PATH = "/v2/models/assistant/generate"
ASK: dict[str, Any] = {"text_input": "What is Triton?", "max_tokens": 5}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    """Return a client of a server whose model writes one printable character a token and never stops by itself."""
    bundle = write_instant_model(tmp_path_factory.mktemp("printable"), vocab_size=94)
    engine = InstantEngine(bundle, EngineSettings(max_model_len=1024))
    view = EndpointView(name="assistant", info=engine.info, text=TextModel(bundle), names=("model-1",))
    entity = ServedEntity(endpoint="assistant", entity="model-1", view=view, engine=engine, created=1)
    return create_app(make_server(ServedEndpoints(entity), ServerSettings())).test_client()


def ask(client: FlaskClient, body: dict[str, Any], status: int = 200, path: str = PATH) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.get_data(as_text=True)
    return answer.get_json()


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"text_input": "x"}, False),
        ({"text_input": "x", "parameters": {"temperature": 1}}, False),
        ({"text_input": "x", "parameters": {"max_new_token": 1}}, False),
        ({"text_input": "x", "max_tokens": 5}, True),
        ({"text_input": "x", "parameters": {"max_tokens": 5, "stream": False}}, True),
        ({"text_input": "x", "parameters": {"exclude_input_in_output": True}}, True),
        ({"input_ids": [1], "request_output_len": 5}, True),
        ([], False),
    ],
)
def test_form_of_a_body(body: Any, meant: bool) -> None:
    """A body is read as Triton's form if a name is known to it alone; a misspelt name of MindIE's stays MindIE's."""
    assert is_meant(json.dumps(body).encode()) is meant
    assert not is_meant(b"{")


@pytest.mark.parametrize("body", [ASK, {"text_input": ASK["text_input"], "parameters": {"max_tokens": 5}}])
def test_a_text(client: FlaskClient, body: dict[str, Any]) -> None:
    """Inputs stand at the top level or in parameters; sampling is greedy as in TensorRT-LLM, and ids are returned on
    request only.
    """
    found = ask(client, body)
    assert list(found) == ["model_name", "model_version", "text_output"]
    assert (found["model_name"], found["model_version"], len(found["text_output"])) == ("assistant", "1", 5)
    assert found == ask(client, body, path=PATH.replace("/generate", "/versions/1/generate"))
    assert ask(client, body | {"id": "a b"})["id"] == "a b"


def test_what_may_be_asked_beside(client: FlaskClient) -> None:
    """A request may have the prompt echoed, lists of stop words, prompts of token ids, and log probabilities."""
    text = ask(client, ASK)["text_output"]
    whole = ask(client, ASK | {"parameters": {"exclude_input_in_output": False}})["text_output"]
    assert whole == ASK["text_input"] + text
    assert ask(client, ASK | {"stop_words": [text[2]]})["text_output"] == text[: text.index(text[2])]
    assert ask(client, ASK | {"parameters": {"stop_words": text[2]}})["text_output"] == text[: text.index(text[2])]
    ids = ask(client, {"input_ids": [65, 66], "request_output_len": [[3]]})["output_ids"]
    assert [type(token) for token in ids] == [int] * 3
    asked = {"input_ids": [65, 66], "request_output_len": [[3]], "exclude_input_in_output": False}
    assert ask(client, asked)["output_ids"] == [65, 66, *ids]
    streamed = [token for event in events(client, asked) for token in event["output_ids"]]
    assert streamed == [65, 66, *ids]


def events(client: FlaskClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(f"{PATH}_stream", json=body)
    assert answer.content_type.startswith("text/event-stream"), answer.get_data(as_text=True)
    *found, rest = answer.get_data(as_text=True).split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: {") for event in found)
    return [json.loads(event[6:]) for event in found]


def test_events(client: FlaskClient) -> None:
    """Each text is an event with the same keys; stream false gives the whole text in one."""
    whole = ask(client, ASK)
    found = events(client, ASK)
    assert len(found) == 5
    assert "".join(event["text_output"] for event in found) == whole["text_output"]
    assert all(list(event) == list(whole) for event in found)
    assert events(client, ASK | {"stream": False}) == [whole]
    ids = [token for event in events(client, {"input_ids": [65], "max_tokens": 3}) for token in event["output_ids"]]
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"text_input": "x", "top_k": 5}, "max_tokens"),
        (ASK | {"stream": True}, "stream"),
        (ASK | {"parameters": {"max_tokens": 5}}, "max_tokens"),
        (ASK | {"colour": 1}, "parameters.colour"),
        (ASK | {"temperature": "hot"}, "temperature"),
        (ASK | {"temperature": [1, 2]}, "temperature"),
        (ASK | {"stop_words": 5}, "stop_words"),
        (ASK | {"stop_words": [["a"], "b"]}, "stop_words"),
        (ASK | {"text_input": ""}, "text_input"),
        (ASK | {"text_input": ["a", "b"]}, "text_input"),
        (ASK | {"id": 5}, "id"),
        (ASK | {"parameters": [], "top_k": 1}, "parameters"),
        ({"max_tokens": 5}, "input_ids"),
    ],
)
def test_refusals_have_tritons_form(client: FlaskClient, body: dict[str, Any], where: str) -> None:
    """A refusal has Triton's form and status, and names the field."""
    found = ask(client, body, 400)
    assert list(found) == ["error"]
    assert where in found["error"].split(":")[0]


@pytest.mark.parametrize("name", ["return_log_probs", "return_context_logits", "beam_width"])
def test_outputs_that_cannot_be_streamed(client: FlaskClient, name: str) -> None:
    """Outputs that cannot be streamed are refused by name if tokens are streamed."""
    answer = client.post(f"{PATH}_stream", json=ASK | {name: 2 if name == "beam_width" else True})
    assert answer.status_code == 400
    assert answer.get_json()["error"].startswith(name)
