"""The asynchronous twin of ``language_model.LanguageModel``: ``await model.aio.chat(…)``.

A request holds no thread: its events come from the engine's client through ``LoopQueue``, which wakes the coroutine
that waits for them. Threads of the event loop's executor do what takes long before a request runs: starting the engine,
the template and the tokens. A cancelled task, like a stream that is closed or dropped, aborts its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from ...serving.events import Embedded, Event, Failed, Finished
from ...serving.reply import Delta, Done, Ended, Piece, Reply, Usage, Vector
from ...serving.request import ValidRequest
from ...serving.tasks import embed, generate
from ...serving.tasks.pieces import Run
from .answers import Answer, Messages, Vectors, check_streamable, turns_of, vector_of
from .errors import as_mlflow
from .session import Session


class LoopQueue:
    """Written by any thread, read by one coroutine of the loop it was made on: ``wait`` until there is something, then
    ``get`` does not block. ``close`` ends a wait with nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._tell()

    def close(self) -> None:
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            if not self._events and not self._closed:  # asked behind the waiter: what comes from now on wakes it
                await self._waiter
        finally:
            self._waiter = None

    def get(self) -> Event:
        return self._events.popleft()

    def qsize(self) -> int:
        return len(self._events)


class AsyncPieces:
    """The pieces of one reply as they come, ``Done`` last; what ``tasks.pieces.Pieces`` is to threads."""

    def __init__(self, session: Session, request: ValidRequest) -> None:
        self._queue = LoopQueue()
        engine: Any = session.engine
        self._stream = engine.submit(request, self._queue)
        self._run: Run = (
            embed.Run(request)
            if request.task == "embeddings"
            else generate.Run(request, session.connect().text, self._stream)
        )
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
        except BaseException:  # StopAsyncIteration too: nothing follows
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
        if isinstance(event, Failed | Finished | Embedded):
            self._left -= 1
        self._ready.extend(self._run.feed(event))

    def close(self) -> None:
        """Abort what still runs; harmless when repeated."""
        self._ended = True
        self._stream.close()
        self._queue.close()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()


class AsyncTextStream:
    """Pieces of text as they come (``async for``); ``usage``, ``finish_reason`` and ``text`` once it has ended.

    Leaving an ``async with`` early, or ``close``, aborts the request. Only choice 0 is streamed here.
    """

    def __init__(self, pieces: AsyncPieces) -> None:
        self._pieces = pieces
        self.text = ""
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> str:
        while True:
            piece = await self._pieces.__anext__()
            if isinstance(piece, Done):
                self.usage = piece.usage
            elif isinstance(piece, Ended):
                self.finish_reason = piece.finish_reason
            elif isinstance(piece, Delta) and piece.text:
                self.text += piece.text
                return piece.text

    def close(self) -> None:
        self._pieces.close()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AsyncTextStream({self.text!r}, {self.finish_reason or 'running'})"


class AsyncLanguageModel:
    """``LanguageModel`` for coroutines: the same methods, fields and errors, over the same engine. Any number of tasks
    may share one; their requests run in one batch."""

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
        """Answer a conversation, or one user's text. ``stream=True`` gives an ``AsyncTextStream``."""
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
        """Continue a text; several prompts give one ``Answer`` with a choice for each."""
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
        """Vectors as float32: ``[dim]`` for one text, ``[n, dim]`` for n. ``stream=True`` yields them one by one."""
        request = await self._valid({"input": texts, "adapter": adapter, **fields}, stream=False)
        if stream:
            return _vectors(AsyncPieces(self._session, request))
        reply = await self._reply(request)
        vectors = np.stack([vector_of(data) for data in reply.vectors])
        return vectors[0] if isinstance(texts, str) else vectors

    async def close(self) -> None:
        """As ``LanguageModel.close``: it closes both."""
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
            return AsyncTextStream(self._pieces(request))
        reply = await self._reply(request)
        return Answer(choices=reply.choices, usage=reply.usage)

    async def _valid(self, body: dict[str, Any], *, stream: bool) -> ValidRequest:
        with as_mlflow():
            return await asyncio.to_thread(self._session.valid, body, stream=stream)

    def _pieces(self, request: ValidRequest) -> AsyncPieces:
        with as_mlflow():
            return AsyncPieces(self._session, request)

    async def _reply(self, request: ValidRequest) -> Reply:
        return generate.gather([piece async for piece in self._pieces(request)])


async def _vectors(pieces: AsyncPieces) -> AsyncIterator[Vectors]:
    """In the order of the texts: the engine computes them in another."""
    early: dict[int, bytes] = {}
    following = 0
    try:
        async for piece in pieces:
            if isinstance(piece, Vector):
                early[piece.index] = piece.data
            while following in early:
                yield vector_of(early.pop(following))
                following += 1
    finally:
        pieces.close()
