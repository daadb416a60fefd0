"""What an engine is made of, put together from a bundle and settings."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from ..bundle import Bundle
from ..errors import PackagingError
from ..request import POOLED
from ..settings import EngineSettings
from .draft_loader import load_draft_model
from .interface import Capabilities, EngineInfo
from .kv_cache import KVCache
from .loader import LoadedModel, load_model, use_threads
from .lora import LoraPool
from .native import library
from .native_decoder import NativeDecoder
from .pooling import transformer_dir
from .runner import ModelForward, Runner, StepForward
from .scheduler import Scheduler
from .slot_cache import SlotKVCache, token_bytes
from .speculation import Speculation
from .stored_weights import settled
from .virtual_tokens import embedding_width

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A generating engine has all but the embedder, an embedding engine only that."""

    info: EngineInfo
    cache: Any = None
    scheduler: Any = None
    runner: Any = None
    lora: Any = None
    embedder: Any = None


def assemble(bundle: Bundle, settings: EngineSettings) -> EngineParts:
    """Load the weights. Raises ``PackagingError`` for what cannot be run as asked."""
    if settings.compile:
        raise PackagingError("compile: True is not allowed; expected False (compiled decoding is not built yet)")
    settings = settled(settings, transformer_dir(bundle.model_dir))
    use_threads(settings)
    for task in POOLED.intersection(bundle.tasks):
        if len(bundle.tasks) > 1:
            raise PackagingError(f"tasks: {', '.join(bundle.tasks)} is not allowed; expected {task} alone or none")
        if settings.draft_model is not None:
            raise PackagingError(f"draft_model: {settings.draft_model} is of no use; expected null: no text is made")
        if settings.kv_cache_dtype != "auto":
            asked = f"kv_cache_dtype: {settings.kv_cache_dtype!r} is not allowed; expected 'auto'"
            raise PackagingError(f"{asked}: nothing is kept of texts that are read once")
        return _pooling_parts(bundle, settings)
    loaded = load_model(bundle, settings)
    memory = free_memory(loaded.device) // 2 if settings.kv_cache_memory is None else settings.kv_cache_memory
    # the native step is so by itself, and keeps its prefixes: they were computed as they would be again
    alone = settings.batch_invariant and loaded.decoder is None
    speculation = _speculation(bundle, loaded, settings, memory)
    cache = make_cache(loaded, settings, memory, prefix_caching=settings.prefix_caching and not alone)
    width = embedding_width(loaded.model)
    lora = LoraPool(loaded.model, loaded.holder)
    info = EngineInfo(
        content_hash=bundle.content_hash,
        tasks=bundle.tasks,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        hidden_size=width,
        max_kv_tokens=min(loaded.max_model_len, cache.num_tokens_total),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        quantization=settings.quantization,
        kernels="torch" if loaded.decoder is None else "native",
        kernels_reason=loaded.kernels_reason,
        instruction_set="" if loaded.decoder is None else library.instruction_set(),
        kv_cache_memory=memory,
        kv_cache_dtype=str(cache.dtype).removeprefix("torch."),
        kv_cache_reason=loaded.kv_cache_reason,
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        max_logits_bytes=settings.max_logits_bytes,
        capabilities=Capabilities(
            structured_output=bool(bundle.tokenizer_dir), beam_search=True, lora_tasks=True, prompt_tables=width > 0
        ),
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        speculation=speculation,
        batch_invariant=alone,
    )
    return EngineParts(
        info, cache, scheduler, Runner(step_forward(loaded, cache, lora), cache, batch_invariant=alone), lora
    )


def _speculation(bundle: Bundle, loaded: LoadedModel, settings: EngineSettings, memory: int) -> Speculation | None:
    """Bitwise the same logits in any batch and chunk are the native step's; others could change a text by drafts."""
    if settings.speculation != "auto" or loaded.decoder is None:
        if settings.draft_model is not None:
            logger.warning("draft_model: %s is not used: %s", settings.draft_model, loaded.kernels_reason)
        return None
    if settings.draft_model is None:
        return Speculation()
    if bundle.draft is None:
        raise PackagingError(f"draft_model: {settings.draft_model} was not found beside this model")
    return Speculation(load_draft_model(bundle, bundle.draft, loaded, settings, memory))


def step_forward(loaded: LoadedModel, cache: KVCache, lora: LoraPool) -> StepForward:
    """How a step is computed: natively where the loaded model can be, else by transformers' code."""
    if loaded.decoder is not None and isinstance(cache, SlotKVCache):
        return NativeDecoder(loaded.decoder, cache, lora)
    return ModelForward(loaded.model, loaded.holder, cache, lora, loaded.device)


def _pooling_parts(bundle: Bundle, settings: EngineSettings) -> EngineParts:
    from . import cross_encoder, embedder

    load = cross_encoder.load_cross_encoder if "score" in bundle.tasks else embedder.load_embedder
    loaded: Any = load(bundle, settings)
    return EngineParts(loaded.info, embedder=loaded)


def make_cache(loaded: LoadedModel, settings: EngineSettings, memory: int, *, prefix_caching: bool) -> KVCache:
    """A cache within ``memory`` bytes."""
    each = token_bytes(loaded.layers, **loaded.kept)
    num_tokens = memory // each
    num_slots = 2 * settings.max_num_seqs
    max_model_len = loaded.max_model_len
    if loaded.device.type != "cpu":  # there a slot takes its whole memory at once
        num_slots = min(num_slots, num_tokens // max_model_len)
    if num_tokens < 1 or num_slots < 1:
        raise PackagingError(f"kv_cache_memory: {memory} bytes is not enough; expected at least {each}")
    make = partial(
        SlotKVCache, loaded.layers, num_tokens=num_tokens, device=loaded.device,
        prefix_caching=prefix_caching, **loaded.kept,
    )  # fmt: skip
    try:
        return make(num_slots=num_slots, max_model_len=max_model_len)
    except OSError as error:
        # A system that counts address space as memory (vm.overcommit_memory=2, ulimit -v) refuses slots that could all
        # grow to the model's whole context: then as many as the budget itself holds.
        longest = min(max_model_len, num_tokens)
        fewer = min(num_slots, num_tokens // longest)
        logger.warning("no address space for %d slots (%s): %d of %d tokens", num_slots, error, fewer, longest)
        try:
            return make(num_slots=fewer, max_model_len=longest)
        except OSError as again:
            raise PackagingError(f"kv_cache_memory: {memory} bytes cannot be had ({again}); set less") from again


def free_memory(device: Any) -> int:
    """Bytes free on the device; for CPU within the limits of the control group too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as most, open(usage) as now:
                free = min(free, int(most.read()) - int(now.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(free, 0)
