"""The engine itself: one thread adds requests, aborts them and takes steps; each step returns what there is to tell.

Every request ends in exactly one way: each of its sequences is ``Finished`` (or ``Embedded``), or it ``Failed``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bundle import Bundle
from ..errors import (
    Aborted,
    AlreadyExists,
    Conflict,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    NotFound,
    Overloaded,
    ServingError,
    ShuttingDown,
)
from ..events import Event, Failed, Finished, FinishReason, PromptScored, TokenLogprob, Tokens
from ..request import ValidRequest
from ..settings import EngineSettings
from .embedding_queue import EmbeddingQueue
from .interface import AdapterInfo, EngineInfo, Health
from .parts import Parts, build
from .sampler import Sampled, sample, score_prompt
from .scheduler import Run
from .sequence import SequenceState

logger = logging.getLogger(__name__)

Client = Hashable
Told = tuple[Client, str, Event]


@dataclass(slots=True)
class Entry:
    """A request the engine has taken on, and its sequences that still run."""

    request: ValidRequest
    client: Client
    unfinished: dict[int, SequenceState] = field(default_factory=dict)


class EngineCore:
    """Not thread-safe: the thread that makes it is the one that calls it (torch's own threads belong to it)."""

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        self.settings = settings
        self._parts: Parts = build(bundle, settings)
        self._scheduler = self._parts.scheduler
        self._runner = self._parts.runner
        self._embeddings = EmbeddingQueue(self._parts.embedder, settings.max_num_batched_tokens)
        self._entries: dict[str, Entry] = {}
        self._told: list[Told] = []
        self._next_id = 0
        self._key_of: dict[str | None, str] = {None: ""}
        self._keys_made = 0
        self._generated = 0
        self._steps = 0
        self._last_step = time.monotonic()
        self._closed = False
        self.info: EngineInfo = self._parts.info
        for name, path in bundle.adapters.items():
            self.load_adapter(name, path)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: ValidRequest, client: Client = None) -> None:
        """Take on a request. What is wrong with it is told by the next step as ``Failed``, never raised."""
        if request.request_id in self._entries:
            error: ServingError = AlreadyExists(f"request {request.request_id} is already running")
            self._told.append((client, request.request_id, _failed(error)))
            return
        try:
            self._check(request)
        except ServingError as error:
            self._told.append((client, request.request_id, _failed(error)))
            return
        entry = self._entries[request.request_id] = Entry(request, client)
        if request.task == "embeddings":
            self._embeddings.add(request)
            return
        now = time.monotonic()
        for index in range(len(request.sequences)):
            sequence = SequenceState(
                request,
                index,
                id=self._next_id,
                key=self._key_of[request.adapter],
                max_tokens=self.info.max_kv_tokens,
                arrived_at=now,
            )
            self._next_id += 1
            entry.unfinished[index] = sequence
            self._scheduler.add(sequence)
        for sequence in list(entry.unfinished.values()):
            reason = sequence.finish_reason()
            if reason is not None:  # resumed at its very end
                self._finish(sequence, reason)

    def _check(self, request: ValidRequest) -> None:
        info = self.info
        if self._closed:
            raise ShuttingDown("the engine is shutting down")
        if len(self._entries) >= self.settings.max_queued_requests:
            raise Overloaded(f"{len(self._entries)} requests are queued already", retry_after=1.0)
        if request.task not in info.tasks and not (request.task != "embeddings" and self._runner is not None):
            raise InvalidField("task", request.task, " or ".join(info.tasks))
        if not request.sequences:
            raise InvalidField("sequences", (), "at least one prompt")
        if request.task != "embeddings" and request.sampling is None:
            raise InvalidField("sampling", None, "sampling parameters")
        if request.adapter not in self._key_of:
            raise NotFound(f"adapter {request.adapter!r} is not loaded", param="adapter")
        for token_id, _ in request.sampling.logit_bias if request.sampling is not None else ():
            if not 0 <= token_id < info.vocab_size:
                raise InvalidField("logit_bias", token_id, f"token ids from 0 to {info.vocab_size - 1}")
        for sequence in request.sequences:
            ids = sequence.prompt_token_ids + sequence.resumed_token_ids
            if not sequence.prompt_token_ids:
                raise InvalidField("prompt", "", "at least one token")
            if max(ids) >= info.vocab_size or min(ids) < 0:
                raise InvalidField("prompt", max(ids), f"token ids from 0 to {info.vocab_size - 1}")
            room = info.max_model_len if request.task == "embeddings" else info.max_kv_tokens
            if len(sequence.prompt_token_ids) > room - (request.task != "embeddings") or len(ids) > room:
                raise ContextTooLong(
                    f"the prompt has {len(ids)} tokens; this model takes at most {room} in all", param="prompt"
                )

    def abort(self, request_id: str) -> None:
        """End a request early; an unknown or finished one is none of our business."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.request.task == "embeddings":
            self._fail(entry, Aborted("the request was aborted"))
        for sequence in list(entry.unfinished.values()):
            self._finish(sequence, "abort")

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence whose text is complete for its caller; the others go on."""
        entry = self._entries.get(request_id)
        if entry is not None and index in entry.unfinished:
            self._finish(entry.unfinished[index], "abort")

    def abort_client(self, client: Client) -> None:
        """A client is gone: end all it asked for."""
        for request_id in [i for i, entry in self._entries.items() if entry.client == client]:
            self.abort(request_id)

    # -- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._told or self._entries)

    @torch.inference_mode()
    def step(self) -> list[Told]:
        """One forward of everything that can run, and one batch of embeddings; returns what there is to tell."""
        self._expire()
        runs = self._scheduler.schedule() if self._scheduler is not None else []
        if runs:
            self._run(runs)
        if self._embeddings:
            self._embed()
        if runs or self._embeddings:
            self._steps += 1
        self._last_step = time.monotonic()
        told, self._told = self._told, []
        return told

    def _run(self, runs: list[Run]) -> None:
        known = [run.sequence.num_tokens for run in runs]
        try:
            self._forward(runs)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(runs))
            if len(runs) == 1:
                self._fail(self._entries[runs[0].sequence.request.request_id], InternalError(_brief(error)))
                return
            # The KV of a run is simply written again: find whose fault it was by running each alone, except those
            # that have got their token already.
            for run, num_tokens in zip(runs, known, strict=True):
                if run.sequence.status == "running" and run.sequence.num_tokens == num_tokens:
                    run.sequence.num_computed = run.start
                    self._run([run])

    def _forward(self, runs: list[Run]) -> None:
        laid_out, logits = self._runner.forward(runs)
        rows: list[int] = []
        sampling: list[SequenceState] = []
        scored: list[tuple[Run, int]] = []
        at = 0
        for run in laid_out:
            sequence = run.sequence
            if sequence.prompt_scores is not None:
                scored.append((run, at))
                at += run.num_tokens
            elif sequence.num_remaining == 0:
                at += 1
            if sequence.num_remaining == 0:
                rows.append(at - 1)
                sampling.append(sequence)
        for run, first in scored:
            self._score(run, logits[first : first + run.num_tokens])
        if sampling:
            chosen = logits if len(rows) == len(logits) else logits[rows]
            for sequence, result in zip(sampling, sample(chosen, sampling), strict=True):
                self._deliver(sequence, result)

    def _score(self, run: Run, logits: Any) -> None:
        sequence = run.sequence
        scores = sequence.prompt_scores
        if scores is None:
            return
        del scores[run.start :]  # of a step that failed and is run again
        scores.extend(score_prompt(logits, run.start, sequence))
        if sequence.num_computed >= sequence.num_prompt:
            sequence.prompt_scores = None
            self._tell(sequence, PromptScored(sequence.index, tuple(scores)))

    def _deliver(self, sequence: SequenceState, result: Sampled) -> None:
        if result.token_id < 0:
            self._parts.cache.wipe(sequence.id)
            logger.error("request %s: logits are not finite", sequence.request.request_id)
            entry = self._entries[sequence.request.request_id]
            self._fail(entry, InternalError("the model produced numbers that are not finite"))
            return
        if sequence.status != "running":  # a sibling failed the request in this very step
            return
        sequence.append(result.token_id)
        self._generated += 1
        sequence.held.append(result)
        reason = sequence.finish_reason()
        if reason is not None:
            self._finish(sequence, reason)
        elif not sequence.may_hold:
            self._tell_held(sequence)

    def _expire(self) -> None:
        now = time.time()
        for entry in list(self._entries.values()):
            deadline = entry.request.deadline
            if deadline is None or now < deadline:
                continue
            if entry.request.task == "embeddings":
                self._fail(entry, DeadlineExceeded("the time limit passed before the embeddings were computed"))
            for sequence in list(entry.unfinished.values()):
                self._finish(sequence, "deadline")

    def _embed(self) -> None:
        batch = self._embeddings.run()
        for request_id, outcome in batch:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if isinstance(outcome, Exception):
                logger.error("embedding request %s failed: %s", request_id, outcome)
                self._fail(entry, InternalError(_brief(outcome)))
                continue
            self._told.append((entry.client, request_id, outcome))
        for request_id in {request_id for request_id, _ in batch}:  # a batch may hold several inputs of a request
            if self._embeddings.is_done(request_id):
                self._entries.pop(request_id, None)

    # -- the exits of a request -------------------------------------------------------------------------------------

    def _tell(self, sequence: SequenceState, event: Event) -> None:
        entry = self._entries[sequence.request.request_id]
        self._told.append((entry.client, entry.request.request_id, event))

    def _tell_held(self, sequence: SequenceState) -> None:
        held, sequence.held = sequence.held, []
        token_ids = tuple(result.token_id for result in held)
        logprobs: tuple[TokenLogprob, ...] = tuple(r.logprob for r in held if r.logprob is not None)
        self._tell(sequence, Tokens(sequence.index, token_ids, logprobs))

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        self._scheduler.finish(sequence)
        if sequence.held:
            self._tell_held(sequence)
        started = sequence.first_step_at or time.monotonic()
        finished = Finished(
            sequence.index,
            reason,
            num_cached_tokens=sequence.num_cached,
            num_generated_tokens=sequence.num_generated,
            queue_time=started - sequence.arrived_at,
        )
        self._tell(sequence, finished)
        entry = self._entries[sequence.request.request_id]
        del entry.unfinished[sequence.index]
        if not entry.unfinished:
            del self._entries[entry.request.request_id]

    def _fail(self, entry: Entry, error: ServingError) -> None:
        for sequence in entry.unfinished.values():
            self._scheduler.finish(sequence, keep=False)
        entry.unfinished.clear()
        self._embeddings.drop(entry.request.request_id)
        del self._entries[entry.request.request_id]
        self._told.append((entry.client, entry.request.request_id, _failed(error)))

    # -- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read a peft directory into the pool. A name already loaded is refused: unload it to replace it."""
        if self._parts.lora is None:
            raise InvalidField("adapter", name, "no adapter: this model takes none")
        if name in self._key_of:
            raise AlreadyExists(f"adapter {name!r} is already loaded", param="adapter")
        info: AdapterInfo = self._parts.lora.load(name, path)
        self._keys_made += 1
        self._key_of[name] = f"{name}#{self._keys_made}"  # KV of an earlier adapter of that name is not this one's
        return info

    def unload_adapter(self, name: str) -> None:
        if name not in self._key_of:
            raise NotFound(f"adapter {name!r} is not loaded", param="adapter")
        if any(entry.request.adapter == name for entry in self._entries.values()):
            raise Conflict(f"adapter {name!r} is in use", param="adapter")
        self._parts.cache.forget(self._key_of.pop(name))
        self._parts.lora.unload(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._parts.lora.infos()) if self._parts.lora is not None else ()

    # -- state ------------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        scheduler, cache = self._scheduler, self._parts.cache
        return Health(
            status="dead" if self._closed else "ready",
            steps=self._steps,
            last_step_age=time.monotonic() - self._last_step,
            num_running=len(scheduler.running) if scheduler else 0,
            num_waiting=(len(scheduler.waiting) if scheduler else 0) + len(self._embeddings),
            kv_tokens_used=cache.num_tokens_used if cache else 0,
            kv_tokens_total=cache.num_tokens_total if cache else 0,
            prefix_hit_tokens=scheduler.prefix_hit_tokens if scheduler else 0,
            prefix_query_tokens=scheduler.prefix_query_tokens if scheduler else 0,
            generated_tokens=self._generated,
        )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` when memory or sequences are unaccounted for."""
        cache = self._parts.cache
        if cache is not None:
            cache.check_integrity()
            running = len(self._scheduler.running)
            unfinished = sum(len(entry.unfinished) for entry in self._entries.values())
            if running + len(self._scheduler.waiting) != unfinished:
                raise RuntimeError(f"{unfinished} sequences are unfinished, {running} run")

    def close(self) -> list[Told]:
        """End every request with ``Failed("shutting_down")`` and give memory back; returns what is still to tell."""
        if not self._closed:
            self._closed = True
            for entry in list(self._entries.values()):
                self._fail(entry, ShuttingDown("the engine is shutting down"))
            if self._parts.cache is not None:
                self._parts.cache.close()
        told, self._told = self._told, []
        return told


def _failed(error: ServingError) -> Failed:
    return Failed(error.kind, error.message, error.param, error.retry_after)


def _brief(error: Exception) -> str:
    return f"the model could not run this request ({type(error).__name__})"
