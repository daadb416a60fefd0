"""``model.aio``: the object's own answers without a thread per request, aborted with their tasks."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.predict.aio import AsyncPieces, LoopQueue
from mlflow_llm.serving.interface.events import Embedded, Failed
from mlflow_llm.serving.interface.request import Sequence, ValidRequest

FIELDS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=[False, True], ids=["process", "thread"])
def model(request, llama_dir, tmp_path_factory):
    """Load a tiny model with its engine in another process, and on a thread of this one."""
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    with llm.load_model(str(path), in_process=request.param, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def embedder(bert_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("e") / "m"
    llm.save_model(path, bert_dir)
    with llm.load_model(str(path), in_process=True) as loaded:
        yield loaded


def test_answers_are_those_of_the_object(model):
    """Asynchronous chat and completions of several prompts equal the object's, with their usage."""

    async def ask():
        return await asyncio.gather(
            model.aio.chat("Hi", **FIELDS),
            model.aio.complete(["One", "Two"], **FIELDS),
        )

    chat, two = asyncio.run(ask())
    assert chat.text == model.chat("Hi", **FIELDS).text
    assert two.texts == model.complete(["One", "Two"], **FIELDS).texts
    assert (two.usage.completion_tokens, two.finish_reason) == (16, "length")


def test_vectors_are_those_of_the_object(embedder):
    """Asynchronous vectors, single, batched and streamed in order, equal the object's."""
    texts = ["a b c " * 9, "a"] * 9

    async def ask():
        one, many = await asyncio.gather(embedder.aio.embed("a"), embedder.aio.embed(texts))
        return one, many, [vector async for vector in await embedder.aio.embed(texts, stream=True)]

    one, many, streamed = asyncio.run(ask())
    np.testing.assert_allclose(one, embedder.embed("a"), atol=1e-5)
    np.testing.assert_allclose(many, embedder.embed(texts), atol=1e-5)
    np.testing.assert_allclose(np.stack(streamed), many, atol=1e-5)


def test_streams(model):
    """Streamed pieces add up to the whole answer, and leaving a stream early ends it."""

    async def ask():
        async with await model.aio.chat("Hi", stream=True, **FIELDS) as stream:
            pieces = [piece async for piece in stream]
        async with await model.aio.complete("Hi", stream=True, **FIELDS) as early:
            await anext(early)
        left = [piece async for piece in early]
        return stream, pieces, left

    stream, pieces, left = asyncio.run(ask())
    assert "".join(pieces) == stream.text == model.chat("Hi", **FIELDS).text
    assert (stream.usage.completion_tokens, stream.finish_reason, left) == (8, "length", [])


def test_requests_hold_no_threads(model):
    """Forty open streams add only the threads of the loop's executor, which prepares them. (One more may come with
    neighbours that want the CPUs, whatever this process does.)"""

    async def ask():
        streams = [await model.aio.complete("Hi", stream=True, max_tokens=64, ignore_eos=True) for _ in range(40)]
        for stream in streams:
            await anext(stream)
        found = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()} - before
        for stream in streams:
            stream.close()
        return found

    model.complete("Hi", max_tokens=1)
    before = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    assert asyncio.run(ask()) <= {"asyncio", "openmp-crowd"}


def test_errors_are_mlflows(model):
    """A refusal names the field, whole and streamed; a stream of several choices is refused."""

    async def ask():
        with pytest.raises(llm.errors.InvalidField, match="top_p"):
            await model.aio.chat("Hi", top_p=7)
        with pytest.raises(MlflowException, match="messages"):
            await model.aio.chat(5)
        with pytest.raises(llm.errors.NotFound, match="nobody"):
            await model.aio.complete("Hi", adapter="nobody", stream=True)
        with pytest.raises(MlflowException, match="stream: True"):
            await model.aio.chat("Hi", n=2, stream=True)

    asyncio.run(ask())


class FakeEngine:
    """An engine with one request, whose events the test puts."""

    def __init__(self):
        self.closed = False

    def submit(self, request, into):
        self.queue = into
        return self

    def __next__(self):
        return self.queue.get()

    def close(self):
        self.closed = True


REQUEST = ValidRequest(request_id="x", task="embeddings", model="m", sequences=(Sequence(prompt_token_ids=(1,)),) * 2)


def pieces_of(engine):
    return AsyncPieces(SimpleNamespace(engine=engine), REQUEST)


async def settled():
    """Wait until everything that can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_cancelled_task_aborts_its_request():
    """A task cancelled while it waits for an event aborts its request."""
    engine = FakeEngine()

    async def ask():
        task = asyncio.create_task(anext(pieces_of(engine)))
        await settled()
        assert not engine.closed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert engine.closed


def test_a_close_elsewhere_ends_the_wait():
    """A stream closed by another task ends for its reader, which does not wait for ever."""
    engine = FakeEngine()

    async def ask():
        pieces = pieces_of(engine)
        task = asyncio.create_task(anext(pieces, "end"))
        await settled()
        pieces.close()
        return await asyncio.wait_for(task, 60)

    assert asyncio.run(ask()) == "end"
    assert engine.closed


def test_events_of_another_thread_wake_the_reader():
    """Events of another thread arrive once and in order; an error is raised in its place and closes the stream."""
    engine = FakeEngine()

    async def ask():
        pieces = pieces_of(engine)
        task = asyncio.create_task(anext(pieces))
        await settled()
        vector = np.ones(2, "<f4").tobytes()
        threading.Thread(target=engine.queue.put, args=(Embedded(index=1, vector=vector),)).start()
        assert (await asyncio.wait_for(task, 60)).index == 1
        engine.queue.put(Failed(kind="engine_died", message="it ended"))
        with pytest.raises(llm.errors.EngineDied, match="it ended"):
            await anext(pieces)
        assert await anext(pieces, "end") == "end"

    asyncio.run(ask())
    assert engine.closed


def test_a_dropped_stream_is_closed():
    """A stream that is garbage-collected without being read is closed."""
    engine = FakeEngine()

    async def ask():
        pieces_of(engine)

    asyncio.run(ask())
    assert engine.closed


def test_a_queue_outlives_its_loop():
    """An engine that puts an event after the loop has ended raises nothing on its own thread."""

    async def make():
        queue = LoopQueue()
        waiting = asyncio.create_task(queue.wait())
        await settled()
        waiting.cancel()
        return queue

    queue = asyncio.run(make())
    queue.put(Failed(kind="aborted", message="late"))
    assert queue.qsize() == 1


def test_a_late_wake_up_is_ignored():
    """After a wake-up whose event was already read, the reader waits for the next event."""

    async def read() -> str:
        queue = LoopQueue()
        waiting = asyncio.create_task(queue.wait())
        await settled()
        queue.wake()
        await settled()
        assert not waiting.done()
        queue.put(Failed(kind="aborted", message="next"))
        await waiting
        return queue.get().message

    assert asyncio.run(read()) == "next"
