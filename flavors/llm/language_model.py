"""The model as an object for people: ``.chat``, ``.complete``, ``.embed``; answers that print as their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from ...serving.bundle import Bundle
from ...serving.reply import Delta, Done, Ended, Reply, Usage
from ...serving.request import ValidRequest
from ...serving.settings import EngineSettings
from .aio import AsyncLanguageModel
from .answers import Answer, Messages, Vectors, check_streamable, turns_of, vector_of
from .errors import as_mlflow, raises_mlflow
from .session import Session


class TextStream:
    """Pieces of text as they come; ``usage``, ``finish_reason`` and ``text`` once it has ended.

    Leaving a ``with`` early, or ``close``, aborts the request. Only choice 0 is streamed here.
    """

    def __init__(self, session: Session, request: ValidRequest) -> None:
        self._pieces = session.pieces(request)
        self.text = ""
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        with as_mlflow():
            for piece in self._pieces:
                if isinstance(piece, Done):
                    self.usage = piece.usage
                elif isinstance(piece, Ended):
                    self.finish_reason = piece.finish_reason
                elif isinstance(piece, Delta) and piece.text:
                    self.text += piece.text
                    yield piece.text

    def close(self) -> None:
        self._pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TextStream({self.text!r}, {self.finish_reason or 'running'})"


class LanguageModel:
    """A loaded model; use it in a ``with``, ``close`` it, or let go of it: its engine process ends with its last user.

    It can be pickled and copied: a copy is a client of its own, which finds the running engine or starts one.

    Methods take any request field by its name (``max_tokens=64, temperature=0``) and raise an ``InvalidField`` that
    names field, value and what is allowed; all errors are ``MlflowException`` (``errors``). Threads may share one
    object: their requests run in one batch.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings, defaults: Mapping[str, Any] | None = None) -> None:
        self._session = Session(bundle, settings, defaults)

    @classmethod
    def over(cls, session: Session) -> LanguageModel:
        """Another face of a loaded model: closing either closes both."""
        model = cls.__new__(cls)
        model._session = session
        return model

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._session.adapter_names()

    @property
    def tasks(self) -> tuple[str, ...]:
        return self._session.bundle.tasks

    @property
    def settings(self) -> EngineSettings:
        return self._session.settings

    @property
    def aio(self) -> AsyncLanguageModel:
        """The same model for coroutines: ``await model.aio.chat("Hi")``."""
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
        """Answer a conversation, or one user's text. ``stream=True`` gives a ``TextStream``."""
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
        """Continue a text; several prompts give one ``Answer`` with a choice for each."""
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
        """Vectors as float32: ``[dim]`` for one text, ``[n, dim]`` for n. ``stream=True`` yields them one by one."""
        request = self._session.valid({"input": texts, "adapter": adapter, **fields})
        if stream:
            return self._vectors(request)
        reply = self._session.reply(request)
        vectors = np.stack([vector_of(data) for data in reply.vectors])
        return vectors[0] if isinstance(texts, str) else vectors

    def close(self) -> None:
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
        """In the order of the texts: the engine computes them in another."""
        early: dict[int, bytes] = {}
        following = 0
        with as_mlflow(), self._session.pieces(request) as pieces:
            for piece in pieces:
                if not isinstance(piece, Done):
                    early[piece.index] = piece.data
                while following in early:
                    yield vector_of(early.pop(following))
                    following += 1
