"""Loads a bundle's model and makes it ready for the engine, or refuses it and says what the engine cannot do."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from ...interface.bundle import Bundle
from ...interface.errors import PackagingError
from ...interface.settings import EngineSettings
from ...system import load_steps
from ...system.cpus import num_threads
from ..attention import attention, latent_attention
from ..attention.kv_cache import LayerShape, Row
from ..attention.slot_cache import BF16_LAYOUT, INT8_LAYOUT, SlotKVCache
from ..devices import openmp
from ..native import library
from ..native.library import NotNative
from ..weights import few_rows, fp8, input_factors, linear, stored_weights
from ..weights.config_bounds import in_proportion, refuse_unscaled
from ..weights.forward_context import ContextHolder
from .fused import experts as fused_experts
from .fused import modules as fused_modules
from .fused import rotary as fused_rotary
from .image_encoder import ImageEncoder, check_decoder, decoder_of
from .native_decoder import DecoderWeights, NativeDecoder, decoder_weights, may_run_in_bf16
from .packed.cache import MappedDecoder, keep_decoder, packed_key
from .packed.source import PackedSource
from .resolved_settings import ResolvedSettings
from .step_input import StepInput
from .verification import LayerUse, SelfTest, model_forward, probe_layers

logger = logging.getLogger(__name__)

KNOWN_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense", None}
POOLER = re.compile(r"(^|\.)pooler\.")
MISSING_SHOWN = 5
LENGTH_BOUND_ROPE = {"dynamic", "longrope"}  # rope types whose frequencies depend on a batch's longest sequence


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for the engine.

    ``layers`` are the KV shapes found by running the model, ``linears`` what ``linear.install`` returned. ``decoder``
    has the weights of a native step; if None, ``kernels_reason`` says why. ``kept`` has the arguments that say how the
    KV cache stores keys and values. ``kv_cache_reason`` says why a latent attention keeps whole ones. ``reader`` reads
    images, None if the model does not. ``products`` says which products of few rows are computed by our kernels."""

    model: Any
    config: Any
    holder: ContextHolder
    layers: Sequence[LayerShape]
    linears: Any
    decoder: DecoderWeights | None
    kernels_reason: str
    dtype: Any
    device: Any
    max_model_len: int
    vocab_size: int
    kept: Mapping[str, Any]
    kv_cache_reason: str = ""
    reader: ImageEncoder | None = None
    products: few_rows.Report = few_rows.NOT_TIMED


def use_threads(settings: EngineSettings) -> None:
    """Set the threads of torch and of our own kernels in this process: as the settings say, or else OMP_NUM_THREADS, or
    else one per physical core, within affinity and the control groups' quota."""
    threads = settings.threads or num_threads()
    torch.set_num_threads(threads)
    openmp.waiting.set_brief(True)  # until it is known how the model runs
    library.use_threads(threads)


@torch.inference_mode()
def load_model(bundle: Bundle, settings: EngineSettings | ResolvedSettings) -> LoadedModel:
    """Load ``bundle.model_dir`` (safetensors only). Raises ``PackagingError`` if it cannot be run correctly."""
    resolved = ResolvedSettings.of(settings)
    if bundle.images is not None:
        return _load_with_images(bundle, resolved)
    key = packed_key("decoder", bundle, resolved)
    if key is not None and (mapped := _mapped(key, bundle, resolved)) is not None:
        return mapped
    keep_as = None if key is None else (key, PackedSource(bundle))

    def read() -> Any:
        return from_pretrained(AutoModelForCausalLM, bundle.model_dir, resolved)

    return _load_read(read, resolved, keep_as)


def _load_read(
    read: Callable[[], Any], resolved: ResolvedSettings, keep_as: tuple[str, PackedSource] | None
) -> LoadedModel:
    """Make the model that ``read`` reads ready, in bfloat16 by our kernels if that is what the settings ask for."""
    model = read()
    kernels = resolved.settings.kernels
    if resolved.dtype != torch.bfloat16 or kernels != "auto" or not may_run_in_bf16(model, resolved.device):
        return _load(model, resolved, keep_as)
    try:
        return _load(model.float(), resolved, keep_as)
    except NotNative as error:  # its own code is to run it in bfloat16; the loaded model is float32, so read again
        reason = str(error)
        logger.warning("%s is not run natively in bfloat16: %s", type(model).__name__, reason)
    return replace(_load(read(), resolved, keep_as), kernels_reason=reason)


