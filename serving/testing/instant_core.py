"""An engine that answers at once and needs no weights: for measuring what lies around an engine, and for its tests.

Every next token is a fixed function of the adapter, the tokens so far and, unless greedy, the seed; an embedding is a
hash of its text. All that the interface promises holds: max_tokens, stop ids, deadlines, n, logprobs, resumed tokens,
adapters, abort. The "weights" are ``instant.json`` in the model directory, the fields of ``InstantModel``.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from msgspec import Struct

from ..engine.requests.request_check import NO_GRAMMARS
from ..interface.bundle import Bundle
from ..interface.constraint import GIVEN
from ..interface.engine import AdapterInfo, Client, EngineInfo, EngineOutput, Health
from ..interface.errors import AlreadyExists, Conflict, InvalidField, NotFound, PackagingError
from ..interface.events import (
    Embedded,
    Failed,
    Finished,
    FinishReason,
    Logits,
    PromptScored,
    StepTiming,
    Timed,
    TokenLogprob,
    Tokens,
)
from ..interface.logits_size import check_logits
from ..interface.request import POOLED, LogitsOf, ValidRequest
from ..interface.settings import EngineSettings, SecondsOrZero
from ..interface.stop_rule import StopReason, StopRule
from ..interface.validated_struct import Checked


class InstantSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that replace those of the model: ``EngineSettings.backend["instant"]``."""

    step_delay: SecondsOrZero | None = None
    load_delay: SecondsOrZero | None = None


class InstantModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``step_delay`` and ``load_delay`` are seconds. A prompt that holds ``poison_token_id`` raises in the step, one
    that holds ``stall_token_id`` stops all progress: the two faults a real model can have. With ``prefix_cache`` a
    prompt that was read before under the same adapter and ``cache_salt`` counts as cached, but for its last token.
    ``ballast`` bytes are held for as long as it runs."""

    vocab_size: int = 1000
    max_model_len: int = 8192
    embedding_dim: int = 16
    step_delay: float = 0.0
    load_delay: float = 0.0
    poison_token_id: int | None = None
    stall_token_id: int | None = None
    prefix_cache: bool = False
    ballast: int = 0


MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """Return one round of splitmix64 over ``state`` and ``value``: uint64 in, uint64 out."""
    z = (state ^ (value * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def digest(token_ids: tuple[int, ...]) -> int:
    """Return 64 bits of a whole prompt, at C's speed: one of a million tokens must not stop the loop."""
    return int.from_bytes(hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest())


class InstantSequence:
    """A prompt and its tokens so far. ``state`` hashes the adapter, the seed unless greedy, and all tokens."""

    __slots__ = (
        "done", "index", "last", "num_cached", "num_generated", "num_resumed", "ready_at", "started_at", "state",
        "stop_rule",
    )  # fmt: skip

    def __init__(self, request: ValidRequest, index: int, max_model_len: int) -> None:
        source = request.sequences[index]
        sampling = request.sampling
        self.stop_rule = StopRule(sampling, max_model_len - len(source.prompt_token_ids)) if sampling else None
        self.index = index
        self.done = False
        self.started_at = 0.0
        self.ready_at: float | None = None  # when it got its last token
        self.num_cached = 0
        self.num_generated = self.num_resumed = len(source.resumed_token_ids)
        greedy = sampling is None or sampling.temperature == 0
        self.state = mix(0 if greedy else source.seed + 1, len(request.adapter or ""))
        for character in request.adapter or "":
            self.state = mix(self.state, ord(character))
        self.state = mix(self.state, digest(source.prompt_token_ids))
        for token_id in source.resumed_token_ids:
            self.state = mix(self.state, token_id)
        # for stop sequences: the last tokens, where there are such
        longest = self.stop_rule.max_run if self.stop_rule is not None else 0
        self.last: deque[int] = deque(source.resumed_token_ids, maxlen=longest)

    def next(self, vocab_size: int) -> int:
        token_id = self.state % vocab_size
        self.state = mix(self.state, token_id)
        self.num_generated += 1
        self.last.append(token_id)
        return token_id

    def stop_reason(self, last: int | None) -> StopReason | None:
        rule = self.stop_rule
        if rule is None:
            return None
        if rule.has_runs and rule.run_ending(tuple(self.last), self.num_generated):
            return "stop"
        return rule.reason(last, self.num_generated)


