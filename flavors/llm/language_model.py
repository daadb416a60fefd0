"""The object API: a loaded model with ``chat``, ``complete`` and ``embed``, and streams of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from ...serving.bundle import Bundle
from ...serving.reply import Done, Reply
from ...serving.request import ValidRequest
from ...serving.settings import EngineSettings
from .aio import AsyncLanguageModel
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
from .errors import as_mlflow, raises_mlflow
from .session import Session


class TextStream(StreamedText):
    """A reply as it is generated: iterating yields pieces of its text (one choice).

    ``text`` is what has been yielded so far, ``reasoning`` and ``tool_calls`` what was said beside it; ``usage`` and
    ``finish_reason`` are set when the iteration has ended, None before. ``close``, or leaving a ``with`` early, aborts
    the request. Iterating raises the ``MlflowException`` that the request fails with.
    """

    def __init__(self, session: Session, request: ValidRequest) -> None:
        super().__init__()
        self._pieces = session.pieces(request)

    def __iter__(self) -> Iterator[str]:
        with as_mlflow():
            for piece in self._pieces:
                if new := self.take(piece):
                    yield new

    def close(self) -> None:
        self._pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LanguageModel:
    """A loaded model, the object API: ``chat``, ``complete``, ``embed``, and ``aio`` for coroutines.

    Its engine process starts at the first request and ends with its last client: use the object in a ``with``,
    ``close`` it, or drop it. A pickled or copied object is a client of its own, of the running engine or of a new one.

    Methods take any request field by its name (``max_tokens=64, temperature=0``). They raise ``errors.InvalidField``,
    which names field, value and what is allowed; every error is a ``MlflowException`` of ``errors``. Thread-safe: the
    requests of all threads run in one batch.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings, defaults: Mapping[str, Any] | None = None) -> None:
        self._session = Session(bundle, settings, defaults)

    @classmethod
    def over(cls, session: Session) -> LanguageModel:
        """The object API over a session that exists: closing either closes both."""
        model = cls.__new__(cls)
        model._session = session
        return model

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for, sorted."""
        return self._session.adapter_names()

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model can do, its first task first: of ``chat``, ``completions``, ``embeddings`` and
        ``score``."""
        return self._session.bundle.tasks

    @property
    def settings(self) -> EngineSettings:
        """The engine settings, with those given to ``load_model``."""
        return self._session.settings

    @property
    def aio(self) -> AsyncLanguageModel:
        """The same model for coroutines: ``await model.aio.chat("Hi")``. Closing either closes both."""
        return AsyncLanguageModel(self._session)

    @overload
    def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: Literal[False] = False, **fields: Any
    ) -> Answer: ...
    @overload
    def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: Literal[True], **fields: Any
    ) -> TextStream: ...
    def chat(
        self, messages: Messages, *, adapter: str | None = None, stream: bool = False, **fields: Any
    ) -> Answer | TextStream:
        """Answer a conversation.

        Args:
            messages: messages in OpenAI's form (``[{"role": "user", "content": "Hi"}]``), or the user's text.
            adapter: the adapter that answers; None is the model's default.
            stream: give a ``TextStream`` instead of waiting for the whole ``Answer``.
            fields: any other request field by its name, such as ``max_tokens=64``, ``tools=[…]`` or
                ``response_format={"type": "json_object"}``, in OpenAI's form.

        Raises:
            MlflowException: ``InvalidField`` for a field that is not allowed, ``ContextTooLong`` for too many tokens,
                others of ``errors``.
        """
        return self._generate({"messages": turns_of(messages), "adapter": adapter, **fields}, stream)

    @overload
    def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: Literal[False] = False, **fields: Any
    ) -> Answer: ...
    @overload
    def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: Literal[True], **fields: Any
    ) -> TextStream: ...
    def complete(
        self, prompt: str | list[str], *, adapter: str | None = None, stream: bool = False, **fields: Any
    ) -> Answer | TextStream:
        """Continue a text. Several prompts give one ``Answer`` with a choice for each, in order.

        Arguments and errors are those of ``chat``, with ``prompt`` for ``messages``.
        """
        return self._generate({"prompt": prompt, "adapter": adapter, **fields}, stream)

    @raises_mlflow
    def embed(
        self,
        texts: str | list[str],
        *,
        adapter: str | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Embed texts.

        Args:
            texts: one text, or n of them.
            adapter: the adapter that embeds; None is the model's default.
            stream: give an iterator over vectors ``[dim]``, in the order of the texts, as they are computed.
            fields: any other request field by its name, such as ``dimensions=256``.

        Returns:
            A float32 array: ``[dim]`` for one text, ``[n, dim]`` for a list of n.

        Raises:
            MlflowException: as ``chat``.
        """
        request = self._session.valid({"input": texts, "adapter": adapter, **fields})
        if stream:
            return self._vectors(request)
        reply = self._session.reply(request)
        vectors = np.stack([vector_of(data) for data in reply.vectors])
        return vectors[0] if isinstance(texts, str) else vectors

    @raises_mlflow
    def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> Any:
        """How well texts fit each other: a cross-encoder's scores, or the cosine of an embedding model's vectors.

        Args:
            text_1: one text, or n of them.
            text_2: one text, or n: each is compared with its own of ``text_1``, or with the only one.
            fields: any other request field by its name, such as ``truncate_prompt_tokens=-1``.

        Returns:
            A float for two texts, a float32 array ``[n]`` for lists.

        Raises:
            MlflowException: as ``chat``.
        """
        reply = self._session.reply(self._session.valid({"text_1": text_1, "text_2": text_2, **fields}))
        return scores_of(reply, text_1, text_2)

    @raises_mlflow
    def rerank(self, query: str, documents: list[str], *, top_n: int | None = None, **fields: Any) -> list[Ranked]:
        """Documents in the order of their relevance to ``query``, best first, ``top_n`` of them.

        Arguments and errors are those of ``score``.
        """
        request = self._session.valid({"query": query, "documents": documents, "top_n": top_n, **fields})
        return ranked_of(request, self._session.reply(request))

    def close(self) -> None:
        """Give the engine up; its process ends when it has no other client. Closing twice is harmless."""
        self._session.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        bundle = self._session.bundle
        adapters = f", adapters {', '.join(self.adapters)}" if self.adapters else ""
        return f"LanguageModel({', '.join(bundle.tasks)}{adapters}, {bundle.content_hash[:12]})"

    @raises_mlflow
    def _generate(self, body: dict[str, Any], stream: bool) -> Answer | TextStream:
        request = self._session.valid(body, stream=stream)
        if stream:
            check_streamable(request)
            return TextStream(self._session, request)
        reply: Reply = self._session.reply(request)
        return Answer(choices=reply.choices, usage=reply.usage)

    def _vectors(self, request: ValidRequest) -> Iterator[Vectors]:
        """Vectors in the order of the texts; the engine computes them in another."""
        early: dict[int, bytes] = {}
        following = 0
        with as_mlflow(), self._session.pieces(request) as pieces:
            for piece in pieces:
                if not isinstance(piece, Done):
                    early[piece.index] = piece.data
                while following in early:
                    yield vector_of(early.pop(following))
                    following += 1
