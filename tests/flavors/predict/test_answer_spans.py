"""Answers within a trace of MLflow are spans with their token usage; without a trace nothing is traced."""

from __future__ import annotations

import asyncio

import mlflow
import pytest

from mlflow_llm.flavors import llm

FIELDS = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
ASKED = {"prompt": "The cat", **FIELDS}
USAGE = "mlflow.chat.tokenUsage"


@pytest.fixture(scope="module")
def path(tmp_path_factory, llama_dir):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    return str(path)


@pytest.fixture
def model(store, path):
    with llm.load_model(path, in_process=True, threads=1) as loaded:
        yield loaded


def traced(work):
    """Run ``work`` in a span of MLflow, and return its result and the spans below, with the whole trace's usage."""
    with mlflow.start_span("caller") as span:
        found = work()
    mlflow.flush_trace_async_logging()
    trace = mlflow.get_trace(span.trace_id)
    return found, [one for one in trace.data.spans if one.parent_id is not None], trace.info.token_usage


def test_an_answer_is_a_span_with_its_tokens(model):
    """A completion shows what was asked and said, by which model, and the trace has its tokens."""
    answer, [span], total = traced(lambda: model.complete("The cat", **FIELDS))
    assert (span.name, span.span_type) == ("completions", "LLM")
    assert span.inputs == ASKED
    assert span.outputs["choices"] == [{"index": 0, "text": answer.text}]
    usage = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": 5, "total_tokens": answer.usage.total_tokens}
    assert span.get_attribute(USAGE) == total == usage
    assert span.get_attribute("mlflow.llm.provider") == "mlflow-llm"
    assert len(span.get_attribute("mlflow_llm.content_hash")) == 64


def test_streams_have_the_tokens_of_whole_answers(model, path):
    """Streams of threads, of coroutines and of ``predict_stream`` have usage and text of the whole answer."""
    whole = model.chat("The cat", **FIELDS)
    loaded = mlflow.pyfunc.load_model(path)

    async def asked():
        return [text async for text in await model.aio.chat("The cat", stream=True, **FIELDS)]

    body = {"messages": [{"role": "user", "content": "The cat"}], **FIELDS}
    for work in (
        lambda: list(model.chat("The cat", stream=True, **FIELDS)),
        lambda: asyncio.run(asked()),
        lambda: list(loaded.predict_stream(body)),
    ):
        _, [span], total = traced(work)
        assert total["total_tokens"] == whole.usage.total_tokens
        [choice] = span.outputs["choices"]
        assert choice["message"]["content"] == whole.text
        assert span.status.status_code == "OK"
    loaded.get_raw_model().close()


def test_each_row_of_a_table_is_a_span(model, path):
    """Rows that are answered side by side are spans of the one caller, and their tokens are summed."""
    loaded = mlflow.pyfunc.load_model(path)
    replies, spans, total = traced(lambda: loaded.predict([ASKED, {**ASKED, "max_tokens": 3}, ASKED]))
    assert sorted(span.get_attribute(USAGE)["output_tokens"] for span in spans) == [3, 5, 5]
    assert total["total_tokens"] == sum(reply["usage"]["total_tokens"] for reply in replies)
    loaded.get_raw_model().close()


def test_a_stream_that_is_left_ends_its_span(model):
    """A stream closed in its midst has a span without tokens, which is no error."""

    def work():
        with model.complete("The cat", stream=True, **FIELDS) as stream:
            return next(iter(stream))

    _, [span], total = traced(work)
    assert span.end_time_ns is not None
    assert (span.get_attribute(USAGE), total) == (None, None)
    assert span.status.status_code != "ERROR"


def test_an_agent_has_the_tokens_of_its_answer(store, path):
    """The trace that MLflow makes of a ResponsesAgent has the usage of its answer."""
    agent = llm.as_responses_agent(path, in_process=True)
    answer = agent.predict({"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 5, "temperature": 0.0})
    mlflow.flush_trace_async_logging()
    trace = mlflow.get_trace(mlflow.get_last_active_trace_id())
    assert trace.info.token_usage["total_tokens"] == answer.usage.total_tokens
    agent.close()


def test_nothing_is_traced_by_itself(model):
    """Without a span of the caller's, no trace is made."""
    model.complete("The cat", **FIELDS)
    mlflow.flush_trace_async_logging()
    assert mlflow.search_traces(return_type="list") == []