class _Running:
    __slots__ = ("client", "queued_at", "request", "sequences")

    def __init__(self, request: ValidRequest, client: Client, max_model_len: int) -> None:
        self.request, self.client, self.queued_at = request, client, time.monotonic()
        self.sequences = [InstantSequence(request, index, max_model_len) for index in range(len(request.sequences))]


class InstantCore:
    """One token for every sequence each step, up to ``max_num_seqs`` requests at once. Implements ``Core``."""

    backend: ClassVar[str] = "instant"

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        path = Path(bundle.model_dir) / "instant.json"
        try:
            self.model = msgspec.json.decode(path.read_bytes(), type=InstantModel)
        except (OSError, msgspec.MsgspecError) as error:
            raise PackagingError(f"{path.name}: {error}") from None
        own = msgspec.structs.asdict(settings.of_backend(self.backend, InstantSettings))
        self.model = msgspec.structs.replace(self.model, **{k: v for k, v in own.items() if v is not None})
        time.sleep(self.model.load_delay)
        self._ballast = b"\xff" * self.model.ballast
        self.settings = settings
        self._running: dict[str, _Running] = {}
        self._outbox: list[EngineOutput] = []
        self._read: set[tuple[str | None, str, tuple[int, ...]]] = set()
        self._adapters = {name: AdapterInfo(name=name, rank=1, path=path) for name, path in bundle.adapters.items()}
        self._steps = self._generated = self._generated_provisioned = 0
        self._last_step = time.monotonic()
        length = min(settings.max_model_len or self.model.max_model_len, self.model.max_model_len)
        self.info = EngineInfo(
            content_hash=bundle.content_hash,
            tasks=bundle.tasks,
            vocab_size=self.model.vocab_size,
            max_model_len=length,
            max_num_seqs=settings.max_num_seqs,
            max_kv_tokens=length,
            embedding_dim=self.model.embedding_dim if "embeddings" in bundle.tasks else 0,
            kernels="none",
            max_logits_bytes=settings.max_logits_bytes,
            backend=self.backend,
            pid=os.getpid(),
        )

    def add(self, request: ValidRequest, client: Client, *, continues: bool = False) -> None:
        """Queue a request; what is wrong with it is in a ``Failed`` event of the next step."""
        failure = self._refusal(request, continues)
        if failure is not None:
            self._outbox.append((client, request.request_id, failure))
        else:
            self._running[request.request_id] = _Running(request, client, self.info.max_model_len)

    def _refusal(self, request: ValidRequest, continues: bool) -> Failed | None:
        if request.request_id in self._running:
            return Failed("already_exists", f"request {request.request_id} is running")
        if request.adapter is not None and request.adapter not in self._adapters:
            return Failed("not_found", f"no adapter {request.adapter!r}", "adapter")
        grammar = request.sampling.grammar if request.sampling is not None else None
        if grammar is not None:
            refused = InvalidField(grammar.field, GIVEN, NO_GRAMMARS)
            return Failed(refused.kind, refused.message, refused.param)
        try:
            check_logits(request, self.model.vocab_size, self.settings.max_logits_bytes)
        except InvalidField as refused:
            return Failed(refused.kind, refused.message, refused.param)
        if not continues and len(self._running) >= self.settings.max_queued_requests:
            return Failed("overloaded", "the queue is full", None, 1.0)
        longest = max((len(s.prompt_token_ids) for s in request.sequences), default=0)
        if longest > self.info.max_model_len:
            return Failed("context_too_long", f"the prompt has {longest} tokens, {self.info.max_model_len} are allowed")
        return None

    def abort(self, request_id: str) -> None:
        """End a request: its open sequences get ``Finished(reason="abort")``. Unknown ids are ignored."""
        running = self._running.get(request_id)
        for sequence in running.sequences if running else ():
            self.finish(request_id, sequence.index)

    def finish(self, request_id: str, index: int) -> None:
        running = self._running.get(request_id)
        if running is not None and not running.sequences[index].done:
            self._end(running, running.sequences[index], "abort")
            self._forget_done(running)

    def has_work(self) -> bool:
        return bool(self._running or self._outbox)

    def on_work(self, wake: Callable[[], None]) -> None:
        """Do nothing: all work is done in the steps."""

    def step(self) -> list[EngineOutput]:
        """Return a token for each sequence of the batch."""
        if self.model.step_delay:
            time.sleep(self.model.step_delay)
        batch = [r for r, _ in zip(list(self._running.values()), range(self.settings.max_num_seqs), strict=False)]
        if self._stalled(batch):
            time.sleep(0.01)
            return []
        now = time.monotonic()
        for running in batch:
            if running.request.task in POOLED:
                self._embed(running)
            else:
                self._decode(running, now)
            self._forget_done(running)
        self._steps += 1
        self._last_step = now
        events, self._outbox = self._outbox, []
        return events

    def _stalled(self, batch: list[_Running]) -> bool:
        prompts = [s.prompt_token_ids for r in batch for s in r.request.sequences]
        poison, stall = self.model.poison_token_id, self.model.stall_token_id
        if poison is not None and any(poison in prompt for prompt in prompts):
            raise RuntimeError("poisoned prompt")
        return stall is not None and any(stall in prompt for prompt in prompts)

    def _decode(self, running: _Running, now: float) -> None:
        request, sampling = running.request, running.request.sampling
        if sampling is None:
            self._outbox.append((running.client, request.request_id, Failed("invalid_field", "sampling is missing")))
            self._running.pop(request.request_id)
            return
        late = request.deadline is not None and time.monotonic() > request.deadline
        for sequence in running.sequences:
            if sequence.done:
                continue
            if not sequence.started_at:
                sequence.started_at = now
                sequence.num_cached = self._look_up(request, sequence.index)
                self._score(running, sequence)
            reason: FinishReason | None = "deadline" if late else sequence.stop_reason(None)
            if reason is None:
                token_id = sequence.next(self.model.vocab_size)
                self._generated += 1
                self._generated_provisioned += request.provisioned
                cached = sequence.num_cached if sequence.num_generated == sequence.num_resumed + 1 else None
                if sampling.generation_logits:
                    place = sequence.num_generated - 1
                    self._send_logits(running, sequence.index, "generation", place, (token_id,))
                event = Tokens(sequence.index, (token_id,), self._logprobs(token_id, sampling.logprobs), cached)
                if request.timings:
                    self._time(running, sequence, now)
                self._outbox.append((running.client, request.request_id, event))
                reason = sequence.stop_reason(token_id)
            if reason is not None:
                self._end(running, sequence, reason)

    def _time(self, running: _Running, sequence: InstantSequence, began: float) -> None:
        since, done = sequence.ready_at or running.queued_at, time.monotonic()
        step = StepTiming(began - since, done - since, len(self._running))
        self._outbox.append((running.client, running.request.request_id, Timed(sequence.index, (step,))))
        sequence.ready_at = done

    def _look_up(self, request: ValidRequest, index: int) -> int:
        if not self.model.prefix_cache or request.cache_salt is None:
            return 0
        prompt = request.sequences[index].prompt_token_ids
        place = (request.adapter, request.cache_salt, prompt)
        cached = len(prompt) - 1 if place in self._read else 0
        self._read.add(place)
        return cached

    def _end(self, running: _Running, sequence: InstantSequence, reason: FinishReason) -> None:
        sequence.done = True
        waited = max(sequence.started_at - running.queued_at, 0.0) if sequence.started_at else 0.0
        event = Finished(sequence.index, reason, sequence.num_cached, sequence.num_generated, waited)
        self._outbox.append((running.client, running.request.request_id, event))

    def _forget_done(self, running: _Running) -> None:
        if all(sequence.done for sequence in running.sequences):
            self._running.pop(running.request.request_id, None)

    def _score(self, running: _Running, sequence: InstantSequence) -> None:
        sampling = running.request.sampling
        source = running.request.sequences[sequence.index]
        if sampling is not None and sampling.context_logits:
            first = source.context_logits_from
            following = (*source.prompt_token_ids[first + 1 :], 0)
            if first < len(source.prompt_token_ids):
                self._send_logits(running, sequence.index, "context", first, following)
        if sampling is None or sampling.prompt_logprobs is None:
            return
        scores = [
            score
            for token_id in running.request.sequences[sequence.index].prompt_token_ids[1:]
            for score in self._logprobs(token_id, sampling.prompt_logprobs)
        ]
        event = PromptScored(sequence.index, tuple(scores))
        self._outbox.append((running.client, running.request.request_id, event))

    def _send_logits(self, running: _Running, index: int, of: LogitsOf, start: int, following: tuple[int, ...]) -> None:
        """Send rows that are 1 for the token that follows and 0 for all others."""
        rows = np.zeros((len(following), self.model.vocab_size), dtype="<f4")
        rows[np.arange(len(following)), np.array(following) % self.model.vocab_size] = 1.0
        event = Logits(index, of, start, len(rows), rows.tobytes())
        self._outbox.append((running.client, running.request.request_id, event))

    def _logprobs(self, token_id: int, k: int | None) -> tuple[TokenLogprob, ...]:
        if k is None:
            return ()
        top = tuple(((token_id + rank) % self.model.vocab_size, -float(rank + 1)) for rank in range(k))
        return (TokenLogprob(token_id, -1.0, top),)

    def _embed(self, running: _Running) -> None:
        for sequence in running.sequences:
            if sequence.done:
                continue
            words = [mix(sequence.state, i) / 2**63 - 1.0 for i in range(self.model.embedding_dim)]
            vector = np.array(words, dtype="<f4")
            vector /= np.linalg.norm(vector)
            sequence.done = True
            event = Embedded(sequence.index, vector.tobytes())
            self._outbox.append((running.client, running.request.request_id, event))

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        # nothing is evicted here
        if name in self._adapters and not replace:
            raise AlreadyExists(f"adapter {name!r} is loaded", param="name")
        if not os.path.isdir(path):
            raise InvalidField("path", path, "a directory with a peft adapter")
        self._adapters[name] = AdapterInfo(name=name, rank=1, path=path)
        return self._adapters[name]

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        if name not in self._adapters:
            raise NotFound(f"no adapter {name!r}", param="name")
        if not at_once and any(running.request.adapter == name for running in self._running.values()):
            raise Conflict(f"adapter {name!r} is in use")
        del self._adapters[name]

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._adapters.values())

    def health(self) -> Health:
        running = min(len(self._running), self.settings.max_num_seqs)
        return Health(
            status="ready",
            steps=self._steps,
            last_step_age=time.monotonic() - self._last_step,
            num_running=running,
            num_waiting=len(self._running) - running,
            generated_tokens=self._generated,
            num_provisioned=sum(running.request.provisioned for running in self._running.values()),
            provisioned_tokens=self._generated_provisioned,
        )

    def close(self) -> list[EngineOutput]:
        """End everything; the last events to hand out."""
        outputs, self._outbox = self._outbox, []
        for request_id, running in self._running.items():
            outputs.append((running.client, request_id, Failed("shutting_down", "the engine was closed")))
        self._running.clear()
        return outputs


def write_model(directory: Path, model: InstantModel | None = None) -> Bundle:
    """Write an instant model's files and return its bundle."""
    directory.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.encode(model or InstantModel())
    (directory / "instant.json").write_bytes(data)
    return Bundle(
        content_hash=hashlib.sha256(data).hexdigest(),
        tasks=("chat", "completions", "embeddings"),
        model_dir=str(directory),
        tokenizer_dir=str(directory),
    )
