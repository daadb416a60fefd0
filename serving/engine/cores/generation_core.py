"""The core of models that generate: each step schedules chunks of sequences, runs one forward and samples.

Every request ends in exactly one way: either each of its sequences is ``Finished``, or the request has ``Failed``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

import msgspec
import torch

from ...interface.bundle import Bundle
from ...interface.constraint import Grammar
from ...interface.engine import Client, EngineInfo, EngineOutput, Health
from ...interface.errors import ServingError
from ...interface.events import Finished
from ...interface.request import LoraTask, ValidRequest
from ...interface.settings import EngineSettings
from ..adapters.registry import AdapterRegistry, adapter_host_memory
from ..adapters.request_adapters import RequestAdapters
from ..adapters.virtual_tokens import Table, table_of
from ..assembly import assemble
from ..attention.kv_cache import PrefixKey
from ..beams.beam_group import BeamGroup
from ..constraints import grammar_tokenizer
from ..constraints.bitmasks import BitmaskWorker
from ..constraints.grammars import TEXTS, Grammars
from ..constraints.logits_processors import LogitsProcessors
from ..forward.async_scheduling import AsyncScheduling
from ..requests.delivery import Delivery
from ..requests.finisher import RequestFinisher
from ..requests.image_features import ImageFeatureCache
from ..requests.request_check import check_beams, with_learned_prompt
from ..sampling.device_sampler import DeviceSampler
from ..scheduling.inflight import InflightRequest
from ..scheduling.prerequisites import Prerequisites
from ..scheduling.scheduler import ScheduledChunk
from ..scheduling.sequence import SequenceGroup, SequenceState
from .engine_core import EngineCore, model_failure

logger = logging.getLogger(__name__)


class GenerationCore(EngineCore, pooled=False):
    """A core with a KV cache, whose requests have sequences. Not thread-safe."""

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        super().__init__(bundle, settings)
        parts = self.parts
        self.image_features = ImageFeatureCache(
            parts.reader, budget=settings.encoder_cache, width=self.info.hidden_size, first_id=self.info.vocab_size
        )
        self._wake: Callable[[], None] = _ignore
        trust = settings.trust_remote_code
        read = partial(grammar_tokenizer.load, bundle, self.info.vocab_size, trust_remote_code=trust)
        self.masks = BitmaskWorker()
        self.grammars = Grammars(read, lambda: self._wake())
        scheduler, cache = parts.scheduler, parts.cache
        self.finisher = RequestFinisher(self.inflight, scheduler, cache, self.grammars)
        sampler = DeviceSampler()
        self._delivery = Delivery(self.inflight, scheduler, cache, self.finisher, self._add_member, sampler)
        self.ahead = AsyncScheduling(parts.ahead, scheduler, cache, sampler)
        self._next_id = 0
        self._goes_on = False

    def _load(self, bundle: Bundle, pinned: Collection[str]) -> tuple[EngineInfo, RequestAdapters]:
        settings = self.settings
        self.parts = parts = assemble(bundle, settings)
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._registry = AdapterRegistry(
            parts.lora,
            parts.cache,
            max_adapters=settings.max_adapters,
            budget=settings.adapter_memory,
            host_budget=adapter_host_memory(settings, parts.lora),
            pinned=pinned,
        )
        return parts.info, self._registry

    # -- requests ---------------------------------------------------------------------------------------------------

    def _check(self, request: ValidRequest, continues: bool) -> None:
        super()._check(request, continues)
        if request.sampling is not None and request.sampling.beams is not None:
            cache = self.parts.cache
            check_beams(request, self.info, cache.num_tokens_total, cache.block_size)

    def _accept(self, request: ValidRequest, client: Client) -> None:
        table = None
        if request.prompt_table is not None:
            table = table_of(request.prompt_table, self.info.hidden_size, self.info.vocab_size)
        adapter = self.request_adapters.claim(request)
        if request.lora_task is not None:  # its weights are the pool's now
            task = LoraTask(task_id=request.lora_task.task_id)
            request = msgspec.structs.replace(request, lora_task=task)
        if request.images:
            request, table = self.image_features.ask(request)
        inflight = self.inflight.add(request, client, adapter)
        num_learned = 0
        try:
            learned = self._registry.learned_prompt(adapter)
            if learned is not None:
                num_learned, table = len(learned.vectors), learned
                request = with_learned_prompt(request, num_learned, self.info)
            grammar = _to_compile(request)
            compilation = None if grammar is None else self.grammars.ask(request.request_id, grammar)
        except ServingError as error:
            self.inflight.fail(inflight, error)
            return
        if table is not None:
            inflight.has_table = True
            self._runner.num_tables += 1
        inflight.groups = self._groups(request, adapter, table)
        for group in inflight.groups if num_learned else ():
            group.num_learned = num_learned
        inflight.prerequisites = Prerequisites(
            images=request.request_id in self.image_features,
            grammar=request.request_id in self.grammars,
            compilation=compilation,
        )
        for sequence in inflight.unfinished:
            sequence.waits_for = inflight.prerequisites.wait_reason
            self._scheduler.add(sequence)
        if inflight.prerequisites.are_met:
            self.begin(inflight)

    def _proceed(self, inflight: InflightRequest) -> None:
        """Begin a request if the prerequisite that has been met was the last, or let it wait for the next."""
        if inflight.prerequisites.are_met:
            self.begin(inflight)
        else:
            for sequence in inflight.unfinished:
                sequence.waits_for = inflight.prerequisites.wait_reason

    def begin(self, inflight: InflightRequest) -> None:
        """Let the sequences run, each within its grammar if it has one. End those that were complete when resumed."""
        compilation = inflight.prerequisites.compilation
        for sequence in inflight.unfinished:
            reason = sequence.stop_reason()
            self._scheduler.unblock(sequence)
            if compilation is not None:
                beams = sequence.group.beams
                if isinstance(beams, BeamGroup):
                    beams.read_texts(compilation.tokenizer)
            if compilation is not None and sequence.sampling.grammar is not None:
                sequence.grammar_state = compilation.new_state(sequence.sampling)
                try:
                    reason = self._delivery.follow(sequence, sequence.num_prompt, reason)
                except ServingError as error:
                    self.finisher.fail_grammar(sequence, error)
                    return
            # already complete, or nothing is to be generated; but the prompt may still have to be scored
            if reason is not None and (sequence.num_generated or not sequence.reads_prompt):
                self.finisher.finish(sequence, reason)

    def _groups(self, request: ValidRequest, adapter: str, table: Table | None) -> list[SequenceGroup]:
        """Make a group for each prompt, with its ``n`` choices."""
        assert request.sampling is not None, "check_request refuses it"
        # without a salt only the request's own choices share a prefix: no other request has the same first id
        salt = f"alone-{self._next_id}" if request.cache_salt is None else request.cache_salt
        key = PrefixKey(adapter, f"{salt} {table.digest}" if table is not None and table.digest else salt)
        now = time.monotonic()
        groups = []
        beams, processors = request.sampling.beams, LogitsProcessors.of(request.sampling)
        length = self.info.max_kv_tokens
        for index in range(len(request.sequences)):
            if index % request.n == 0:
                groups.append(
                    SequenceGroup(request, request.sampling, key, length, now, processors=processors, table=table)
                )
            if beams is None or index % request.n == 0:
                self._add_member(groups[-1], index)
        if beams is not None:
            for group in groups:
                first = group.members[0]
                group.beams = BeamGroup(group, first, beams, list(range(first.index, first.index + request.n)))
        return groups

    def _add_member(self, group: SequenceGroup, index: int) -> SequenceState:
        self._next_id += 1
        return group.add(index, self._next_id - 1)

    def _ended(self, inflight: InflightRequest) -> None:
        super()._ended(inflight)
        self.image_features.forget(inflight.request.request_id)
        if inflight.has_table:
            self._runner.num_tables -= 1

    def _expire(self, inflight: InflightRequest) -> None:
        for sequence in inflight.unfinished:
            self.finisher.finish(sequence, "deadline")

    def _fail(self, inflight: InflightRequest, error: ServingError) -> None:
        self.finisher.fail(inflight, error)

    def abort(self, request_id: str) -> None:
        """End a request early: its sequences get ``Finished("abort")``. Unknown or finished requests are ignored."""
        inflight = self.inflight.get(request_id)
        if inflight is None:
            return
        for sequence in inflight.unfinished:
            self.finisher.finish(sequence, "abort")

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence, whose text is complete for its caller. The others go on."""
        inflight = self.inflight.get(request_id)
        sequence = inflight.find(index) if inflight is not None else None
        if sequence is not None:
            self.finisher.finish(sequence, "abort")
        elif inflight is not None:
            self._give_up(inflight, index)

    def _give_up(self, inflight: InflightRequest, index: int) -> None:
        """Give up one text of a beam search. The search ends with the last text that is wanted."""
        for group in inflight.groups:
            beams = group.beams
            if not isinstance(beams, BeamGroup) or index not in beams.indexes:
                continue
            if len(beams.indexes) == 1:
                self.finisher.finish(group.members[0], "abort")
                return
            beams.indexes.remove(index)
            self.inflight.emit(inflight, Finished(index, "abort", num_cached_tokens=group.members[0].num_cached))

    # -- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        if self.inflight.has_outputs or len(self.inflight) > len(self.grammars) or self.image_features:
            return True
        return bool(self.inflight) and (self.grammars.is_due or self._is_late())

    @property
    def waits(self) -> bool:
        """Return whether a request waits for its grammar, even if there is no other work."""
        return bool(self.grammars)

    def on_work(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Run one forward of everything that can run, and read a piece of an image; return the events so far."""
        # If there was more to do, the step began at the end of the previous one: its time includes the messages read
        # since then.
        began = self._last_step if self._goes_on else time.monotonic()
        self._expire_late()
        if self.grammars:
            self._end_waits()
        launched = self.ahead.launched
        runs = launched or self._scheduler.schedule()
        if runs:
            self.run_step(runs, self._forward_ahead if launched or self.ahead.takes(runs) else self.forward_step)
            self._scheduler.record_step_time(runs, time.monotonic() - began)
        reads = bool(self.image_features) and self.image_features.may_read(beside=self._scheduler.highest_class)
        if reads:
            self._read_images()
        if runs or reads:
            self._steps += 1
        self._contention.look()
        self._last_step = time.monotonic()
        self._goes_on = bool(runs) and self._scheduler.has_work()
        return self.inflight.drain()

    def run_step(self, runs: list[ScheduledChunk], forward: Callable[[list[ScheduledChunk]], None]) -> None:
        known = [run.sequence.num_tokens for run in runs]
        try:
            forward(runs)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(runs))
            self.ahead.drop()
            if len(runs) == 1:
                self.finisher.fail(self.inflight.of(runs[0].sequence), model_failure(error))
                return
            # The KV of a run can be written again, so find the request at fault by running each alone, except those
            # that already have their token.
            for run, num_tokens in zip(runs, known, strict=True):
                if run.sequence.status == "running" and run.sequence.num_tokens == num_tokens:
                    run.sequence.num_computed = run.start
                    self.run_step([run], self.forward_step)

    def _forward_ahead(self, runs: list[ScheduledChunk]) -> None:
        """Launch the step after ``runs`` if it is certain, then deliver the results of ``runs``."""
        began = time.monotonic()
        wanted, sampled = self.ahead.step(runs)
        self._delivery.process_sampled(wanted, sampled, began)

    def forward_step(self, runs: list[ScheduledChunk]) -> None:
        """Run the forward, and deliver its results."""
        began = time.monotonic()
        constrained = [run.sequence for run in runs if run.sequence.grammar_state is not None and run.sample_positions]
        if constrained:
            self.masks.begin([one.grammar_state for one in constrained if one.grammar_state is not None])
        try:
            laid_out, logits = self._runner.forward(runs)
        finally:
            if constrained:
                self.masks.end()
        alone = [sequence for sequence in constrained if sequence.group.beams is None]
        over = self._delivery.end_complete(alone) if alone else frozenset()
        self._delivery.process_outputs(laid_out, logits, over, began)

    def _end_waits(self) -> None:
        """Begin the requests whose grammars are compiled, and fail those whose grammars cannot be compiled."""
        for request_id, error in self.grammars.take():
            inflight = self.inflight.get(request_id)
            if inflight is None:
                continue
            if error is not None:
                self.finisher.fail(inflight, error)
            else:
                inflight.prerequisites.grammar = False
                self._proceed(inflight)

    def _read_images(self) -> None:
        """Read a piece of an image. Begin the requests whose images are all read, if their grammars are compiled."""
        for request_id, error in self.image_features.read():
            inflight = self.inflight.get(request_id)
            if inflight is None:
                continue
            if error is not None:
                self.finisher.fail(inflight, model_failure(error))
            else:
                inflight.prerequisites.images = False
                self._proceed(inflight)

    def _is_late(self) -> bool:
        now = time.monotonic()
        return any(one.request.deadline is not None and now >= one.request.deadline for one in self.inflight)

    # -- state ------------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        scheduler, cache = self._scheduler, self.parts.cache
        speculation = scheduler.speculation
        return msgspec.structs.replace(
            super().health(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_tokens_used=cache.num_tokens_used,
            kv_tokens_total=cache.num_tokens_total,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            draft_tokens=speculation.num_proposed if speculation else 0,
            accepted_tokens=speculation.num_taken if speculation else 0,
            generated_tokens=self.finisher.generated,
            num_provisioned=scheduler.num_provisioned,
            provisioned_tokens=self.finisher.generated_provisioned,
            provisioned_prompt_tokens=scheduler.provisioned_prompt_tokens,
            num_tenants_waiting=scheduler.waiting.num_tenants,
        )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if memory or sequences are unaccounted for."""
        super().check_integrity()
        self.parts.cache.check_integrity()
        self.ahead.check_integrity()
        running = len(self._scheduler.running)
        unfinished = sum(len(inflight.unfinished) for inflight in self.inflight)
        if running + len(self._scheduler.waiting) + len(self._scheduler.blocked) != unfinished:
            raise RuntimeError(f"{unfinished} sequences are unfinished, {running} run")

    def _free(self) -> None:
        self.ahead.drop()
        self.grammars.close()
        self.masks.close()
        self.parts.cache.close()


def _ignore() -> None:
    pass


def _to_compile(request: ValidRequest) -> Grammar | None:
    """Return the grammar of a request, or its stand-in for the stop strings of a beam search; None if it needs
    neither."""
    sampling = request.sampling
    if sampling is None or sampling.grammar is not None:
        return None if sampling is None else sampling.grammar
    return TEXTS if sampling.beams is not None and request.stop else None
