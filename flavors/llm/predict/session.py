"""A loaded model and its engine: what ``PyfuncModel`` and ``LanguageModel`` have in common."""

from __future__ import annotations

import contextvars
import hashlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import msgspec
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from ....serving.dialects.fields.defaults import defaults_of, own_sampling
from ....serving.dialects.fields.fields import task_of
from ....serving.dialects.fields.label_fields import NO_TRACE, RETURN_TRACE
from ....serving.dialects.openai.mlflow import MlflowDialect
from ....serving.interface.bundle import Bundle
from ....serving.interface.engine import Engine, EngineInfo
from ....serving.interface.errors import Aborted, InvalidField, ServingError, ShuttingDown
from ....serving.interface.reply import Piece, Reply
from ....serving.interface.request import RawRequest, Task, ValidRequest
from ....serving.interface.settings import EngineSettings
from ....serving.model_files import downloads
from ....serving.tasks.cache_salt import CacheSalts
from ....serving.tasks.prepare import Limits, prepare
from ....serving.tasks.prompt.endpoint import EndpointView, Profile
from ....serving.tasks.prompt.text import TextModel
from ....serving.tasks.reply import embed, generate, score
from ..model.bundle_loader import load_bundle
from ..model.names import FLAVOR_NAME
from .spans import AnswerSpan, answering

logger = logging.getLogger(__name__)

NAME = FLAVOR_NAME
T = TypeVar("T")
Watch = Callable[[Iterator[Any], int], Iterator[Any]]


