"""Assemble the parts of an engine from a bundle and settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from ..interface.bundle import Bundle
from ..interface.engine import Capabilities, EngineInfo, PagedInfo
from ..interface.errors import PackagingError
from ..interface.settings import EngineSettings
from ..system.main_memory import main_memory
from .adapters.lora import LoraPool
from .adapters.virtual_tokens import embedding_width
from .attention.kv_cache import KVCache
from .attention.paged import chunks, decode, varlen
from .attention.paged.cache import PagedKVCache
from .attention.slot_cache import SlotKVCache, token_bytes
from .attention.slot_table import MAX_SHARED_SLOTS
from .devices import overlap
from .forward.decode_graphs import GraphedForward
from .forward.draft_loader import load_draft_model
from .forward.runner import ModelForward, Runner, StepForward
from .forward.step_size import CudaDevice, cuda_step_size, products_per_token, step_size
from .models.image_encoder import ImageEncoder
from .models.loader import LoadedModel, load_model, use_threads
from .models.native_decoder import NativeDecoder
from .models.pooling import InputEmbedder
from .models.resolved_settings import ResolvedSettings
from .models.sentence_files import transformer_dir
from .models.settings_check import refuse_settings
from .native import library
from .sampling.kernel_trial import try_kernels
from .scheduling.scheduler import Scheduler
from .scheduling.speculation import Speculation
from .weights import fp8
from .weights.stored_weights import quantization_of

logger = logging.getLogger(__name__)
MIN_KV_TOKENS = 64  # of KV that are of any use, where nobody has set how many


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine that generates."""

    info: EngineInfo
    cache: KVCache
    scheduler: Scheduler
    runner: Runner
    lora: LoraPool
    reader: ImageEncoder | None  # of images, if the model reads them
    ahead: GraphedForward | None  # launches steps ahead, if the engine does that


@dataclass(frozen=True, slots=True)
class EmbeddingParts:
    """The part of an engine that embeds texts or scores pairs."""

    info: EngineInfo
    embedder: InputEmbedder


def assemble(bundle: Bundle, settings: EngineSettings) -> EngineParts:
    """Load the weights and assemble an engine that generates. Raises ``PackagingError`` if it cannot run as the
    settings ask."""
    resolved = _prepare(bundle, settings)
    loaded = load_model(bundle, resolved)
    memory = free_memory(loaded.device) // 2 if settings.kv_cache_memory is None else settings.kv_cache_memory
    # the native step is batch-invariant anyway and keeps prefix caching: computing a prefix again gives the same bits
    alone = settings.batch_invariant and loaded.decoder is None
    cache = make_cache(loaded, resolved, memory, prefix_caching=settings.prefix_caching and not alone)
    if settings.kv_cache_memory is None:
        _check_room(cache.num_tokens_total, loaded.max_model_len, memory)
    width = embedding_width(loaded.model)
    if loaded.reader is not None and not width:
        raise PackagingError(f"{type(loaded.model).__name__} is not supported: no vector can stand in for its tokens")
    lora = LoraPool(loaded.model, loaded.holder)
    forward = step_forward(loaded, cache, lora, settings)
    try_kernels(loaded.vocab_size, loaded.dtype, loaded.device)
    num_tokens = settings.max_num_batched_tokens or _step_size(forward, cache, loaded, settings)
    speculation = _speculation(bundle, loaded, settings, memory, num_tokens)
    not_ahead = why_not_ahead(forward, settings)
    ahead = forward if isinstance(forward, GraphedForward) and not not_ahead else None
    info = EngineInfo(
        content_hash=bundle.content_hash,
        tasks=bundle.tasks,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=num_tokens,
        hidden_size=width,
        max_kv_tokens=min(loaded.max_model_len, cache.num_tokens_total),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        quantization=settings.quantization,
        quantization_reason=fp8.reason(settings, loaded.device, loaded.dtype),
        kernels="torch" if loaded.decoder is None else "native",
        kernels_reason=loaded.kernels_reason,
        instruction_set="" if loaded.decoder is None else library.instruction_set(),
        kv_cache_memory=memory,
        kv_cache_dtype=str(cache.dtype).removeprefix("torch."),
        kv_cache_reason=loaded.kv_cache_reason,
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        max_logits_bytes=settings.max_logits_bytes,
        paged=_paged_info(loaded, cache, forward, not_ahead),
        capabilities=Capabilities(
            structured_output=bool(bundle.tokenizer_dir),
            beam_search=True,
            lora_tasks=True,
            prompt_tables=width > 0,
            images=loaded.reader is not None,
        ),
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=num_tokens,
        speculation=speculation,
        batch_invariant=alone,
    )
    runner = Runner(forward, cache, batch_invariant=alone)
    return EngineParts(info, cache, scheduler, runner, lora, loaded.reader, ahead)


