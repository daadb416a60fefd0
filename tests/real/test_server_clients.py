"""Unmodified client libraries against a running server with real weights."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from typing import Literal

import numpy as np
import pydantic
import pytest
from llm_server import WARNINGS_OF_CLIENTS

pytestmark = WARNINGS_OF_CLIENTS
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}


def test_openai_sync(url: str) -> None:
    """openai gets chat, stream with usage, completions and models."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = client.chat.completions.create(model="assistant", **CHAT)
        assert "Paris" in whole.choices[0].message.content
        chunks = list(
            client.chat.completions.create(
                model="assistant", stream=True, stream_options={"include_usage": True}, **CHAT
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
        done = client.completions.create(model="assistant", prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0)
        assert len(done.choices) == 2
        assert [m.id for m in client.models.list()] == ["assistant", "embedder"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", **CHAT)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="assistant", **(CHAT | {"temperature": 9}))


def test_openai_async(url: str) -> None:
    """openai's asynchronous client gets several complete streams at once."""
    import openai

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="assistant", stream=True, **CHAT)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]


def test_openai_embeddings(url: str) -> None:
    """openai gets equal embeddings as floats, as base64 (its default), and of one or several lists of token ids."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        floats = client.embeddings.create(model="embedder", input=["a cat", "a dog"], encoding_format="float").data
        decoded = client.embeddings.create(model="embedder", input=["a cat", "a dog"]).data
        raw = client.embeddings.create(model="embedder", input="a cat", encoding_format="base64").data[0].embedding
        cat, dog = [101, 1037, 4937, 102], [101, 1037, 3899, 102]
        flat = client.embeddings.create(model="embedder", input=cat).data
        lists = client.embeddings.create(model="embedder", input=[cat, dog]).data
    first, second = (np.array(entry.embedding) for entry in floats)
    assert len(first) == 384
    assert abs(float(first @ first) - 1) < 1e-4
    assert not np.allclose(first, second, atol=1e-2)
    assert np.allclose(first, np.frombuffer(base64.b64decode(raw), "<f4"), atol=1e-6)
    assert len(flat) == 1
    assert np.allclose(first, flat[0].embedding, atol=1e-6)
    for pair in (decoded, lists):
        assert np.allclose([first, second], [entry.embedding for entry in pair], atol=1e-6)


def test_databricks_sdk(workspace: str) -> None:
    """databricks-sdk's serving_endpoints.query gets chat, completions and embeddings."""
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service.serving import ChatMessage, ChatMessageRole

    client = WorkspaceClient(host=workspace, token="token")
    message = ChatMessage(role=ChatMessageRole.USER, content=CHAT["messages"][0]["content"])
    chat = client.serving_endpoints.query("assistant", messages=[message], max_tokens=16, temperature=0.0)
    assert "Paris" in chat.choices[0].message.content
    done = client.serving_endpoints.query("assistant", prompt="One, two,", max_tokens=4, temperature=0.0)
    assert done.usage.completion_tokens == 4
    vectors = client.serving_endpoints.query("embedder", input=["a", "b"])
    assert len(vectors.data) == 2


def test_mlflow_databricks_client(workspace: str) -> None:
    """predict and predict_stream of mlflow.deployments' Databricks client agree."""
    from mlflow.deployments import get_deploy_client

    client = get_deploy_client("databricks")
    whole = client.predict(endpoint="assistant", inputs=CHAT)
    chunks = list(client.predict_stream(endpoint="assistant", inputs=CHAT))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_mlflow_http_client(url: str) -> None:
    """mlflow.deployments' HTTP client lists, gets and predicts."""
    from mlflow.deployments import get_deploy_client

    client = get_deploy_client(url)
    assert [e.name for e in client.list_endpoints()] == ["assistant", "embedder"]
    assert client.get_endpoint("assistant").endpoint_type == "llm/v1/chat"
    assert "Paris" in client.predict(endpoint="assistant", inputs=CHAT)["choices"][0]["message"]["content"]


def test_own_plugin(url: str) -> None:
    """The plugin's client of a running server lists, gets, predicts one and several, and streams."""
    from mlflow.deployments import get_deploy_client

    client = get_deploy_client(url.replace("http://", "llm://"))
    assert [e["name"] for e in client.list_deployments()] == ["assistant", "embedder"]
    whole = client.predict("assistant", CHAT)["choices"][0]["message"]["content"]
    assert len(client.predict("embedder", [{"input": "a"}, {"input": "b"}])["predictions"]) == 2
    chunks = list(client.predict_stream("assistant", CHAT))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == whole


def test_langchain(url: str) -> None:
    """langchain-openai invokes and streams."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="assistant", temperature=0, max_tokens=16)
    whole = model.invoke(CHAT["messages"][0]["content"])
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(CHAT["messages"][0]["content"])) == whole.content


@pytest.mark.parametrize(
    ("model", "suffix"), [("openai/assistant", "/v1"), ("databricks/assistant", "/serving-endpoints")]
)
def test_litellm(url: str, model: str, suffix: str) -> None:
    """litellm answers whole and streamed through its openai and databricks providers."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    whole = litellm.completion(model=model, api_base=url + suffix, api_key="x", **CHAT)
    assert "Paris" in whole.choices[0].message.content
    chunks = litellm.completion(model=model, api_base=url + suffix, api_key="x", stream=True, **CHAT)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_anthropic_sync(url: str) -> None:
    """anthropic gets messages whole, streamed, prefilled, and of the beta namespace, with tokens as counted."""
    import anthropic

    ask = {"model": "assistant", "max_tokens": 16, "messages": CHAT["messages"], "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="x") as client:
        whole = client.messages.create(**ask)
        text = whole.content[0].text
        assert "Paris" in text
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].text == text
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert streamed.usage.cache_read_input_tokens, "the same prompt came before"
        counted = client.messages.count_tokens(model="assistant", messages=CHAT["messages"]).input_tokens
        assert [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (whole, streamed)] == [counted] * 2
        turns = [*CHAT["messages"], {"role": "assistant", "content": text[: text.index(" Paris")]}]
        assert client.messages.create(**ask | {"messages": turns}).content[0].text.startswith(" Paris")
        assert client.beta.messages.create(**ask, betas=["interleaved-thinking-2025-05-14"]).content[0].text == text
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**ask | {"model": "nobody"})