class Session:
    """A client of one model's engine. Thread-safe.

    The engine starts at the first request or ``connect``: a model that is only inspected, for instance while it is
    being logged, starts no engine.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: EngineSettings,
        defaults: Mapping[str, Any] | None = None,
        profile: Profile | None = None,
        *,
        uri: str = "",
        name: str = NAME,
    ) -> None:
        """Keep ``uri``, from which a copy on another host fetches the model ("" if unknown), and the ``name`` that the
        model has in its replies."""
        self.bundle = bundle
        self.name = name
        self.settings = settings
        self.uri = uri
        self._given = dict(defaults or {})
        self._defaults = defaults_of(dict(self._given))
        self._profile = profile or Profile()
        self._dialect = MlflowDialect()
        self._salts = CacheSalts(process_secret())
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._view: EndpointView | None = None
        self._closed = False
        self._drop_files = downloads.hold_for(self, bundle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle so that a copy loads the model itself: engine, threads and locks are not shared."""
        return _rebuilt, (self.bundle, self.settings, self._given, self._profile, self.uri, self.name)

    def connect(self) -> EndpointView:
        """Start the engine if needed and return the endpoint's view.

        Raises ``PackagingError``, ``EngineDied``, ``ShuttingDown``.
        """
        view = self._view
        if view is not None:
            return view
        with self._lock:
            if self._closed:
                raise ShuttingDown("this model was closed")
            if self._view is None:
                text = TextModel(self.bundle, trust_remote_code=self.settings.trust_remote_code)
                self._engine = engine = start_engine(self.bundle, self.settings)
                _log_kernels(engine.info, self.settings)
                self._view = EndpointView(
                    name=self.name,
                    info=engine.info,
                    text=text,
                    adapters=partial(_adapter_names, self.bundle, engine),  # does not reference the session
                    default_adapter=self.bundle.default_adapter,
                    defaults=self._defaults,
                    profile=self._profile,
                    names=None,
                )
            return self._view

    @property
    def engine_key(self) -> str:
        """The key of the engine process of this model and these settings."""
        from ....serving.transport.discovery.launcher import engine_key

        return engine_key(self.bundle, self.settings)

    @property
    def context(self) -> int | None:
        """How many tokens a sequence may have; None as long as no engine has started."""
        return None if self._view is None else self._view.context

    @property
    def engine(self) -> Engine:
        self.connect()
        if self._engine is None:
            raise ShuttingDown("this model was closed")
        return self._engine

    def adapter_names(self) -> tuple[str, ...]:
        """Return the names of the saved adapters and of those added to the running engine since, sorted."""
        return _adapter_names(self.bundle, self._engine)

    def own_sampling(self) -> dict[str, Any]:
        """Return the model's own sampling values, which a chat that sets none gets."""
        return own_sampling(self._defaults)

    def valid(self, body: Mapping[str, Any], *, stream: bool = False) -> ValidRequest:
        """Check a request in MLflow's form. Raises ``RequestError`` naming field, value and what is allowed."""
        asked = {name: value for name, value in body.items() if name != "stream" or value not in (None, False)}
        if stream:
            asked["stream"] = True
        task: Task = task_of(asked, None)
        return self.prepared(self._dialect.read(asked, task))

    def prepared(self, raw: RawRequest) -> ValidRequest:
        """Check a request of any dialect. Raises ``RequestError``."""
        if raw.return_trace:
            raise InvalidField(RETURN_TRACE, True, NO_TRACE)
        view = self.connect()
        salt = self._salts.of("tenant", tenant="", endpoint=NAME)  # one model's callers share its prefixes
        try:
            return prepare(raw, view, Limits(cache_salt=salt))
        except ServingError as error:
            error.name_as_sent(raw.sent_as)
            raise

    def pieces(self, request: ValidRequest) -> Any:
        """Yield the pieces of the reply as they are generated; closing the iterator aborts the request."""
        if request.task == "embeddings":
            return embed.run(self.engine, request)
        if request.task == "score":
            return score.run(self.engine, request)
        return generate.run(self.engine, request, self.connect().text)

    def reply(
        self, request: ValidRequest, stop: threading.Event | None = None, *, asked: Mapping[str, Any] | None = None
    ) -> Reply:
        """Return the whole reply; setting ``stop`` ends it with ``Aborted``. A span shows the request as ``asked``."""
        with self.answering(request, asked) as span, self.pieces(request) as pieces:
            reply = generate.gather(_until(pieces, stop) if stop is not None else pieces)
            span.took(reply)
            return reply

    def answering(
        self, request: ValidRequest, asked: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[AnswerSpan]:
        """Open a span for an answer, which ends with the block (``spans``)."""
        return answering(request, asked, self.bundle.content_hash)

    def span_of(self, request: ValidRequest, asked: Mapping[str, Any]) -> AnswerSpan:
        """Open a span for an answer, for a stream to end."""
        return AnswerSpan(request, asked, self.bundle.content_hash)

    def encode(self, request: ValidRequest, reply: Reply) -> dict[str, Any]:
        return self._dialect.written(request, reply)

    def chunks(self, request: ValidRequest, asked: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield a streamed reply as chunk objects."""
        encoder = self._dialect.stream(request)
        with self.answering(request, asked) as span, self.pieces(request) as pieces:
            for piece in pieces:
                span.see(piece)
                yield from _events(encoder.encode(piece))

    def replies(self, requests: Sequence[ValidRequest], watch: Watch | None = None) -> list[Reply]:
        """Return replies in order. The first error aborts the others and is raised, with its row as ``failed_at``."""
        return self._batch(requests, self.reply, watch)

    def outcomes(self, requests: Sequence[ValidRequest], watch: Watch | None = None) -> list[Reply | ServingError]:
        """Return replies in order; a request that fails has its error in place of a reply."""

        def outcome(request: ValidRequest, stop: threading.Event) -> Reply | ServingError:
            try:
                return self.reply(request, stop)
            except ServingError as error:
                return error

        return self._batch(requests, outcome, watch)

    def _batch(
        self,
        requests: Sequence[ValidRequest],
        ask: Callable[[ValidRequest, threading.Event], T],
        watch: Watch | None,
    ) -> list[T]:
        """Run all requests, as many at a time as the engine runs at once.

        Each request has its own thread to read its events, so that a stop string ends its generation at once.
        """
        stop = threading.Event()
        width = max(1, min(len(requests), self.settings.max_num_seqs))
        with ThreadPoolExecutor(width, thread_name_prefix="mlflow-llm-predict") as pool:
            # each in a copy of this context, in which the caller's span is active
            futures = [pool.submit(contextvars.copy_context().run, ask, request, stop) for request in requests]
            try:
                waited = _in_order(futures)
                return list(waited if watch is None else watch(waited, len(futures)))
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def close(self) -> None:
        """Release the engine; its process ends when it has no other client. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            engine, self._engine, self._view = self._engine, None, None
        if engine is not None:
            engine.close()
        self._drop_files()


def process_secret() -> bytes:
    """Return the secret of cache salts, which a process shares with its workers through multiprocessing's authkey.

    The workers of one ``mlflow models serve`` thus share prefixes, and two servers do not.
    """
    return hashlib.sha256(b"mlflow-llm cache salt" + multiprocessing.current_process().authkey).digest()


def _rebuilt(
    bundle: Bundle, settings: EngineSettings, defaults: dict[str, Any], profile: Profile, uri: str, name: str
) -> Session:
    """Unpickle a session over the same files if they exist, else over those at ``uri``."""
    if missing := [path for path in downloads.paths_of(bundle) if not os.path.isdir(path)]:
        bundle = _fetched(bundle, missing[0], uri)
    return Session(bundle, settings, defaults, profile, uri=uri, name=name)


def _fetched(bundle: Bundle, missing: str, uri: str) -> Bundle:
    """Fetch the model at ``uri``, which must be the same as ``bundle``. Raises ``MlflowException``."""
    if not uri:
        message = (
            f"this copy of a loaded model has no files here: there is no {missing}; load the model where it is used"
        )
        raise MlflowException(message, error_code=RESOURCE_DOES_NOT_EXIST)
    found = load_bundle(uri)
    if found.content_hash != bundle.content_hash:
        message = f"{uri} is no longer the model that was loaded: its content hash is {found.content_hash[:12]}…"
        raise MlflowException(f"{message}, expected {bundle.content_hash[:12]}…", error_code=RESOURCE_DOES_NOT_EXIST)
    return msgspec.structs.replace(found, default_adapter=bundle.default_adapter)


def _adapter_names(bundle: Bundle, engine: Engine | None) -> tuple[str, ...]:
    names = set(bundle.adapters) if engine is None else {a.name for a in engine.adapters()}
    return tuple(sorted(names))


def start_engine(bundle: Bundle, settings: EngineSettings) -> Engine:
    if settings.in_process:
        from ....serving.engine.in_process import InProcessEngine

        return InProcessEngine(bundle, settings)
    from ....serving.transport import connect

    return connect(bundle, settings)


def _log_kernels(info: EngineInfo, settings: EngineSettings) -> None:
    """Log the kernels in use, as a warning if the native ones do not fit the CPU and were not turned off."""
    slow = info.kernels == "torch" and info.device == "cpu" and settings.kernels == "auto"
    logger.log(logging.WARNING if slow else logging.INFO, "kernels: %s", info.kernels_summary)


def _in_order(futures: list[Future[T]]) -> Iterator[T]:
    for row, future in enumerate(futures):
        try:
            yield future.result()
        except Exception as error:
            error.failed_at = row  # type: ignore[attr-defined]
            raise


def _until(pieces: Iterator[Piece], stop: threading.Event) -> Iterator[Piece]:
    for piece in pieces:
        if stop.is_set():
            raise Aborted("another row of this batch failed")
        yield piece


def _events(encoded: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in server-sent events, without ``[DONE]``."""
    for line in encoded.split(b"\n\n"):
        data = line.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield msgspec.json.decode(data)
