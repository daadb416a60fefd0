"""``mlflow models serve`` over SmolLM2-135M with two adapters: one engine for all workers, short errors, clean end."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from internals import session_of
from models_server import ModelsServer, models_server

from mlflow_llm.flavors import llm

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def server(request, assistant, tmp_path_factory):
    """Start a server, and check at the end that nothing of it is left."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    settings = {"max_num_seqs": 40 + request.param}
    with models_server(assistant, request.param, log, settings) as running:
        running.settings = settings
        yield running


def engine_pids(server: ModelsServer) -> list[int]:
    return [p.pid for p in server.processes() if any("mlflow_llm.serving.transport" in part for part in p.cmdline())]


def test_32_callers_are_batched_in_one_engine(server, assistant):
    """32 callers at once are answered by the one engine process of all workers, several tokens a step."""
    with llm.load_model(str(assistant), **server.settings) as beside, ThreadPoolExecutor(32) as pool:
        engine = session_of(beside).engine
        assert engine_pids(server) == [engine.info.pid]
        beside.complete("a", max_tokens=1)
        before = engine.health()
        body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}
        answers = list(pool.map(server.post, [body] * 32))
        beside.complete("a", max_tokens=1)
        after = engine.health()
    assert {status for status, _ in answers} == {200}
    assert {reply["usage"]["completion_tokens"] for _, reply in answers} == {32}
    assert (after.generated_tokens - before.generated_tokens) >= 3 * (after.steps - before.steps)


def test_only_the_engine_has_torch(server):
    """Only the engine has torch in memory, not the server's workers."""
    having = [one for one in server.processes() if any("libtorch" in place.path for place in one.memory_maps())]
    assert ["engine_process" in " ".join(one.cmdline()) for one in having] == [True]


def test_reply_is_bare_for_openai_form(server):
    """A body in OpenAI's form gets the reply object itself; an adapter is named by a field."""
    status, reply = server.post({"messages": MESSAGES, "temperature": 0, "max_tokens": 32, "adapter": "pirate"})
    assert status == 200
    assert reply["choices"][0]["message"]["content"].startswith("Arrr")


@pytest.mark.parametrize("form", ["inputs", "instances", "dataframe_records"])
def test_rows_in_mlflow_forms(server, form):
    """MLflow's own forms give ``predictions``, one a row and in order."""
    rows = [{"prompt": "a b c", "max_tokens": k, "temperature": 0} for k in (1, 2, 3)]
    status, reply = server.post({form: rows})
    assert status == 200, reply
    assert [p["usage"]["completion_tokens"] for p in reply["predictions"]] == [1, 2, 3]


FORM = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}


def test_tools_and_response_formats(server):
    """Tools and response formats work in a single request and in rows beside each other."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": FORM | {"additionalProperties": False}}}]
    asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 64}
    status, reply = server.post({**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False})
    assert status == 200, reply
    choice = reply["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert isinstance(json.loads(call["function"]["arguments"])["sunny"], bool)
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM | {"additionalProperties": False}}}
    rows = [{**asked, "response_format": form}, {**asked, "guided_choice": ["yes", "no"]}]
    status, reply = server.post({"dataframe_records": rows})
    assert status == 200, reply
    texts = [row["choices"][0]["message"]["content"] for row in reply["predictions"]]
    assert isinstance(json.loads(texts[0])["sunny"], bool)
    assert texts[1] in ("yes", "no")


BAD = {
    "over-long prompt": ({"prompt": "word " * 20_000}, 400, "8192"),
    "empty messages": ({"messages": []}, 400, "messages"),
    "wrong role": ({"messages": [{"role": "boss", "content": "x"}]}, 400, "role"),
    "unknown adapter": ({"messages": MESSAGES, "adapter": "nobody"}, 404, "adapter"),
    "temperature NaN": ({"messages": MESSAGES, "temperature": float("nan")}, 400, "temperature"),
    "list for a string": ({"messages": [{"role": "user", "content": [1, 2]}]}, 400, "content"),
    "string for a number": ({"prompt": "long " * 1000, "max_tokens": "many"}, 400, "max_tokens"),
    "5 MB body": ({"prompt": "x" * 5_000_000}, 400, "prompt"),
    "10,000 stop strings": ({"prompt": "a", "stop": [f"s{i}" for i in range(10_000)]}, 400, "stop"),
    "stream": ({"messages": MESSAGES, "stream": True}, 400, "predict_stream"),
    "tools": ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools"),
    "unknown field": ({"prompt": "a", "max_token": 5}, 400, "did you mean 'max_tokens'"),
    "unknown field of a row": ({"dataframe_records": [{"prompt": "a", "max_token": 5}]}, 400, "row 0: max_token"),
    "unknown parameter": ({"inputs": {"prompt": "a"}, "params": {"foo": 1}}, 400, "params.foo"),
    "beside the rows": ({"inputs": {"prompt": "a"}, "max_tokens": 5}, 400, "max_tokens"),
    "no JSON": (b'{"prompt": ', 400, "invalid JSON"),
    "one bad row": ({"inputs": [{"prompt": "a"}, {"prompt": 7}]}, 400, "row 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_short_error(server, name):
    """Bad input gets a 4xx status and a message with the field, without stack trace or prompt."""
    body, expected, part = BAD[name]
    status, reply = server.post(body)
    text = json.dumps(reply)
    assert status == expected, text
    assert part in reply["message"]
    assert len(text) < 600
    assert "Traceback" not in text
    assert "stack_trace" not in reply


def test_nothing_is_left_after_kill_9(assistant, tmp_path):
    """When the server and its workers are killed at once, the engine process ends by itself."""
    server = ModelsServer(assistant, 1, tmp_path / "server.log", {"max_num_seqs": 50})
    try:
        server.wait_until_ready()
        assert len(engine_pids(server)) == 1
    finally:
        server.signal(signal.SIGKILL)
    assert server.wait_until_gone() == []