def _load_with_images(bundle: Bundle, resolved: ResolvedSettings) -> LoadedModel:
    """Load a vision-language model: its decoder like any other, and what reads images."""
    readers = []

    def read() -> Any:
        model = from_pretrained(AutoModelForImageTextToText, bundle.model_dir, resolved).eval()
        decoder, reader = decoder_of(model), ImageEncoder(model, bundle)
        check_decoder(model, decoder, reader)
        reader.give_up_decoder()
        readers.append(reader.to(resolved.device, resolved.settings.kernels))
        return decoder

    loaded = _load_read(read, resolved, None)
    return replace(loaded, reader=readers[-1])


def _load(model: Any, resolved: ResolvedSettings, keep_as: tuple[str, PackedSource] | None) -> LoadedModel:
    """Make the model that transformers has read ready for the engine, and keep it packed under ``keep_as``.

    A float32 model, if the settings ask for bfloat16, is to be run in bfloat16 by our kernels. Raises ``NotNative`` if
    they cannot, and ``PackagingError``."""
    settings = resolved.settings
    model = model.to(resolved.device).eval()
    model.requires_grad_(False)
    rounded = settings.dtype == "bfloat16"
    config = model.config.get_text_config()
    refuse_unsupported(model, config)
    max_model_len = resolve_max_model_len(config, settings)
    test = SelfTest.of(model, vocab_size=vocab_size(model), max_model_len=max_model_len, block_size=resolved.block_size)
    is_stored = any(stored_weights.stored_of(module) is not None for module in model.modules())
    if settings.quantization == "int8" and not is_stored:
        began = time.monotonic()
        input_factors.measure(model)
        logger.info("the inputs of int8 linears were measured in %.1f s", time.monotonic() - began)
    holder = ContextHolder()
    attention.install(model, holder)
    model.set_attn_implementation(attention.NAME)
    latent, why_whole = latent_attention.install(model)
    try:
        uses = _uses(model, holder, config, test)
    except (PackagingError, RuntimeError) as error:
        if not latent or isinstance(error, torch.OutOfMemoryError):
            raise
        latent_attention.remove(model)
        latent, why_whole = [], str(error)
        uses = _uses(model, holder, config, test)
    if why_whole:
        logger.warning("%s keeps whole keys and values, not the latent ones: %s", type(model).__name__, why_whole)
    layers = [use.shape for use in uses]
    like = next(model.parameters())
    fused_modules.install(model)
    fused_experts.install(model, in_fp8=settings.quantization == "fp8" and not is_stored)
    fused_rotary.install(model)
    linears = linear.install(model, holder, settings, plain=latent)
    products = few_rows.install(linears, settings, resolved.device, resolved.dtype)
    load_steps.report("testing")
    test.check(model_forward(model, holder), layers, like, int8=settings.quantization != "none", rounded=rounded)
    if settings.quantization == "fp8":
        with fp8.all_rows_are_many():
            test.check(model_forward(model, holder), layers, like, int8=True)
    decoder, reason, kept = native_decoder(model, uses, test, like, settings)
    if rounded and decoder is None and like.dtype == torch.float32:
        raise NotNative(reason)
    if keep_as is not None and decoder is not None:
        keep_decoder(*keep_as, model, linears, uses, test, settings.packed_cache)
    return LoadedModel(
        model=model,
        config=config,
        holder=holder,
        layers=layers,
        linears=linears,
        decoder=decoder,
        kernels_reason=reason,
        kv_cache_reason=f"whole keys and values, not the latent ones: {why_whole}" if why_whole else "",
        dtype=resolved.dtype,
        device=resolved.device,
        max_model_len=max_model_len,
        vocab_size=vocab_size(model),
        kept=kept,
        products=products,
    )


def _uses(model: Any, holder: ContextHolder, config: Any, test: SelfTest) -> list[LayerUse]:
    """Return how the model's layers call our attention. Raises ``PackagingError`` if that does not pass the test."""
    try:
        uses = probe_layers(model, holder, config)
        test.check(model_forward(model, holder), [use.shape for use in uses], next(model.parameters()))
    except (attention.UnsupportedAttentionError, AttributeError, TypeError) as error:
        raise PackagingError(f"{type(model).__name__}: the engine cannot run its attention: {error}") from error
    return uses