def test_anthropic_async(url: str) -> None:
    """anthropic's asynchronous client gets several complete streams at once."""
    import anthropic

    async def one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(model="assistant", max_tokens=16, messages=CHAT["messages"]) as stream:
            return await stream.get_final_text()

    async def several() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    assert all(asyncio.run(several()))


def test_anthropic_parse(url: str) -> None:
    """anthropic gets a text that follows a pydantic model, whole and streamed."""
    import anthropic

    class City(pydantic.BaseModel):
        name: str
        country: str

    ask = {"model": "assistant", "max_tokens": 200, "messages": CHAT["messages"], "output_format": City}
    ask |= {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="x") as client:
        assert isinstance(client.messages.parse(**ask).parsed_output, City)
        with client.messages.stream(**ask) as stream:
            assert isinstance(stream.get_final_message().parsed_output, City)


def test_openai_responses(url: str) -> None:
    """openai gets a response whole, streamed, following a pydantic model, and with earlier ones as its input."""
    import openai

    class City(pydantic.BaseModel):
        name: str
        country: str

    question = CHAT["messages"][0]["content"]
    ask = {"model": "assistant", "input": question, "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = client.responses.create(**ask, max_output_tokens=64)
        assert "Paris" in whole.output_text
        with client.responses.stream(**ask, max_output_tokens=64) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert (final.status, final.output_text, text) == (whole.status, whole.output_text, whole.output_text)
        assert final.usage.input_tokens_details.cached_tokens, "the same prompt came before"
        history = [{"role": "user", "content": question}, *whole.output, {"role": "user", "content": "And of Italy?"}]
        assert client.responses.create(**ask | {"input": history}, max_output_tokens=16).output_text
        asked = {**ask, "max_output_tokens": 200, "text_format": City}
        parsed = client.responses.parse(**asked).output_parsed
        assert isinstance(parsed, City)
        with client.responses.stream(**asked) as stream:
            assert stream.get_final_response().output_parsed == parsed
        with pytest.raises(openai.BadRequestError, match="store"):
            client.responses.create(**ask, store=True)


def test_openai_responses_async(url: str) -> None:
    """openai's asynchronous client gets several complete streams at once."""
    import openai

    async def one(client: openai.AsyncOpenAI) -> str:
        ask = {"model": "assistant", "input": CHAT["messages"], "max_output_tokens": 16, "temperature": 0}
        *_, last = [event async for event in await client.responses.create(**ask, stream=True)]
        return last.response.output_text

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]


