"""Structured output and tools by the libraries that agents are made of, unchanged, against a server with real weights.

The model is a small one and its template knows no tools: what it is asked to call it must be made to, and what it says
is held to a form. Fields have short values, so that no text is cut off.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from llm_server import WARNINGS_OF_CLIENTS
from pydantic import BaseModel, Field

pytestmark = WARNINGS_OF_CLIENTS
QUESTION = [{"role": "user", "content": "What is the weather in Paris, in degrees Celsius?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 128}


class Weather(BaseModel):
    """Get the weather in a city."""

    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]


class Report(BaseModel):
    """A report of the weather."""

    city: Literal["Paris", "Rome"]
    sunny: bool
    degrees: int = Field(ge=-50, le=50)


TOOL = {
    "type": "function",
    "function": {"name": "Weather", "description": "d", "parameters": Weather.model_json_schema()},
}
FORM = {"type": "json_schema", "json_schema": {"name": "report", "schema": Report.model_json_schema()}}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after each test, because clients' connections are closed with their objects and warn then."""
    yield
    gc.collect()


@pytest.fixture(params=["v1", "serving-endpoints"])
def client(url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Provide OpenAI's client for OpenAI's routes and for Databricks'."""
    import openai

    with openai.OpenAI(base_url=f"{url}/{request.param}", api_key="x", max_retries=0) as client:
        yield client


def test_openai_parses_a_response_format(client: Any) -> None:
    """``.parse`` returns an object of the requested class."""
    done = client.chat.completions.parse(model="assistant", messages=QUESTION, response_format=Report, **GREEDY)
    assert isinstance(done.choices[0].message.parsed, Report)
    assert done.choices[0].finish_reason == "stop"


def test_openai_parses_calls(client: Any) -> None:
    """``.parse`` returns the arguments as objects; a required call ends with ``tool_calls``, a named one with
    ``stop``."""
    import openai

    tools = [openai.pydantic_function_tool(Weather)]
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "Weather"}}, "stop")):
        done = client.chat.completions.parse(
            model="assistant", messages=QUESTION, tools=tools, tool_choice=choice, **GREEDY
        )
        message = done.choices[0].message
        assert message.content is None
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in message.tool_calls)
        assert {len(call.id) for call in message.tool_calls} == {29}
        assert done.choices[0].finish_reason == reason


def test_openai_streams_a_response_format(client: Any) -> None:
    """``.stream`` gives the text piece by piece and the object at its end."""
    with client.chat.completions.stream(
        model="assistant", messages=QUESTION, response_format=Report, **GREEDY
    ) as stream:
        events = list(stream)
        done = stream.get_final_completion()
    pieces = [event.delta for event in events if event.type == "content.delta"]
    assert len(pieces) > 1
    assert Report.model_validate_json("".join(pieces)) == done.choices[0].message.parsed


def test_openai_streams_calls(client: Any) -> None:
    """``.stream`` gives arguments as they come, and at its end the reply of a whole request."""
    import openai

    asked = {"model": "assistant", "messages": QUESTION, "tools": [openai.pydantic_function_tool(Weather)], **GREEDY}
    with client.chat.completions.stream(tool_choice="required", **asked) as stream:
        events = list(stream)
        done = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    whole = client.chat.completions.parse(tool_choice="required", **asked).choices[0]
    assert len(deltas) > 1
    assert "".join(event.arguments_delta for event in deltas if event.index == 0) == _arguments(whole)[0]
    assert _arguments(done) == _arguments(whole)
    assert done.finish_reason == whole.finish_reason == "tool_calls"
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in done.message.tool_calls)


def _arguments(choice: Any) -> list[str]:
    return [call.function.arguments for call in choice.message.tool_calls]


