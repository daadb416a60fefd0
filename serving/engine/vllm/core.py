"""vLLM's ``LLMEngine`` as a ``Core``, in this process and on its thread: one vLLM request for each sequence.

::

    add ──► check ──► adapter ──► grammar (compiled beside) ──► one vLLM request a sequence: token ids in
    step ─► masks of grammars ──► LLMEngine.step ──► deltas of token ids ──► StopRule, grammar ──► events

Everything around the core (recovery, metering, drain, standby) is as for our own engine. vLLM is imported when the
core is made: the module itself can be named by processes without it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...interface.bundle import Bundle
from ...interface.engine import AdapterInfo, Capabilities, Client, EngineInfo, EngineOutput, Health
from ...interface.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    PackagingError,
    ServingError,
    ShuttingDown,
    reason,
)
from ...interface.events import Embedded, Event, FinishReason, PromptScored, TokenLogprob
from ...interface.request import POOLED, ValidRequest
from ...interface.settings import EngineSettings
from ..adapters.registry import pinned_adapters
from ..adapters.request_adapters import NoAdapters, RequestAdapters
from ..constraints import grammar_tokenizer
from ..constraints.bitmasks import BitmaskWorker
from ..constraints.grammars import Grammars
from ..constraints.logits_processors import nothing_left
from ..scheduling.inflight import check_queue, failed
from ..scheduling.sequence import NO_ALLOWED_TOKEN
from . import options, shared
from .adapters import VllmAdapters
from .parameters import parameters
from .request_check import check
from .sequences import VllmRequest, VllmSequence

logger = logging.getLogger(__name__)


class VllmCore:
    """A model in vLLM. Not thread-safe: the thread that makes it drives it. Implements ``Core``."""

    backend: ClassVar[str] = "vllm"

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        """Load the model. Raises ``PackagingError`` or ``InvalidField`` if vLLM cannot run it as the settings ask."""
        self.settings, self._own = settings, options.own_settings(settings)
        self._spec = bundle.embedding
        pinned = pinned_adapters(settings, bundle)
        self._llm = _load(bundle, settings)
        shared.is_engine = True
        self.info = _info(self._llm, bundle, settings, self._own)
        self._adapters: RequestAdapters = NoAdapters()
        if self.info.capabilities.adapters:
            rank = self._llm.vllm_config.lora_config.max_lora_rank
            self._adapters = VllmAdapters(self._llm, max_adapters=settings.max_adapters, max_rank=rank, pinned=pinned)
        self._wake: Callable[[], None] = _ignore
        trust = settings.trust_remote_code
        read = partial(grammar_tokenizer.load, bundle, self.info.vocab_size, trust_remote_code=trust)
        self._grammars = Grammars(read, lambda: self._wake())
        self._masks = BitmaskWorker()
        self._requests: dict[str, VllmRequest] = {}
        self._sequences: dict[str, VllmSequence] = {}  # those that vLLM has, by key
        self._of_tenant: Counter[str] = Counter()
        self._outbox: list[EngineOutput] = []
        self._steps = self._generated = self._prefix_hits = self._prefix_queries = self._num_keys = 0
        self._last_step = time.monotonic()
        self._is_closed = False
        for name, path in bundle.adapters.items():
            self.load_adapter(name, path)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: ValidRequest, client: Client = None, *, continues: bool = False) -> None:
        """Accept a request. Nothing is raised: an invalid request gets a ``Failed`` from the next step."""
        try:
            self._check(request, continues)
            self._accept(request, client)
        except ServingError as error:
            self._outbox.append((client, request.request_id, failed(error)))

    def _check(self, request: ValidRequest, continues: bool) -> None:
        if request.request_id in self._requests:
            raise AlreadyExists(f"request {request.request_id} is already running")
        if self._is_closed:
            raise ShuttingDown("the engine is shutting down")
        if not continues:
            check_queue(len(self._requests), self._of_tenant[request.tenant], self.settings.max_queued_requests)
        check(request, self.info, self._own)

    def _accept(self, request: ValidRequest, client: Client) -> None:
        owner = VllmRequest(request, client, self._adapters.claim(request))
        grammar = request.sampling.grammar if request.sampling is not None else None
        try:
            if grammar is not None:
                owner.compilation = self._grammars.ask(request.request_id, grammar)
        except ServingError:
            self._adapters.release(owner.adapter)
            raise
        self._requests[request.request_id] = owner
        self._of_tenant[request.tenant] += 1
        for index in range(len(request.sequences)):
            self._num_keys += 1
            owner.sequences.append(VllmSequence(owner, index, f"s{self._num_keys}", self.info.max_model_len))
        if request.request_id not in self._grammars:
            self._begin(owner)

    def _begin(self, owner: VllmRequest) -> None:
        """Give a request's sequences to vLLM, and end those that were complete when they were resumed."""
        request = owner.request
        for sequence in list(owner.sequences):
            try:
                ended = self._follow_resumed(sequence)
                if ended is None:
                    self._submit(sequence)
            except ServingError as error:
                self._fail(owner, error)
                return
            except Exception as error:
                logger.exception("vLLM refuses request %s", request.request_id)
                self._fail(owner, InternalError(f"vLLM could not take the request ({type(error).__name__})"))
                return
            if ended is not None:
                self._finish(sequence, ended)

    def _follow_resumed(self, sequence: VllmSequence) -> FinishReason | None:
        """Make the state of a sequence's grammar, and return why it ends with what was resumed."""
        if sequence.sampling is None:
            return None
        ended: FinishReason | None = sequence.stop_reason()
        compilation = sequence.owner.compilation
        if compilation is not None:
            sequence.grammar_state = compilation.new_state(sequence.sampling)
            if ended != "stop" and sequence.generated:
                sequence.grammar_state.consume(sequence.generated)
                ended = "stop" if sequence.grammar_state.is_complete else ended
        return ended if sequence.generated or not sequence.wants_scores else None

    def _submit(self, sequence: VllmSequence) -> None:
        request = sequence.owner.request
        first = sequence.index - sequence.index % request.n
        # without a salt only the choices of a prompt share its prefix
        alone = request.cache_salt is None
        salt = f"alone {request.request_id} {first}" if alone else f"shared {request.cache_salt}"
        prompt = {"prompt_token_ids": [*sequence.prompt, *sequence.generated], "cache_salt": salt}
        adapters, lora = self._adapters, None
        if isinstance(adapters, VllmAdapters):
            lora = adapters.lora(sequence.owner.adapter)
        wanted = parameters(sequence, self._own) if sequence.sampling is not None else self._pooling()
        if sequence.grammar_state is not None:
            shared.grammar_states[sequence.key] = sequence.grammar_state
        priority = (request.service_class << 32) + request.priority  # vLLM runs lower numbers first
        self._llm.add_request(sequence.key, prompt, wanted, lora_request=lora, priority=priority)
        self._sequences[sequence.key] = sequence
        sequence.is_running = True

    def _pooling(self) -> Any:
        from vllm import PoolingParams

        return PoolingParams(task="embed", use_activation=False)

    def abort(self, request_id: str) -> None:
        """End a request early. Unknown or finished requests are ignored."""
        owner = self._requests.get(request_id)
        if owner is not None and owner.request.task in POOLED:
            self._fail(owner, Aborted("the request was aborted"))
        elif owner is not None:
            self._finish_all(owner, "abort")

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence, whose text is complete for its caller. The others go on."""
        owner = self._requests.get(request_id)
        if owner is None or owner.request.task in POOLED:
            return
        for sequence in [one for one in owner.sequences if one.index == index]:
            self._finish(sequence, "abort")

    # -- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        if self._outbox or self._sequences:
            return True
        return bool(self._requests) and (self._grammars.is_due or any(map(_is_late, self._requests.values())))

    def on_work(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> list[EngineOutput]:
        """Run one step of vLLM and return what happened."""
        for owner in [one for one in self._requests.values() if _is_late(one)]:
            if owner.request.task in POOLED:
                self._fail(owner, DeadlineExceeded("the time limit passed before the embeddings were computed"))
            else:
                self._finish_all(owner, "deadline")
        if self._grammars:
            self._end_waits()
        self._mask()
        if self._sequences:
            began = time.monotonic()
            outputs = self._llm.step()
            self._steps += 1
            self._last_step = time.monotonic()
            for output in outputs:
                sequence = self._sequences.get(output.request_id)
                if sequence is not None:
                    self._deliver(sequence, output, began, len(outputs))
            self._fail_undrawn()
        events, self._outbox = self._outbox, []
        return events

    def _end_waits(self) -> None:
        """Begin the requests whose grammars are compiled, and fail those whose grammars cannot be."""
        for request_id, error in self._grammars.take():
            owner = self._requests.get(request_id)
            if owner is not None and error is not None:
                self._fail(owner, error)
            elif owner is not None:
                self._begin(owner)

    def _mask(self) -> None:
        """Compute the masks of this step's tokens, and end the texts that their grammars do not let go on."""
        constrained = [one for one in self._sequences.values() if one.grammar_state is not None]
        self._masks.begin([one.grammar_state for one in constrained if one.grammar_state is not None])
        self._masks.end()
        for sequence in constrained:
            state = sequence.grammar_state
            if state is None or sequence.key not in self._sequences:  # a sibling has failed the request
                continue
            try:
                if not state.check():
                    self._finish(sequence, "stop")
            except ServingError as error:
                self._fail_grammar(sequence, error)

    def _deliver(self, sequence: VllmSequence, output: Any, began: float, batch_size: int) -> None:
        """Take what vLLM has for a sequence."""
        if sequence.started_at is None:
            sequence.started_at = began
            self._count_prefix(sequence, output.num_cached_tokens or 0)
        if sequence.sampling is None:
            self._embed(sequence, output.outputs.data)
            return
        if sequence.wants_scores and output.prompt_logprobs:  # a list, filled in the first output alone
            self._score(sequence, output.prompt_logprobs)
        completion = output.outputs[0]
        if sequence.sampling.max_tokens == 0:
            if completion.token_ids:
                self._finish(sequence, "length")
            return
        if sequence.key in shared.failures:
            return
        if self._take(sequence, completion, began, batch_size) and output.finished:
            # vLLM ends a sequence by itself only at its full length, which the stop rule knows; or it has given it up
            self._fail(sequence.owner, InternalError(f"vLLM ended the text: {completion.finish_reason}"))

    def _take(self, sequence: VllmSequence, completion: Any, began: float, batch_size: int) -> bool:
        """Append the tokens of a step; return whether the sequence goes on."""
        request, sampling = sequence.owner.request, sequence.sampling
        assert sampling is not None
        logprobs = completion.logprobs or [None] * len(completion.token_ids)
        for token_id, scores in zip(completion.token_ids, logprobs, strict=True):
            scored = None if scores is None else _logprob(int(token_id), scores, sampling.logprobs or 0)
            self._generated += 1
            try:
                ended = sequence.extend(int(token_id), scored)
            except ServingError as error:
                self._fail_grammar(sequence, error)
                return False
            if request.timings:
                sequence.note_step(began, time.monotonic(), batch_size)
            if ended is not None:
                self._finish(sequence, ended)
                return False
        if not sequence.may_hold:
            self._emit_all(sequence.owner, sequence.flush())
        return True

    def _count_prefix(self, sequence: VllmSequence, num_cached: int) -> None:
        sequence.num_cached = min(num_cached, len(sequence.prompt))
        self._prefix_hits += num_cached
        self._prefix_queries += len(sequence.prompt) + len(sequence.generated)

    def _score(self, sequence: VllmSequence, found: Any) -> None:
        """Report the log probabilities of the prompt's own tokens from the second on."""
        k = sequence.sampling.prompt_logprobs if sequence.sampling is not None else None
        ids = sequence.prompt
        scores = tuple(_logprob(ids[i], found[i], k or 0) for i in range(1, len(ids)))
        self._emit_all(sequence.owner, [PromptScored(sequence.index, scores)])

    def _embed(self, sequence: VllmSequence, data: Any) -> None:
        spec = self._spec
        assert spec is not None
        vector = np.asarray(data.float().cpu(), dtype=np.float32)
        if any(module.kind == "normalize" for module in spec.head):
            vector = _normalized(vector)
        vector = vector[: spec.truncate_dim]
        if spec.normalize:
            vector = _normalized(vector)
        if not np.isfinite(vector).all():
            self._fail(sequence.owner, InternalError("the model produced numbers that are not finite"))
            return
        self._emit_all(sequence.owner, [Embedded(sequence.index, vector.astype("<f4").tobytes())])
        self._leave(sequence)

    def _fail_undrawn(self) -> None:
        """Fail the requests for whose sequences no token could be drawn."""
        for key, token in list(shared.failures.items()):
            sequence = self._sequences.get(key)
            if sequence is None or sequence.sampling is None:
                continue
            if token == NO_ALLOWED_TOKEN:
                self._fail(sequence.owner, nothing_left(sequence.sampling))
            else:
                self._fail(sequence.owner, InternalError("the model produced numbers that are not finite"))
        shared.failures.clear()

    def _fail_grammar(self, sequence: VllmSequence, error: ServingError) -> None:
        """Fail a request that cannot go on within its grammar; the next one compiles the grammar again."""
        if sequence.sampling is not None and sequence.sampling.grammar is not None:
            self._grammars.spoil(sequence.sampling.grammar)
        self._fail(sequence.owner, error)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish_all(self, owner: VllmRequest, why: FinishReason) -> None:
        for sequence in list(owner.sequences):
            self._finish(sequence, why)

    def _finish(self, sequence: VllmSequence, why: FinishReason) -> None:
        self._emit_all(sequence.owner, [*sequence.flush(), sequence.finished(why)])
        self._leave(sequence)

    def _leave(self, sequence: VllmSequence) -> None:
        """Take a sequence out of vLLM and of its request, and forget the request after its last."""
        owner = sequence.owner
        owner.sequences.remove(sequence)
        self._remove([sequence])
        if not owner.sequences:
            self._forget(owner)

    def _fail(self, owner: VllmRequest, error: ServingError) -> None:
        self._remove(owner.sequences)
        owner.sequences = []
        self._forget(owner)
        self._emit_all(owner, [failed(error)])

    def _remove(self, sequences: list[VllmSequence]) -> None:
        running = [one.key for one in sequences if self._sequences.pop(one.key, None) is not None]
        if running:
            self._llm.abort_request(running)
        for one in sequences:  # those that vLLM refused have one too
            shared.grammar_states.pop(one.key, None)

    def _forget(self, owner: VllmRequest) -> None:
        request = owner.request
        del self._requests[request.request_id]
        self._of_tenant[request.tenant] -= 1
        if not self._of_tenant[request.tenant]:
            del self._of_tenant[request.tenant]
        self._grammars.forget(request.request_id)
        self._adapters.release(owner.adapter)

    def _emit_all(self, owner: VllmRequest, events: list[Event]) -> None:
        self._outbox += [(owner.client, owner.request.request_id, event) for event in events]

    # -- adapters and state -----------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        return self._adapters.load(name, path, replace=replace, pinned=pinned)

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        self._adapters.unload(name, at_once=at_once)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._adapters.infos()

    def health(self) -> Health:
        scheduler = self._llm.engine_core.engine_core.scheduler
        running, _ = scheduler.get_request_counts()
        unfinished = len(self._sequences)
        total = _num_kv_tokens(self._llm)
        return Health(
            status="dead" if self._is_closed else "ready",
            steps=self._steps,
            last_step_age=time.monotonic() - self._last_step,
            num_running=min(running, unfinished),
            num_waiting=max(unfinished - running, 0),
            kv_tokens_used=round(scheduler.get_kv_cache_usage() * total),
            kv_tokens_total=total,
            prefix_hit_tokens=self._prefix_hits,
            prefix_query_tokens=self._prefix_queries,
            generated_tokens=self._generated,
            num_tenants_waiting=len(self._of_tenant) if unfinished > running else 0,
        )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if sequences or adapters are unaccounted for."""
        owned = [one for owner in self._requests.values() for one in owner.sequences]
        if {one.key for one in owned if one.is_running} != self._sequences.keys():
            raise RuntimeError(f"{len(owned)} sequences are unfinished, {len(self._sequences)} are in vLLM")
        if shared.grammar_states.keys() - self._sequences.keys():
            raise RuntimeError("grammar states of sequences that have ended are left")
        self._adapters.check_integrity(owner.adapter for owner in self._requests.values() if owner.adapter)

    def close(self) -> list[EngineOutput]:
        """End all requests, free the memory and return the last events."""
        if not self._is_closed:
            self._is_closed = True
            for owner in list(self._requests.values()):
                self._fail(owner, ShuttingDown("the engine is shutting down"))
            self._grammars.close()
            self._masks.close()
            self._llm.engine_core.shutdown()
        events, self._outbox = self._outbox, []
        return events


def _load(bundle: Bundle, settings: EngineSettings) -> Any:
    """Return vLLM's ``LLMEngine`` with the model. Raises ``PackagingError`` and ``InvalidField``."""
    options.set_environment(settings)
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform
    except ImportError as error:
        python = settings.engine_python or "the server's interpreter; engine_python names another"
        raise PackagingError(f"engine: 'vllm' needs vLLM, which cannot be imported in {python}: {error}") from None
    given = options.arguments(bundle, settings, str(current_platform.device_type), options.field_names(EngineArgs))
    try:
        return LLMEngine.from_engine_args(EngineArgs(**given))
    except (ValueError, TypeError, NotImplementedError, OSError) as error:  # pydantic's errors are ValueErrors
        logger.exception("vLLM does not load the model")
        raise PackagingError(f"vLLM cannot load the model: {reason(error)}") from None


