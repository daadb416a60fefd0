"""Loads a draft model beside the large one, and refuses it if the two do not have the same vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from ...interface.bundle import Bundle, DraftBundle
from ...interface.errors import PackagingError, reason
from ...interface.settings import EngineSettings
from ..attention.slot_cache import SlotKVCache, token_bytes
from ..attention.slot_table import MAX_SHARED_SLOTS
from ..models.loader import LoadedModel, load_model
from ..models.native_decoder import NativeDecoder
from ..scheduling.speculation import MAX_STEP_ROWS
from ..weights.stored_weights import adopted
from .draft_model import DraftModel
from .runner import ModelForward, StepForward

logger = logging.getLogger(__name__)

MEMORY_DIVISOR = 8  # the draft model's KV cache gets the large model's KV cache memory divided by this


def load_draft_model(
    bundle: Bundle, draft: DraftBundle, large: LoadedModel, settings: EngineSettings, memory: int, max_tokens: int
) -> DraftModel:
    """Load the draft model. Raises ``PackagingError``, also if its vocabulary is not the large model's.

    ``memory`` is the size of the large model's KV cache in bytes. Prompts are read with ``max_tokens`` per step."""
    check_vocabulary(bundle, draft, settings)
    own = Bundle(
        content_hash=draft.content_hash,
        tasks=("completions",),
        model_dir=draft.model_dir,
        tokenizer_dir=draft.tokenizer_dir,
        model_hashes=draft.model_hashes,
    )
    try:
        plain = msgspec.structs.replace(settings, max_model_len=None, kv_cache_dtype="auto")
        loaded = load_model(own, adopted(plain, draft.model_dir))
    except PackagingError as error:
        raise PackagingError(f"draft_model: {draft.uri}: {error}") from error
    if not draft.tokenizer_dir and loaded.vocab_size != large.vocab_size:
        sizes = f"{loaded.vocab_size} tokens, this model has {large.vocab_size}"
        raise PackagingError(f"draft_model: {draft.uri} does not have this model's vocabulary: it has {sizes}")
    num_tokens = min(
        MAX_STEP_ROWS * loaded.max_model_len, memory // MEMORY_DIVISOR // token_bytes(loaded.layers, **loaded.kept)
    )
    max_model_len = min(loaded.max_model_len, large.max_model_len)
    by_reference = loaded.decoder is not None
    if num_tokens < 1:
        raise PackagingError(f"draft_model: {draft.uri}: kv_cache_memory, {memory} bytes, leaves no room for it")
    try:
        cache = SlotKVCache(
            loaded.layers,
            num_slots=(1 + MAX_SHARED_SLOTS if by_reference else 2) * MAX_STEP_ROWS,
            num_tokens=num_tokens,
            max_model_len=max_model_len,
            device=loaded.device,
            prefix_caching=settings.prefix_caching,
            by_reference=by_reference,
            **loaded.kept,
        )
    except OSError as error:  # a system that counts address space as memory
        raise PackagingError(f"draft_model: {draft.uri}: no room for its keys and values ({error})") from error
    cost = _size(draft.model_dir) / max(_size(bundle.model_dir), 1)
    logger.info("drafts come from %s, which has %.0f %% of this model's weights", draft.uri, 100 * cost)
    return DraftModel(
        _step_forward(loaded, cache),
        cache,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        width=large.vocab_size,
        cost=cost,
        max_tokens=max_tokens,
    )


def _step_forward(loaded: LoadedModel, cache: SlotKVCache) -> StepForward:
    if loaded.decoder is not None:
        return NativeDecoder(loaded.decoder, cache)
    return ModelForward(loaded.model, loaded.holder, cache, None, loaded.device)


def _size(model_dir: str) -> int:
    """Return the bytes of weights, which is what a step reads."""
    return sum(path.stat().st_size for path in Path(model_dir).glob("*.safetensors"))


def check_vocabulary(bundle: Bundle, draft: DraftBundle, settings: EngineSettings) -> None:
    """Raise ``PackagingError``, which names a token, if a token is not in both vocabularies under the same id."""
    if not bundle.tokenizer_dir or not draft.tokenizer_dir:
        return
    own, other = (_vocabulary(folder, settings) for folder in (bundle.tokenizer_dir, draft.tokenizer_dir))
    differ = [token for token in own.keys() | other.keys() if own.get(token) != other.get(token)]
    if not differ:
        return
    token = min(differ, key=lambda token: (own.get(token, other.get(token, 0)), token))
    here, there = (f"id {found[token]}" if token in found else "no id" for found in (own, other))
    raise PackagingError(
        f"draft_model: {draft.uri} does not have this model's vocabulary: {token[:40]!r} has {here} in this model, "
        f"{there} in the draft model"
    )


def _vocabulary(folder: str, settings: EngineSettings) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
        found: dict[str, int] = hf.get_vocab()
    except Exception as error:  # whatever transformers or a tokenizer's own code raises
        raise PackagingError(f"draft_model: the tokenizer in {folder} cannot be read: {reason(error)}") from error
    return found