def test_openai_deltas_of_calls(client: Any) -> None:
    """No later delta of a call repeats a field of the first one, not even as a null, and indices do not interleave."""
    stream = client.chat.completions.create(
        model="assistant", messages=QUESTION, tools=[TOOL], tool_choice="required", stream=True, n=2, **GREEDY
    )
    choices = [choice.to_dict() for chunk in stream for choice in chunk.choices]
    for index in (0, 1):
        mine = [choice["delta"] for choice in choices if choice["index"] == index]
        assert [set(delta) for delta in mine if "role" in delta] == [{"role", "tool_calls"}]
        assert all(set(delta) - {"role"} <= {"tool_calls"} for delta in mine)
        calls = [call for delta in mine for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
        for i, call in enumerate(calls):
            first = i == 0 or call["index"] != calls[i - 1]["index"]
            assert set(call) == ({"index", "id", "type", "function"} if first else {"index", "function"})
            assert set(call["function"]) == ({"name", "arguments"} if first else {"arguments"})
            assert bool(call["function"]["arguments"]) != first
        assert [c["finish_reason"] for c in choices if c["index"] == index][-1] == "tool_calls"


def test_a_call_and_its_result_go_back(client: Any) -> None:
    """A reply's message can be sent back unchanged with the tool's result, and no further call is made when none is
    allowed."""
    asked = {"model": "assistant", "tools": [TOOL], **GREEDY}
    called = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **asked
    )
    (call,) = called.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})}
    history = [*QUESTION, called.choices[0].message, result]
    done = client.chat.completions.create(messages=history, tool_choice="none", **asked).choices[0]
    assert done.message.tool_calls is None
    assert done.message.content


def test_guided_fields_of_vllm(url: str) -> None:
    """vLLM's fields work in ``extra_body``, for chats and completions."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        asked = {"model": "assistant", "temperature": 1, "max_tokens": 64}
        chat = client.chat.completions.create(
            messages=QUESTION, extra_body={"guided_choice": ["warm", "cold"]}, **asked
        )
        assert chat.choices[0].message.content in ("warm", "cold")
        form = {"structured_outputs": {"json": Report.model_json_schema()}}
        done = client.completions.create(prompt="The weather: ", n=4, extra_body=form, **asked)
        assert len([Report.model_validate_json(choice.text) for choice in done.choices]) == 4
        with pytest.raises(openai.BadRequestError, match="guided_regex"):
            client.completions.create(prompt="x", extra_body={"guided_regex": "("}, **asked)


def test_mlflow_deployments(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's client of a workspace gets calls and schemas by ``predict`` and ``predict_stream``."""
    from mlflow.deployments import get_deploy_client

    monkeypatch.setenv("DATABRICKS_HOST", url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    client = get_deploy_client("databricks")
    asked = {"messages": QUESTION, **GREEDY}
    whole = client.predict(endpoint="assistant", inputs={**asked, "tools": [TOOL], "tool_choice": "required"})
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    Weather.model_validate_json(choice["message"]["tool_calls"][0]["function"]["arguments"])
    chunks = list(client.predict_stream(endpoint="assistant", inputs={**asked, "response_format": FORM}))
    Report.model_validate_json("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structured_output(url: str, method: str) -> None:
    """``with_structured_output`` works with each of its methods, whole and streamed."""
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="assistant", **GREEDY)
    if method == "json_mode":
        found = model.with_structured_output(None, method=method).invoke("Return a JSON object with the key 'name'.")
        assert isinstance(found, dict)
        return
    structured = model.with_structured_output(Report, method=method)
    assert isinstance(structured.invoke("What is the weather in Paris?"), Report)
    assert isinstance(list(structured.stream("What is the weather in Paris?"))[-1], Report)


def test_langchain_tools(url: str) -> None:
    """Calls by ``bind_tools`` are the same in the whole reply and gathered from its stream."""
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="assistant", **GREEDY)
    bound = model.bind_tools([Weather], tool_choice="any", strict=True)
    whole = bound.invoke("What is the weather in Paris?")
    first, *rest = bound.stream("What is the weather in Paris?")
    for chunk in rest:
        first += chunk
    assert [call["name"] for call in whole.tool_calls] == ["Weather"] * len(whole.tool_calls)
    assert [call["args"] for call in first.tool_calls] == [call["args"] for call in whole.tool_calls]
    assert Weather.model_validate(whole.tool_calls[0]["args"])


