"""The object API for coroutines, the asynchronous twin of ``language_model``: ``await model.aio.chat(…)``.

A running request occupies no thread: the engine's client puts its events into a ``LoopQueue``, which wakes the
coroutine that awaits them. The slow work before that (starting the engine, rendering the template, tokenization) runs
on threads of the event loop's executor. Cancelling a task, or closing or dropping a stream, aborts its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from ....serving.interface.events import Event, is_terminal
from ....serving.interface.reply import Piece, Reply, Vector
from ....serving.interface.request import ValidRequest
from ....serving.tasks.reply import embed, generate, score
from ....serving.tasks.reply.pieces import Run
from ..errors import as_mlflow
from .answers import (
    Answer,
    Messages,
    Ranked,
    StreamedText,
    Vectors,
    check_streamable,
    ranked_of,
    scores_of,
    turns_of,
    vector_of,
)
from .session import Session
from .spans import AnswerSpan


class LoopQueue:
    """A queue that any thread may write to, read by one coroutine of the loop that created it.

    When ``wait`` returns, either ``get`` has an event to return at once or the queue was closed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._notify()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and with it the reader
                self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for an event or for ``close``. A wake-up may be for an event that was read already, hence the loop."""
        while not self._events and not self._closed:
            self._waiter = self._loop.create_future()
            try:
                if not self._events and not self._closed:  # check again: only events after this point wake the waiter
                    await self._waiter
            finally:
                self._waiter = None

    def get(self) -> Event:
        return self._events.popleft()

    def qsize(self) -> int:
        return len(self._events)


class AsyncPieces:
    """An asynchronous iterator over the pieces of one reply, ``Done`` last: ``tasks.pieces.Pieces`` for coroutines."""

    def __init__(self, session: Session, request: ValidRequest) -> None:
        self._queue = LoopQueue()
        engine: Any = session.engine
        submitted = score.for_engine(request) if request.task == "score" else request
        self._stream = engine.submit(submitted, self._queue)
        self._run: Run
        if request.task == "score":
            self._run = score.Run(request)
        elif request.task == "embeddings":
            self._run = embed.Run(request)
        else:
            self._run = generate.Run(request, session.connect().text, self._stream)
        self._left = len(request.sequences)
        self._ready: deque[Piece] = deque(self._run.begin())
        self._ended = False

    def __aiter__(self) -> AsyncPieces:
        return self

    async def __anext__(self) -> Piece:
        try:
            with as_mlflow():
                while not self._ready:
                    await self._step()
        except BaseException:  # including StopAsyncIteration: nothing follows
            self.close()
            raise
        return self._ready.popleft()

    async def _step(self) -> None:
        if self._ended:
            raise StopAsyncIteration
        if self._run.is_complete or not self._left:
            self._ended = True
            self._ready.extend(self._run.end())
            return
        await self._queue.wait()
        if self._ended:  # closed meanwhile
            raise StopAsyncIteration
        event = next(self._stream)
        if is_terminal(event):
            self._left -= 1
        self._ready.extend(self._run.feed(event))

    def close(self) -> None:
        """Abort the sequences that are still running. Closing twice is harmless."""
        self._ended = True
        self._stream.close()
        self._queue.close()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()


class AsyncTextStream(StreamedText):
    """A reply as it is generated: ``async for`` yields pieces of its text (one choice).

    ``text`` is the text yielded so far; ``reasoning`` and ``tool_calls`` hold the reasoning and tool calls received so
    far. ``usage`` and ``finish_reason`` are None until the iteration has ended. ``close``, or leaving an ``async with``
    block early, aborts the request. If the request fails, iterating raises its ``MlflowException``.
    """

    def __init__(self, pieces: AsyncPieces, span: AnswerSpan) -> None:
        super().__init__()
        self._pieces = pieces
        self._span = span

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> str:
        try:
            while True:
                piece = await self._pieces.__anext__()
                self._span.see(piece)
                if new := self.take(piece):
                    return new
        except BaseException as error:
            self._span.fail(error)
            raise

    def close(self) -> None:
        self._pieces.close()
        self._span.end()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class AsyncLanguageModel:
    """``LanguageModel`` for coroutines: the same methods, arguments, results and errors, over the same engine.

    Any number of tasks may share one object; their requests run in one batch.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @overload
    async def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: Literal[False] = False, **fields: Any
    ) -> Answer: ...
    @overload
    async def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: Literal[True], **fields: Any
    ) -> AsyncTextStream: ...
    async def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: bool = False, **fields: Any
    ) -> Answer | AsyncTextStream:
        """Answer a conversation, like ``LanguageModel.chat``; ``stream=True`` gives an ``AsyncTextStream``."""
        return await self._generate({"messages": turns_of(messages), "adapter": adapter, **fields}, stream)

    @overload
    async def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: Literal[False] = False, **fields: Any
    ) -> Answer: ...
    @overload
    async def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: Literal[True], **fields: Any
    ) -> AsyncTextStream: ...
    async def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: bool = False, **fields: Any
    ) -> Answer | AsyncTextStream:
        """Continue a text, like ``LanguageModel.complete``; ``stream=True`` gives an ``AsyncTextStream``."""
        return await self._generate({"prompt": prompt, "adapter": adapter, **fields}, stream)

    @overload
    async def embed(
        self, texts: str | list[str], *, adapter: str | None = None, stream: Literal[False] = False, **fields: Any
    ) -> Vectors: ...
    @overload
    async def embed(
        self, texts: str | list[str], *, adapter: str | None = None, stream: Literal[True], **fields: Any
    ) -> AsyncIterator[Vectors]: ...
    async def embed(
        self, texts: str | list[str], *, adapter: str | None = None, stream: bool = False, **fields: Any
    ) -> Vectors | AsyncIterator[Vectors]:
        """Embed texts, like ``LanguageModel.embed``: float32, ``[dim]`` for one text and ``[n, dim]`` for n.

        ``stream=True`` gives an asynchronous iterator over vectors ``[dim]``, in the order of the texts.
        """
        body = {"input": texts, "adapter": adapter, **fields}
        request = await self._valid(body, stream=False)
        if stream:
            return _vectors(AsyncPieces(self._session, request), self._session.answering(request, body))
        reply = await self._reply(request, body)
        vectors = np.stack([vector_of(data) for data in reply.vectors])
        return vectors[0] if isinstance(texts, str) else vectors

    async def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> Any:
        """Score how well texts match, like ``LanguageModel.score``."""
        body = {"text_1": text_1, "text_2": text_2, **fields}
        reply = await self._reply(await self._valid(body, stream=False), body)
        return scores_of(reply, text_1, text_2)

    async def rerank(
        self, query: str, documents: list[str], *, top_n: int | None = None, **fields: Any
    ) -> list[Ranked]:
        """Rank documents by their relevance to ``query``, like ``LanguageModel.rerank``."""
        body = {"query": query, "documents": documents, "top_n": top_n, **fields}
        request = await self._valid(body, stream=False)
        return ranked_of(request, await self._reply(request, body))

    async def close(self) -> None:
        """Release the engine, like ``LanguageModel.close``. Closing either object closes both."""
        await asyncio.to_thread(self._session.close)

    async def __aenter__(self) -> AsyncLanguageModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _generate(self, body: dict[str, Any], stream: bool) -> Answer | AsyncTextStream:
        request = await self._valid(body, stream=stream)
        if stream:
            with as_mlflow():
                check_streamable(request)
            return AsyncTextStream(self._pieces(request), self._session.span_of(request, body))
        reply = await self._reply(request, body)
        return Answer(choices=reply.choices, usage=reply.usage)

    async def _valid(self, body: dict[str, Any], *, stream: bool) -> ValidRequest:
        with as_mlflow():
            return await asyncio.to_thread(self._session.valid, body, stream=stream)

    def _pieces(self, request: ValidRequest) -> AsyncPieces:
        with as_mlflow():
            return AsyncPieces(self._session, request)

    async def _reply(self, request: ValidRequest, asked: Mapping[str, Any]) -> Reply:
        with self._session.answering(request, asked) as span:
            reply = generate.gather([piece async for piece in self._pieces(request)])
            span.took(reply)
            return reply


async def _vectors(pieces: AsyncPieces, traced: AbstractContextManager[AnswerSpan]) -> AsyncIterator[Vectors]:
    """Yield vectors in the order of the texts; the engine may compute them in a different order."""
    early: dict[int, bytes] = {}
    following = 0
    try:
        with traced as span:
            async for piece in pieces:
                span.see(piece)
                if isinstance(piece, Vector):
                    early[piece.index] = piece.data
                while following in early:
                    yield vector_of(early.pop(following))
                    following += 1
    finally:
        pieces.close()