def test_openai_responses_tools(url: str) -> None:
    """openai gets a tool round, streamed and whole: a requested call that follows its schema, its output, the answer; a
    custom tool's text follows its grammar."""
    import openai

    class Weather(pydantic.BaseModel):
        """The weather in a city."""

        city: str
        unit: Literal["C", "F"]

    tool = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{1,3} (plus|minus) [0-9]{1,3}"}
    ask = {"model": "assistant", "max_output_tokens": 200, "temperature": 0}
    items: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        required = {**ask, "input": items, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        with client.responses.stream(**required) as stream:
            streamed = stream.get_final_response()
        whole = client.responses.create(**required)
        (call,) = (item for item in streamed.output if item.type == "function_call")
        assert [(item.name, item.arguments) for item in whole.output if item.type == "function_call"] == [
            (call.name, call.arguments)
        ]
        assert Weather.model_validate_json(call.arguments)
        assert call.parsed_arguments
        items += [*streamed.output, {"type": "function_call_output", "call_id": call.call_id, "output": "18 C, rain"}]
        answer = client.responses.create(**ask, input=items, tools=[tool], tool_choice="none")
        assert [item.type for item in answer.output] == ["message"]
        custom = {"type": "custom", "name": "calculate", "description": "Calculates a sum.", "format": grammar}
        chosen = {"type": "custom", "name": "calculate"}
        found = client.responses.create(**ask, input="What is 2 plus 3?", tools=[custom], tool_choice=chosen)
        (said,) = (item for item in found.output if item.type == "custom_tool_call")
        assert re.fullmatch("[0-9]{1,3} (plus|minus) [0-9]{1,3}", said.input)
        items = [*found.output, {"type": "custom_tool_call_output", "call_id": said.call_id, "output": "5"}]
        lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "\\"" /[a-z]{1,8}/ "\\n"'}
        held = {**ask, "input": "Say a word.", "tools": [{**custom, "format": lark}], "tool_choice": chosen}
        with client.responses.stream(**held) as stream:
            events = list(stream)
        deltas = "".join(each.delta for each in events if each.type == "response.custom_tool_call_input.delta")
        assert re.fullmatch(r'"[a-z]{1,8}\n', deltas)
        assert [each.input for each in events if each.type == "response.custom_tool_call_input.done"] == [deltas]
        client.responses.create(**ask, input=items, tools=[custom], tool_choice="none")


def test_openai_agents_responses(url: str) -> None:
    """An agent of openai-agents calls its function and answers with its result, streamed and not."""
    import agents
    import openai

    called = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Return the weather in a city."""
        called.append(city)
        return "18 C, rain"

    async def run() -> None:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            agent = agents.Agent(
                name="assistant",
                instructions="Be brief.",
                model=agents.OpenAIResponsesModel("assistant", client),
                model_settings=agents.ModelSettings(
                    temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False
                ),
                tools=[weather],
                tool_use_behavior="run_llm_again",
            )
            whole = await agents.Runner.run(agent, "What is the weather in Paris?", max_turns=4)
            assert len(called) >= 1
            assert whole.final_output
            streamed = agents.Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=4)
            kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
            assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= kinds
            assert streamed.final_output == whole.final_output

    asyncio.run(run())


def test_anthropic_tools(url: str) -> None:
    """anthropic gets a forced call, whole and streamed, sends its result, and runs its tool runner, with tokens as
    counted."""
    import anthropic

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "get_weather", "description": "Weather", "input_schema": schema, "strict": True}]
    turns = [{"role": "user", "content": "What is the weather in Paris?"}]
    more = {"model": "assistant", "tools": tools}
    force = {"tool_choice": {"type": "tool", "name": "get_weather"}, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="x") as client:
        called = client.messages.create(max_tokens=100, messages=turns, **more, **force)
        (call,) = called.content
        assert (call.type, call.name, called.stop_reason) == ("tool_use", "get_weather", "tool_use")
        assert isinstance(call.input["city"], str)
        counted = client.messages.count_tokens(messages=turns, tool_choice=force["tool_choice"], **more).input_tokens
        assert called.usage.input_tokens + called.usage.cache_read_input_tokens == counted
        with client.messages.stream(max_tokens=100, messages=turns, **more, **force) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            streamed = stream.get_final_message()
        assert (len(pieces) > 1, streamed.content[0].input) == (True, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(max_tokens=8, messages=turns, **more)
        assert answer.usage.output_tokens > 0

        cities = []

        @anthropic.beta_tool
        def get_weather(city: str) -> str:
            """Return the weather in a city."""
            cities.append(city)
            return "rain"

        more["tools"] = [get_weather]
        turns = [*turns[:1]]
        runner = client.beta.messages.tool_runner(max_tokens=100, messages=turns, max_iterations=1, **more, **force)
        assert runner.until_done().stop_reason == "tool_use"
        assert [type(city) for city in cities] == [str]


class Report(pydantic.BaseModel):
    city: str
    rain: bool


def test_langchain_responses(url: str) -> None:
    """langchain-openai's Responses model works whole, streamed, with a tool call and with a structured output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    given = {"base_url": f"{url}/v1", "api_key": "x", "model": "assistant", "temperature": 0, "max_tokens": 100}
    model = ChatOpenAI(**given, use_responses_api=True)
    question = CHAT["messages"][0]["content"]
    whole = model.invoke(question)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in model.stream(question)) == whole.text
    assert whole.usage_metadata["input_tokens"] > 0
    assert isinstance(model.with_structured_output(Report, method="json_schema").invoke(question), Report)
    calling = model.bind_tools([Report], tool_choice="required", parallel_tool_calls=False)
    said = calling.invoke(question)
    (call,) = said.tool_calls
    assert Report(**call["args"])
    assert model.invoke([HumanMessage(question), said, ToolMessage("done", tool_call_id=call["id"])]).text