def from_pretrained(auto: Any, folder: str, resolved: ResolvedSettings) -> Any:
    """Read a model from safetensors only, with transformers' own attention, since a configuration may name one whose
    code would be downloaded. Raises ``PackagingError`` if the files do not make a complete model."""
    own_code = resolved.settings.trust_remote_code
    load_steps.report("reading", total=sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")))
    if stored_weights.quantization_of(folder) is not None:
        return stored_weights.load(auto, folder, resolved.dtype, resolved.device)
    try:
        if not own_code:  # the model's own code may know how to read unscaled weights
            refuse_unscaled(folder)
        with in_proportion(folder):
            model, found = auto.from_pretrained(
                folder,
                dtype=resolved.dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=own_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (PackagingError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from transformers, safetensors, or the model's own code
        reason = " ".join(str(error).split())[:600]
        raise PackagingError(f"the model cannot be loaded: {type(error).__name__}: {reason}") from error
    refuse_incomplete(auto, model, found["missing_keys"], own_code=own_code)
    return model


def refuse_incomplete(auto: Any, model: Any, missing: Set[str], *, own_code: bool = False) -> None:
    """Refuse a checkpoint that lacks tensors, which transformers would fill with random numbers.

    ``missing`` does not include tied weights and buffers that transformers knows how to make. Buffers that a model's
    own code makes may be missing, and so may an encoder's pooler: checkpoints trained on masked tokens do not have one,
    and embeddings are made from token vectors. Raises ``PackagingError``, which names the tensors."""
    buffers = {name for name, _ in model.named_buffers()} if own_code else set()
    missing = {name for name in missing - buffers if not (auto is AutoModel and POOLER.search(name))}
    if missing:
        names = ", ".join(sorted(missing)[:MISSING_SHOWN]) + (", …" if len(missing) > MISSING_SHOWN else "")
        raise PackagingError(f"the weights are incomplete: they lack {len(missing)} of the model's tensors: {names}")


def _mapped(key: str, bundle: Bundle, resolved: ResolvedSettings) -> LoadedModel | None:
    """Load the model from its packed file for a native step; None if there is no file, or it fails the test."""
    settings, holder = resolved.settings, ContextHolder()
    try:
        found = MappedDecoder(bundle, settings, holder, key)
    except (LookupError, OSError, ValueError, PackagingError) as error:
        logger.debug("packed weights: %r", error)
        return None
    config = found.model.config.get_text_config()
    refuse_unsupported(found.model, config)
    like = next(found.model.parameters())
    decoder, reason, kept = native_decoder(found.model, found.uses, found.test, like, settings)
    if decoder is None:
        logger.warning("packed weights are not used: %s", reason)
        return None
    logger.info("packed weights are mapped, not read")
    return LoadedModel(
        model=found.model,
        config=config,
        holder=holder,
        layers=[use.shape for use in found.uses],
        linears=found.linears,
        decoder=decoder,
        kernels_reason="",
        dtype=resolved.dtype,
        device=like.device,
        max_model_len=resolve_max_model_len(config, settings),
        vocab_size=vocab_size(found.model),
        kept=kept,
    )


def native_decoder(
    model: Any, uses: Sequence[LayerUse], test: SelfTest, like: Any, settings: EngineSettings
) -> tuple[DecoderWeights | None, str, Mapping[str, Any]]:
    """Return the weights of a native step if the model can be run natively and passes the self-test, or else the
    reason; and how its KV cache stores keys and values.

    Raises ``PackagingError`` if there is no native step, but the settings ask for keys and values in a type that only
    it supports."""
    plain: Mapping[str, Any] = {"dtype": like.dtype}
    asked, int8, rounded = settings.kv_cache_dtype, settings.quantization != "none", settings.dtype == "bfloat16"
    if asked == "float32" and (rounded or like.dtype != torch.float32):
        computes = settings.dtype if rounded else str(like.dtype).removeprefix("torch.")
        raise PackagingError(f"kv_cache_dtype: 'float32' is not allowed; expected 'auto': the model is in {computes}")
    must = asked == "int8" or (asked == "bfloat16" and like.dtype != torch.bfloat16)
    tried = [plain]  # the first that passes is used
    try:
        if settings.kernels != "auto":
            raise NotNative(f"the setting kernels is {settings.kernels!r}")
        weights = decoder_weights(model, uses)
        if asked == "int8":
            tried = [INT8_LAYOUT]
        elif must or rounded:
            why_not = library.why_no_bf16_kv(weights.head_dim)
            if why_not is None:
                tried = [BF16_LAYOUT]
            elif must:
                raise NotNative(why_not)
        elif asked == "auto" and int8:
            tried = [INT8_LAYOUT, plain]
    except NotNative as reason:
        if must:
            raise refused_kv(asked, reason) from None
        return None, str(reason), plain

    def forward(cache: SlotKVCache, ids: Any, rows: Sequence[Row]) -> Any:
        return NativeDecoder(weights, cache).forward(StepInput(ids, rows, [None] * len(rows), range(len(ids))))

    layers = [use.shape for use in uses]
    for kept in tried:
        keeps_int8, keeps_rounded = kept is INT8_LAYOUT, rounded or kept is BF16_LAYOUT
        try:
            if keeps_int8 and not int8:  # everything but keys and values is held to the tolerance of floats
                test.check(forward, layers, like, rounded=keeps_rounded)
            test.check(forward, layers, like, int8=int8 or keeps_int8, rounded=keeps_rounded, kept=kept)
            return weights, "", kept
        except PackagingError as error:
            if must:
                raise refused_kv(asked, error) from error
            refused = error
            if kept is not tried[-1]:
                logger.warning(
                    "keys and values are not kept in %s: %s", str(kept["dtype"]).removeprefix("torch."), error
                )
    logger.warning("%s is not run natively: %s", type(model).__name__, refused)
    return None, f"the self-test at load refused them: {refused}", plain


def refused_kv(asked: str, reason: Exception) -> PackagingError:
    text = f"kv_cache_dtype: {asked!r} is not allowed; expected 'auto': only our own kernels keep keys and values so"
    return PackagingError(f"{text}, and {reason}")


def vocab_size(model: Any) -> int:
    """Return the number of rows of the output head, which is the range of token ids and logits."""
    head = model.get_output_embeddings()
    return int(head.out_features) if head is not None else int(model.config.get_text_config().vocab_size)


def refuse_unsupported(model: Any, config: Any) -> None:
    """Raise ``PackagingError`` for architectures that would run but give wrong results."""
    name = type(model).__name__
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    kinds = f"layers of type {', '.join(sorted(map(str, unknown)))}" if unknown else ""
    if getattr(model, "_is_stateful", False):
        raise PackagingError(f"{name} is not supported: {attention.RECURRENT}" + (kinds and f" ({kinds})"))
    if unknown:
        raise PackagingError(f"{name} is not supported: {kinds}")
    if not getattr(model, "_supports_attention_backend", False):
        raise PackagingError(f"{name} is not supported: transformers offers no way to replace its attention")
    if getattr(config, "is_encoder_decoder", False):
        raise PackagingError(f"{name} is not supported: it is an encoder-decoder model")
    if getattr(config, "attention_chunk_size", None):
        raise PackagingError(f"{name} is not supported: it attends in chunks (attention_chunk_size)")


def resolve_max_model_len(config: Any, settings: EngineSettings) -> int:
    """Return the context length that the settings ask for, or else the model's own, which it may not exceed. Raises
    ``PackagingError``."""
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(v, dict) for v in rope.values()) and rope else [rope]
    for parameters in kinds:
        if parameters.get("rope_type") in LENGTH_BOUND_ROPE:
            bound = parameters.get("original_max_position_embeddings") or own
            if bound is not None and (own is None or bound < own):
                logger.warning("rope type %s: the context is limited to %d tokens", parameters["rope_type"], bound)
                own = bound
    if settings.max_model_len is None:
        if own is None:
            raise PackagingError("the model's configuration has no max_position_embeddings: set max_model_len")
        return int(own)
    if own is not None and settings.max_model_len > own:
        raise PackagingError(f"max_model_len: {settings.max_model_len} is not allowed; expected at most {own}")
    return settings.max_model_len