def _info(llm: Any, bundle: Bundle, settings: EngineSettings, own: options.VllmSettings) -> EngineInfo:
    import torch
    import vllm

    config = llm.vllm_config
    model = config.model_config
    pooled = bool(POOLED.intersection(bundle.tasks))
    races = own.sampling == "race" and not pooled
    num_kv_tokens = _num_kv_tokens(llm)
    length = int(model.max_model_len)
    width = int(model.get_hidden_size())
    if pooled and bundle.embedding is not None and bundle.embedding.truncate_dim is not None:
        width = min(width, bundle.embedding.truncate_dim)
    # a worker in another process does not see the states of grammars
    sees_grammars = races and config.parallel_config.world_size == 1 and bool(bundle.tokenizer_dir)
    return EngineInfo(
        content_hash=bundle.content_hash,
        tasks=bundle.tasks,
        vocab_size=int(model.get_vocab_size()),
        max_model_len=length,
        max_num_seqs=int(config.scheduler_config.max_num_seqs),
        max_num_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
        max_kv_tokens=min(length, num_kv_tokens) if num_kv_tokens else length,
        embedding_dim=width if pooled else 0,
        hidden_size=0 if pooled else width,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        quantization=str(model.quantization or "none"),
        kernels="vllm",
        kernels_reason=f"vLLM {vllm.__version__}",
        kv_cache_memory=int(config.cache_config.kv_cache_memory_bytes or 0),
        kv_cache_dtype="" if pooled else str(config.cache_config.cache_dtype),
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        backend=VllmCore.backend,
        capabilities=Capabilities(
            resumes=races or pooled,
            adapters=config.lora_config is not None,
            structured_output=sees_grammars,
            provisioned=False,
        ),
    )


def _num_kv_tokens(llm: Any) -> int:
    """Return how many tokens the KV cache holds; 0 for a model without one."""
    cache = llm.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)


def _logprob(token_id: int, scores: Any, k: int) -> TokenLogprob:
    """Return vLLM's scores of one position, by token id, for ``token_id`` and the ``k`` most probable tokens."""
    ranked = sorted(scores.items(), key=lambda item: (item[1].rank or 0, -item[1].logprob))
    return TokenLogprob(token_id, scores[token_id].logprob, tuple((i, one.logprob) for i, one in ranked[:k]))


def _normalized(vector: Any) -> Any:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _is_late(owner: VllmRequest) -> bool:
    deadline = owner.request.deadline
    return deadline is not None and time.monotonic() >= deadline


def _ignore() -> None:
    pass