def _prepare(bundle: Bundle, settings: EngineSettings) -> ResolvedSettings:
    """Resolve settings, refuse those that do not suit the model or the machine, and set the threads."""
    refuse_settings(settings, bundle.tasks, quantization_of(transformer_dir(bundle.model_dir)))
    resolved = ResolvedSettings.of(settings)
    fp8.refuse(settings, resolved.device)
    use_threads(settings)
    return resolved


def _check_room(num_tokens: int, max_model_len: int, memory: int) -> None:
    """Warn of a KV cache in what memory was free that holds no sequence of ``max_model_len`` tokens. Raises
    ``PackagingError`` if it holds next to nothing."""
    if num_tokens >= max_model_len:
        return
    text = (
        f"the KV cache holds {num_tokens} tokens, less than the model's context of {max_model_len}: half of the free "
        f"memory is {memory / 2**20:.0f} MiB (kv_cache_memory sets more or less)"
    )
    if num_tokens < min(MIN_KV_TOKENS, max_model_len):
        raise PackagingError(text)
    logger.warning(text)


def _speculation(
    bundle: Bundle, loaded: LoadedModel, settings: EngineSettings, memory: int, max_tokens: int
) -> Speculation | None:
    """Return the speculation, which needs the native step: only its logits are bitwise the same in any batch and chunk.
    With other kernels drafts could change a text."""
    if settings.speculation != "auto" or loaded.decoder is None:
        if settings.draft_model is not None:
            logger.warning("draft_model: %s is not used: %s", settings.draft_model, loaded.kernels_reason)
        return None
    if settings.draft_model is None:
        return Speculation()
    if bundle.draft is None:
        raise PackagingError(f"draft_model: {settings.draft_model} was not found beside this model")
    return Speculation(load_draft_model(bundle, bundle.draft, loaded, settings, memory, max_tokens))


@torch.inference_mode()
def step_forward(loaded: LoadedModel, cache: KVCache, lora: LoraPool, settings: EngineSettings) -> StepForward:
    """Choose how a step is computed: natively if the loaded model can be, else by transformers' code. Decode steps of
    the latter over a paged cache are recorded as CUDA graphs."""
    if loaded.decoder is not None and isinstance(cache, SlotKVCache):
        return NativeDecoder(loaded.decoder, cache, lora)
    plain = ModelForward(loaded.model, loaded.holder, cache, lora, loaded.device)
    if isinstance(cache, PagedKVCache) and settings.cuda_graphs == "auto":
        why_not = _why_no_kernel(loaded, cache, decode.why_not)
        most = settings.max_num_seqs
        return GraphedForward(plain, loaded.model, loaded.holder, cache, most, why_not=why_not, lora=lora)
    return plain