def test_pydantic_ai_responses(url: str) -> None:
    """pydantic-ai's Responses model gets an output type by a tool and by a format, and a function call."""
    import openai
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            model = OpenAIResponsesModel("assistant", provider=OpenAIProvider(openai_client=client))
            settings = {"temperature": 0, "max_tokens": 100}
            for form in (Report, NativeOutput(Report)):
                agent = Agent(model, output_type=form, model_settings=settings)
                assert isinstance((await agent.run("Is it raining in Oslo?")).output, Report)
            plain = Agent(model, model_settings=settings)
            async with plain.run_stream("What is the capital of France?") as stream:
                assert "Paris" in await stream.get_output()

    asyncio.run(run())


def test_canitoolcall(url: str) -> None:
    """canitoolcall's live probe passes wherever a call is forced, whole and streamed.

    Left out: what asks for two calls (a choice forces one or more), what asks for a text word for word, which is the
    model's to write, and what has no room here. So small a model does not end its strings: they have a bound.
    """
    import dataclasses

    from canitoolcall.probe import BUILTIN_SCENARIOS, probe

    left_out = {"parallel-calls", "unicode-args", "nested-args"}
    forced = []
    for each in BUILTIN_SCENARIOS:
        if each.expect.tool_names and each.id not in left_out:
            tools = json.loads(json.dumps(each.tools).replace('"type": "string"', '"type": "string", "maxLength": 24'))
            named = {"type": "function", "function": {"name": each.expect.tool_names[0]}}
            choice = "required" if each.id == "empty-args" else named
            body = {**each.extra_body, "max_tokens": 100}
            forced.append(dataclasses.replace(each, tools=tools, tool_choice=choice, extra_body=body))
    report = probe(f"{url}/v1", "assistant", scenarios=forced, timeout_s=300, concurrency=2)
    assert len(report.outcomes) == 3 * len(forced) == 12
    assert not [(each.scenario_id, each.check, each.detail) for each in report.outcomes if each.status != "pass"]
    warned = {warning for each in report.outcomes for warning in each.warnings}
    assert not {warning for warning in warned if "finish_reason" not in warning}  # a named call ends with stop
