"""A logged model as MLflow's ResponsesAgent."""

import mlflow
import pytest
from flavor_models import TEMPLATE
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import ResponsesAgent

from mlflow_llm.flavors import llm

ASKED = {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 5, "temperature": 0.0}
NOW = {"type": "function", "name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def agent(tmp_path_factory, llama_dir):
    root = tmp_path_factory.mktemp("agent") / "m"
    llm.save_model(root, llama_dir, chat_template="{% if tools %}<tool_call></tool_call>{% endif %}" + TEMPLATE)
    mlflow.tracing.disable()  # there is no store for them here
    agent = llm.as_responses_agent(str(root), in_process=True)
    yield agent
    agent.close()
    mlflow.tracing.enable()


def test_answers_and_streams(agent):
    """``predict`` gives MLflow's response object and ``predict_stream`` its events, with the same text."""
    assert isinstance(agent, ResponsesAgent)
    answer = agent.predict(ASKED)
    assert answer.usage.output_tokens == 5
    events = list(agent.predict_stream(ASKED))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert [part["text"] for item in answer.output for part in item.content] == [text]


def test_a_conversation_with_tools(agent):
    """Forced calls are output items, whose results are input of the next request."""
    asked = {**ASKED, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    [item] = [item.model_dump(exclude_none=True) for item in agent.predict(asked).output]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "now", "{}")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "noon"}
    again = agent.predict({**ASKED, "input": [*ASKED["input"], item, result], "tools": [NOW]})
    assert again.usage.input_tokens > 0


def test_further_fields(agent):
    """``custom_inputs`` are request fields, and an unknown one is refused by name."""
    first, second = (agent.predict({**ASKED, "temperature": 1.0, "custom_inputs": {"seed": 7}}) for _ in range(2))
    assert first.output[0].content == second.output[0].content
    with pytest.raises(MlflowException, match="sede"):
        agent.predict({**ASKED, "custom_inputs": {"sede": 7}})
    with pytest.raises(MlflowException, match="store"):
        list(agent.predict_stream({**ASKED, "store": True}))
