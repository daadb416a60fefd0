"""The object API: a loaded model with ``chat``, ``complete`` and ``embed``, and streams of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from ....serving.interface.bundle import Bundle
from ....serving.interface.errors import InvalidField
from ....serving.interface.reply import Done, Reply
from ....serving.interface.request import ValidRequest
from ....serving.interface.settings import EngineSettings
from ....serving.system.sizes import readable
from ..errors import as_mlflow, raises_mlflow
from ..model.stored_facts import lineage_lines
from . import html
from .aio import AsyncLanguageModel
from .answers import (
    Answer,
    Comparison,
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

BASE = "base"  # the row of a comparison without an adapter
EXAMPLES = {
    "chat": 'model.chat("Hello", max_tokens=64)',
    "completions": 'model.complete("Once upon a time", max_tokens=64)',
    "embeddings": 'model.embed(["A text"])',
    "score": 'model.rerank("What is a fox?", ["An animal.", "A colour."])',
}


class TextStream(StreamedText):
    """A reply as it is generated: iterating yields pieces of its text (one choice).

    ``text`` is the text yielded so far; ``reasoning`` and ``tool_calls`` hold the reasoning and tool calls received so
    far. ``usage`` and ``finish_reason`` are None until the iteration has ended. ``close``, or leaving a ``with`` block
    early, aborts the request. If the request fails, iterating raises its ``MlflowException``.
    """

    def __init__(self, session: Session, request: ValidRequest, asked: Mapping[str, Any]) -> None:
        super().__init__()
        self._pieces = session.pieces(request)
        self._span = session.span_of(request, asked)

    def __iter__(self) -> Iterator[str]:
        with as_mlflow():
            try:
                for piece in self._pieces:
                    self._span.see(piece)
                    if new := self.take(piece):
                        yield new
            except Exception as error:
                self._span.fail(error)
                raise

    def _ipython_display_(self) -> None:
        """Show the reply as it is generated, when a cell ends with a stream; in a terminal as text."""
        get_ipython = import_module("IPython").get_ipython
        shows: Any = import_module("IPython.display")
        if not hasattr(get_ipython(), "kernel"):
            print(self.text, end="")
            for new in self:
                print(new, end="", flush=True)
            print()
            return
        shown = shows.display(shows.HTML(self._repr_html_()), display_id=True)
        for _ in self:
            shown.update(shows.HTML(self._repr_html_()))
        shown.update(shows.HTML(self._repr_html_()))

    def close(self) -> None:
        self._pieces.close()
        self._span.end()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LanguageModel:
    """A loaded model (the object API): ``chat``, ``complete``, ``embed``, and ``aio`` for coroutines.

    The engine process starts at the first request and ends with its last client: use the object in a ``with`` block,
    ``close`` it, or drop it. A pickled or copied object is a separate client, of the running engine or of a new one.

    Methods take any request field by its name (``max_tokens=64, temperature=0``). For a field that is not allowed they
    raise ``errors.InvalidField``, which names the field, its value and what is allowed. Every error is an
    ``MlflowException`` from ``errors``. Thread-safe: the requests of all threads run in one batch.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings, defaults: Mapping[str, Any] | None = None) -> None:
        self._session = Session(bundle, settings, defaults)

    @classmethod
    def over(cls, session: Session) -> LanguageModel:
        """Create the object API over an existing session. Closing either closes both."""
        model = cls.__new__(cls)
        model._session = session
        return model

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for, sorted."""
        return self._session.adapter_names()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The model's tasks, the main one first: ``chat``, ``completions``, ``embeddings`` or ``score``."""
        return self._session.bundle.tasks

    @property
    def settings(self) -> EngineSettings:
        """The engine settings, including those given to ``load_model``."""
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
            stream: return a ``TextStream`` instead of waiting for the whole ``Answer``.
            fields: any other request field by its name, in OpenAI's form, such as ``max_tokens=64``, ``tools=[…]`` or
                ``response_format={"type": "json_object"}``.

        Raises:
            MlflowException: ``InvalidField`` for a field that is not allowed, ``ContextTooLong`` for too many tokens,
                or another of ``errors``.
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

        Arguments and errors are those of ``chat``, with ``prompt`` instead of ``messages``.
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
            texts: one text, or a list of n.
            adapter: the adapter that embeds; None is the model's default.
            stream: return an iterator over vectors ``[dim]``, in the order of the texts, as they are computed.
            fields: any other request field by its name, such as ``dimensions=256``.

        Returns:
            A float32 array: ``[dim]`` for one text, ``[n, dim]`` for a list of n.

        Raises:
            MlflowException: as ``chat``.
        """
        body = {"input": texts, "adapter": adapter, **fields}
        request = self._session.valid(body)
        if stream:
            return self._vectors(request, body)
        reply = self._session.reply(request, asked=body)
        vectors = np.stack([vector_of(data) for data in reply.vectors])
        return vectors[0] if isinstance(texts, str) else vectors

    @raises_mlflow
    def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> Any:
        """Score how well texts match: a cross-encoder's scores, or the cosine of an embedding model's vectors.

        Args:
            text_1: one text, or a list of n.
            text_2: one text, or a list of n. Each is compared with its counterpart in ``text_1``, or with the only one.
            fields: any other request field by its name, such as ``truncate_prompt_tokens=-1``.

        Returns:
            A float for two texts, a float32 array ``[n]`` for lists.

        Raises:
            MlflowException: as ``chat``.
        """
        body = {"text_1": text_1, "text_2": text_2, **fields}
        reply = self._session.reply(self._session.valid(body), asked=body)
        return scores_of(reply, text_1, text_2)

    @raises_mlflow
    def rerank(self, query: str, documents: list[str], *, top_n: int | None = None, **fields: Any) -> list[Ranked]:
        """Rank documents by their relevance to ``query``, best first, and return the first ``top_n`` (None: all).

        Other arguments and errors are those of ``score``.
        """
        body = {"query": query, "documents": documents, "top_n": top_n, **fields}
        request = self._session.valid(body)
        return ranked_of(request, self._session.reply(request, asked=body))

    @raises_mlflow
    def compare(self, messages: Messages, adapters: Sequence[str | None] | None = None, **fields: Any) -> Comparison:
        """Ask the same of several adapters in one batch.

        Args:
            messages: as for ``chat``; a model without chats takes a text to continue.
            adapters: names of adapters, None for the base. None: the base and every adapter.
            fields: any other request field by its name, such as ``max_tokens=64``.

        Raises:
            MlflowException: as ``chat``.
        """
        names = (None, *self.adapters) if adapters is None else tuple(adapters)
        asked = {"messages": turns_of(messages)} if "chat" in self.tasks else {"prompt": messages}
        # a default adapter would answer for the base
        settled = [name for name in names if name is not None or self._session.bundle.default_adapter is None]
        if len(settled) < len(names):
            raise InvalidField("adapters", None, "names of adapters: this model has a default adapter")
        requests = [self._session.valid({**asked, "adapter": name, **fields}) for name in names]
        replies = self._session.replies(requests)
        answers = (Answer(choices=reply.choices, usage=reply.usage) for reply in replies)
        return Comparison(dict(zip((name or BASE for name in names), answers, strict=True)))

    def close(self) -> None:
        """Release the engine; its process ends when it has no other client. Closing twice is harmless."""
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

    def _repr_html_(self) -> str:
        session = self._session
        facts: list[tuple[str, Any]] = [("Model", session.name), ("Content hash", session.bundle.content_hash[:12])]
        facts += [("Tasks", ", ".join(self.tasks)), ("Adapters", ", ".join(self.adapters) or "none")]
        facts += [(f"Adapter {name}", line) for name, line in lineage_lines(session.bundle.adapters)]
        weights = sum(file.stat().st_size for file in Path(session.bundle.model_dir).rglob("*.safetensors"))
        facts.append(("Weights", readable(weights)))
        if (context := session.context) is not None:
            facts.append(("Context", f"{context:,} tokens"))
        return html.of_model(facts, EXAMPLES[self.tasks[0]])

    @raises_mlflow
    def _generate(self, body: dict[str, Any], stream: bool) -> Answer | TextStream:
        request = self._session.valid(body, stream=stream)
        if stream:
            check_streamable(request)
            return TextStream(self._session, request, body)
        reply: Reply = self._session.reply(request, asked=body)
        return Answer(choices=reply.choices, usage=reply.usage)

    def _vectors(self, request: ValidRequest, asked: Mapping[str, Any]) -> Iterator[Vectors]:
        """Yield vectors in the order of the texts; the engine may compute them in a different order."""
        early: dict[int, bytes] = {}
        following = 0
        with as_mlflow(), self._session.answering(request, asked) as span, self._session.pieces(request) as pieces:
            for piece in pieces:
                span.see(piece)
                if not isinstance(piece, Done):
                    early[piece.index] = piece.data
                while following in early:
                    yield vector_of(early.pop(following))
                    following += 1