def _why_no_kernel(loaded: LoadedModel, cache: PagedKVCache, why_not: Callable[[Any, Any, int], str]) -> str:
    """Return why a kernel of ours does not attend in all layers; empty if it does."""
    heads = int(getattr(loaded.config, "num_attention_heads", None) or 1)
    reasons = (why_not(one.k, one.v, max(heads // one.shape.num_kv_heads, 1)) for one in cache.layers)
    return next(filter(None, reasons), "")


def _step_size(forward: StepForward, cache: KVCache, loaded: LoadedModel, settings: EngineSettings) -> int:
    """Return the max number of tokens of a step if no setting says it."""
    if loaded.device.type == "cuda":
        each = products_per_token(loaded.model, loaded.linears, loaded.config)
        return cuda_step_size(CudaDevice.of(loaded.device), each, loaded.vocab_size)
    return step_size(forward, cache, loaded.vocab_size, settings.max_num_seqs)


def _prefill_by(loaded: LoadedModel, cache: PagedKVCache) -> tuple[Literal["varlen", "triton", "torch"], str]:
    """Return what prompts attend by in all layers, and why not by a kernel."""
    if any(one.shape.shared for one in cache.layers):
        return "torch", "latent attention is computed by torch"
    if all(varlen.is_offered(one.k, one.v, one.shape.key_dim) for one in cache.layers):
        return "varlen", ""
    reason = _why_no_kernel(loaded, cache, chunks.why_not)
    return ("torch" if reason else "triton"), reason


def why_not_ahead(forward: StepForward, settings: EngineSettings) -> str:
    """Return why no step is launched before the tokens of the previous one are read; empty if steps are."""
    if settings.async_scheduling == "none":
        return "the setting async_scheduling is 'none'"
    if settings.batch_invariant:
        return "with batch_invariant each sequence is computed alone"
    if not isinstance(forward, GraphedForward) or not forward.sizes or forward.device.type != "cuda":
        return "decode steps are not captured as CUDA graphs"  # launching other steps waits for the device
    return ""


def _paged_info(loaded: LoadedModel, cache: KVCache, forward: StepForward, not_ahead: str) -> PagedInfo | None:
    if not isinstance(cache, PagedKVCache):
        return None
    reason = _why_no_kernel(loaded, cache, decode.why_not)
    prefill, prefill_reason = _prefill_by(loaded, cache)
    graphs = forward if isinstance(forward, GraphedForward) else None
    not_early = overlap.why_not(loaded.device)
    return PagedInfo(
        kv_block_size=cache.block_size,
        attention="torch" if reason else "triton",
        attention_reason=reason,
        prefill=prefill,
        prefill_reason=prefill_reason,
        cuda_graphs=tuple(graphs.sizes) if graphs else (),
        cuda_graphs_reason=graphs.reason if graphs else "the setting cuda_graphs is 'none'",
        async_scheduling=not not_ahead,
        async_scheduling_reason=not_ahead,
        products=loaded.products.lines,
        products_reason=loaded.products.reason,
        early_launch=not not_early,
        early_launch_reason=not_early,
    )


def assemble_embedding(bundle: Bundle, settings: EngineSettings) -> EmbeddingParts:
    """Load a model that embeds texts or scores pairs. Raises ``PackagingError`` if it cannot run as the settings
    ask."""
    from .models import cross_encoder, embedder

    resolved = _prepare(bundle, settings)
    load = cross_encoder.load_cross_encoder if "score" in bundle.tasks else embedder.load_embedder
    loaded: InputEmbedder = load(bundle, resolved)
    return EmbeddingParts(loaded.info, loaded)


def make_cache(loaded: LoadedModel, resolved: ResolvedSettings, memory: int, *, prefix_caching: bool) -> KVCache:
    """Make a KV cache within ``memory`` bytes. Raises ``PackagingError`` if they are not enough or cannot be had."""
    each = token_bytes(loaded.layers, **loaded.kept)
    num_tokens = memory // each
    by_reference = loaded.decoder is not None
    num_slots = (1 + MAX_SHARED_SLOTS if by_reference else 2) * resolved.settings.max_num_seqs
    max_model_len = loaded.max_model_len
    if resolved.block_size is not None:
        return _in_blocks(loaded, memory, each, resolved.block_size, prefix_caching=prefix_caching)
    if num_tokens < 1 or num_slots < 1:
        raise PackagingError(f"kv_cache_memory: {memory} bytes is not enough; expected at least {each}")
    make = partial(
        SlotKVCache, loaded.layers, num_tokens=num_tokens, device=loaded.device,
        prefix_caching=prefix_caching, by_reference=by_reference, **loaded.kept,
    )  # fmt: skip
    try:
        return make(num_slots=num_slots, max_model_len=max_model_len)
    except OSError as error:
        # A system that counts address space as memory (vm.overcommit_memory=2, ulimit -v) refuses slots that could all
        # grow to the model's whole context. Then make as many slots as the budget itself holds.
        longest = min(max_model_len, num_tokens)
        fewer = min(num_slots, num_tokens // longest)
        text = "not enough address space for %d slots (%s): using %d slots of %d tokens"
        logger.warning(text, num_slots, error, fewer, longest)
        try:
            return make(num_slots=fewer, max_model_len=longest)
        except OSError as again:
            raise PackagingError(f"kv_cache_memory: {memory} bytes cannot be allocated ({again}); set less") from again


def _in_blocks(loaded: LoadedModel, memory: int, each: int, block_size: int, *, prefix_caching: bool) -> PagedKVCache:
    """Make a paged cache. One block of the memory belongs to no sequence (``block_pool.PADDING``)."""
    num_tokens = memory // each - block_size
    if num_tokens < block_size:
        minimum = 2 * block_size * each
        raise PackagingError(f"kv_cache_memory: {memory} bytes is not enough; expected at least {minimum}")
    try:
        return PagedKVCache(
            loaded.layers, num_tokens=num_tokens, max_model_len=loaded.max_model_len, dtype=loaded.kept["dtype"],
            block_size=block_size, device=loaded.device, prefix_caching=prefix_caching,
        )  # fmt: skip
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise PackagingError(f"kv_cache_memory: {memory} bytes cannot be allocated ({error}); set less") from error


def free_memory(device: Any) -> int:
    """Return the bytes free on the device; for the CPU, within the limits of this process (``main_memory``)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # repacking weights left freed memory in torch's cache, which counts as taken
        return int(torch.cuda.mem_get_info(device)[0])
    return main_memory().free