def test_langchain_standard(url: str) -> None:
    """LangChain's own tests of a chat model pass (``langchain_standard``)."""
    pytest.importorskip("langchain_tests")
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "syrupy", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider")
    file = Path(__file__).with_name("langchain_standard.py")
    # how fast it streams is compared with a recording, which nobody has made
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *plugins, "-k", "not stream_time", str(file)]
    given = os.environ | {"MLFLOW_LLM_TEST_URL": url, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(scope="module")
def ai_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Vercel's AI SDK by npm from its lockfile, beside a program that uses it."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("npm") / "ai_sdk"
    shutil.copytree(Path(__file__).with_name("ai_sdk"), folder)
    install = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install the AI SDK: {done.stderr[-300:]}")
    return folder


def test_ai_sdk(url: str, ai_sdk: Path) -> None:
    """npm's ``ai`` with ``@ai-sdk/openai-compatible`` gets texts, objects and calls, whole and streamed, and an
    error."""
    given = os.environ | {"MLFLOW_LLM_TEST_URL": url}
    done = subprocess.run(("node", "client.mjs"), cwd=ai_sdk, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout)
    for field in ("text", "reason"):
        assert got["stream"][field] == got["text"][field]
    assert got["stream"]["usage"]["totalTokens"] == got["text"]["usage"]["totalTokens"]
    assert got["text"]["usage"]["totalTokens"] > got["text"]["usage"]["outputTokens"] > 0
    assert Report.model_validate(got["object"])
    assert got["streamedObject"] == got["object"]
    assert got["calls"]["reason"] == "tool-calls"
    assert got["calls"]["results"] == [f"sunny in {call['city']}" for call in got["calls"]["calls"]]
    assert got["streamedCalls"] == got["calls"]["calls"]
    assert got["answered"]["inputTokens"] > 0
    assert got["refused"]["status"] == 400
    assert "top_p" in got["refused"]["message"]


def test_pydantic_ai(url: str) -> None:
    """A pydantic-ai agent gets its output by a tool's arguments and by a response format, and calls a tool."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("assistant", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    for output in (ToolOutput(Report, strict=True), NativeOutput(Report)):
        agent = Agent(model, output_type=output, model_settings=GREEDY)
        assert isinstance(asyncio.run(agent.run("What is the weather in Paris?")).output, Report)


def test_openai_agents(url: str) -> None:
    """OpenAI's agents over chat completions get an output type, and a tool call that ends the run."""
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    seen: list[str] = []

    @agents.function_tool
    def find_weather(city: Literal["Paris", "Rome"]) -> str:
        """Find the weather of a city."""
        seen.append(city)
        return f"sunny in {city}"

    async def run() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            model = agents.OpenAIChatCompletionsModel("assistant", client)
            settings = {"temperature": 0, "max_tokens": 128}
            typed = agents.Agent("a", model=model, output_type=Report, model_settings=agents.ModelSettings(**settings))
            calling = agents.Agent(
                "b",
                model=model,
                tools=[find_weather],
                tool_use_behavior="stop_on_first_tool",
                model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, **settings),
            )
            question = "What is the weather in Paris?"
            return await agents.Runner.run(typed, question), await agents.Runner.run(calling, question)

    typed, calling = asyncio.run(run())
    assert isinstance(typed.final_output, Report)
    assert calling.final_output == f"sunny in {seen[0]}"


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    """instructor gets the right object by calls, by a response format, and in mode JSON, which asks for any object
    (``json_object``)."""
    instructor = pytest.importorskip("instructor")
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        found = patched.chat.completions.create(
            model="assistant", messages=QUESTION, response_model=Report, max_retries=0, **GREEDY
        )
    assert isinstance(found, Report)
