"""Embeddings: an encoder or a decoder over one flat row of whole sequences, then pooling.

Sequences are sorted by length and cut into rows of about ``ROW_TOKENS`` tokens (``NATIVE_ROW_TOKENS`` if the model runs
natively). No token is padding. A known model whose attention cannot be replaced (``BY_LENGTH``) takes the sequences of
a row one length at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from transformers import AutoModel

from ...interface.bundle import Bundle, EmbeddingSpec
from ...interface.engine import Capabilities, EngineInfo
from ...interface.errors import ContextTooLong, InvalidField, PackagingError
from ...interface.settings import EngineSettings
from ..attention import ragged_attention
from ..attention.attention import HOLDER, RECURRENT, UnsupportedAttentionError
from ..native import library
from ..native.library import NotNative
from ..weights import fp8, linear
from ..weights.forward_context import ContextHolder, ForwardContext
from .native_encoder import NativeEncoder, may_run_in_bf16, native_encoder
from .packed.cache import MappedEncoder, keep_encoder, packed_key
from .packed.source import PackedSource
from .pooling import EmbeddingHead, pool, pooling_modes
from .resolved_settings import ResolvedSettings
from .sentence_files import transformer_dir
from .verification import WHOLE_TOLERANCE, relative_maximum, relative_norm

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")

# Full GEMM speed with activations that stay near the cache. MiniLM with torch, texts per second at rows of
# 512/1024/2048/4096 tokens: float32 139/158/166/156, int8 313/332/298/208.
ROW_TOKENS = 1024
# Native groups stay near the cache by themselves and only wait at the end of a row. 24,296 tokens in rows of
# 1024/2048/8192/32768 took 2.83/2.74/2.69/2.70 s in float32 and 0.98/0.94/0.91/0.90 s in int8.
NATIVE_ROW_TOKENS = 8192
BY_LENGTH = ("MPNetModel",)
CHECK_LENGTHS = (9, 5, 5, 2)
BEYOND_WINDOW_TOKENS = 8  # tokens by which a text of the check exceeds the widest bidirectional window
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # relative to the largest activation


class Embedder:
    """A loaded embedding model. Only the thread that loaded it may call ``embed``."""

    def __init__(
        self, model: Any, holder: ContextHolder, spec: EmbeddingSpec, max_length: int, info: EngineInfo
    ) -> None:
        self.model, self._holder, self._spec = model, holder, spec
        self._device = next(model.parameters()).device
        self._position_offset = position_offset(model)
        self._by_length = type(model).__name__ in BY_LENGTH
        self.native: NativeEncoder | None = None
        self.max_length = max_length
        self.info = info
        self._head: EmbeddingHead | None = None

    @property
    def dim(self) -> int:
        return self.info.embedding_dim

    def use_head(self, bundle: Bundle, width: int) -> None:
        """Read the modules after pooling, for token vectors of ``width`` values. Raises ``PackagingError``."""
        self._head = EmbeddingHead(self._spec, bundle.model_dir, width, self._device)
        self.info = msgspec.structs.replace(self.info, embedding_dim=self._head.dim)

    def embed(
        self, token_ids: Sequence[Sequence[int]], second_from: Sequence[int] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Embed sequences: float32 [n, dim], pooled and, if the model says so, normalised to length 1.

        From ``second_from`` on, a sequence's tokens are of the second type. Raises ``ContextTooLong``, and
        ``InvalidField`` for an empty sequence."""
        self.check_lengths(token_ids)
        vectors = np.empty((len(token_ids), self.dim), dtype=np.float32)
        for row in rows(token_ids, row_tokens(self)):
            seconds = None if second_from is None else [second_from[i] for i in row]
            vectors[row] = self._embed_row([token_ids[i] for i in row], seconds)
        return vectors

    def check_lengths(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Raise ``ContextTooLong`` for a sequence that is too long, and ``InvalidField`` for an empty one."""
        for length in map(len, token_ids):
            if length > self.max_length:
                raise ContextTooLong(f"input has {length} tokens, the model takes at most {self.max_length}")
            if not length:
                raise InvalidField("input", [], "at least one token")

    @torch.inference_mode()
    def _embed_row(self, sequences: Sequence[Sequence[int]], second_from: Sequence[int] | None) -> Any:
        lengths = [len(sequence) for sequence in sequences]
        assert self._head is not None, "set when the model is loaded"
        return self._head(pool(self.hidden(sequences, second_from), lengths, self._spec.pooling)).cpu().numpy()

    def hidden(self, sequences: Sequence[Sequence[int]], second_from: Sequence[int] | None = None) -> Any:
        """Return the last hidden states [T, D] of the sequences of a row.

        From ``second_from`` on, a sequence's tokens are of the second type."""
        lengths = [len(sequence) for sequence in sequences]
        types = None if second_from is None else _token_types(lengths, second_from)
        if self.native is not None:
            row = np.fromiter(chain.from_iterable(sequences), np.int32, sum(lengths))
            return self.native.run(row, lengths, types)
        if self._by_length:
            return torch.cat([self._equally_long(list(some)) for _, some in groupby(sequences, len)])
        ids = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
        positions = np.concatenate([np.arange(len(sequence)) for sequence in sequences]) + self._position_offset
        plan = ragged_attention.RaggedPlan(lengths)
        self._holder.context = ForwardContext(num_tokens=len(ids), attention=plan)
        arguments: dict[str, Any] = {}
        if getattr(self.model.config, "use_cache", None) is not None:
            arguments["use_cache"] = False
        if types is not None:
            arguments["token_type_ids"] = torch.from_numpy(types).long()[None].to(self._device)
        try:
            return self.model(
                input_ids=torch.from_numpy(ids)[None].to(self._device),
                position_ids=torch.from_numpy(positions)[None].to(self._device),
                **arguments,
            ).last_hidden_state[0]
        finally:
            self._holder.context = None

    def _equally_long(self, sequences: Sequence[Sequence[int]]) -> Any:
        """Return the hidden states [T, D] of equally long sequences by the model's own attention, which needs no
        mask."""
        ids = torch.tensor(sequences, device=self._device)
        positions = torch.arange(ids.shape[1], device=self._device) + self._position_offset
        return self.model(input_ids=ids, position_ids=positions.expand_as(ids)).last_hidden_state.flatten(0, 1)


def row_tokens(embedder: Embedder) -> int:
    """Return the approximate number of tokens in a row."""
    return ROW_TOKENS if embedder.native is None else NATIVE_ROW_TOKENS


def _token_types(lengths: Sequence[int], second_from: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """Return token types 0 and 1 as int32 [T]; None if all are 0, which is every model's default."""
    if all(second >= length for length, second in zip(lengths, second_from, strict=True)):
        return None
    parts = [np.arange(length) >= second for length, second in zip(lengths, second_from, strict=True)]
    return np.concatenate(parts).astype(np.int32)


def num_token_types(model: Any) -> int:
    """Return how many types of tokens the model distinguishes; 1 if it has no table of types."""
    table = getattr(getattr(model, "embeddings", None), "token_type_embeddings", None)
    return 1 if table is None else int(table.weight.shape[0])


def rows(token_ids: Sequence[Sequence[int]], limit: int) -> Iterator[list[int]]:
    """Yield indices sorted by length, in rows of at most ``limit`` tokens. A longer sequence is a row of its own."""
    row: list[int] = []
    tokens = 0
    for index in sorted(range(len(token_ids)), key=lambda i: len(token_ids[i])):
        if row and tokens + len(token_ids[index]) > limit:
            yield row
            row, tokens = [], 0
        row.append(index)
        tokens += len(token_ids[index])
    if row:
        yield row


def position_offset(model: Any) -> int:
    """Return the number of the first position: ``pad_token_id + 1`` in RoBERTa's family, 0 in all other models."""
    embeddings: Any = getattr(model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_inputs_embeds"):
        return int(embeddings.padding_idx) + 1
    return 0


@torch.inference_mode()
def load_embedder(
    bundle: Bundle, settings: EngineSettings | ResolvedSettings, holder: ContextHolder | None = None
) -> Embedder:
    """Load ``bundle.model_dir`` (safetensors only), check it against the model's own attention and pack its linears.

    Raises ``PackagingError`` for an architecture whose results would be wrong.
    """
    from .loader import from_pretrained

    resolved = ResolvedSettings.of(settings)
    settings = resolved.settings
    kept_holder = holder or ContextHolder()
    spec = bundle.embedding or EmbeddingSpec()
    pooling_modes(spec.pooling)
    folder = str(transformer_dir(bundle.model_dir))
    key = packed_key("encoder", bundle, resolved)
    if key is not None and (mapped := _mapped(key, folder, bundle, spec, settings, kept_holder)) is not None:
        return mapped
    keep_as = None if key is None else (key, PackedSource(bundle))

    def load(model: Any) -> Embedder:
        model = model.to(resolved.device).eval().requires_grad_(False)
        embedder = embedder_of(model, kept_holder, bundle, spec, settings)
        tests, expected = use_ragged_attention(embedder, model, kept_holder)
        embedder.use_head(bundle, expected.shape[-1])
        linears = linear.install(model, kept_holder, settings)
        check(embedder, tests, expected, settings)
        run_natively(embedder, model, tests, expected, settings)
        if keep_as is not None and embedder.native is not None:
            keep_encoder(*keep_as, model, linears, tests, expected, settings.packed_cache)
        return embedder

    return load_in_dtype(lambda: from_pretrained(AutoModel, folder, resolved), load, resolved)


def load_in_dtype(
    read: Callable[[], Any],
    load: Callable[[Any], Loaded],
    resolved: ResolvedSettings,
    base: Callable[[Any], Any] = lambda model: model,
) -> Loaded:
    """Call ``load`` with the model that ``read`` returns; ``base`` returns its encoder.

    If bfloat16 is asked for and our kernels may run the model, it is loaded in float32, since they round what they
    multiply. If they turn out not to run it, it is loaded as it is."""
    model = read()
    name = type(base(model)).__name__
    asked = resolved.settings
    if asked.dtype == "bfloat16" and asked.kernels == "auto" and may_run_in_bf16(base(model), resolved.device):
        try:
            return load(model.float())
        except NotNative as reason:
            logger.warning("%s is not run natively in bfloat16: %s", name, reason)
            model = read()
    return load(model)


def is_rounded(model: Any, settings: EngineSettings) -> bool:
    """Return whether our kernels are to compute a float32 model in bfloat16."""
    return settings.dtype == "bfloat16" and next(model.parameters()).dtype == torch.float32


def embedder_of(
    model: Any, holder: ContextHolder, bundle: Bundle, spec: EmbeddingSpec, settings: EngineSettings
) -> Embedder:
    max_length = resolve_max_length(model, spec, settings)
    return Embedder(model, holder, spec, max_length, _info(bundle, model, settings, max_length))


def _mapped(
    key: str, folder: str, bundle: Bundle, spec: EmbeddingSpec, settings: EngineSettings, holder: ContextHolder
) -> Embedder | None:
    """Load the model from its packed file and run it natively; None if there is no file, or it fails the test."""
    try:
        found = MappedEncoder(folder, settings, holder, key)
    except (LookupError, OSError, ValueError, PackagingError) as error:
        logger.debug("packed weights: %r", error)
        return None
    embedder = embedder_of(found.model, holder, bundle, spec, settings)
    embedder.use_head(bundle, found.expected.shape[-1])
    _attend_raggedly(found.model, holder)
    run_natively(embedder, found.model, found.tests, found.expected, settings)
    if embedder.native is None:
        logger.warning("packed weights are not used: %s", embedder.info.kernels_reason)
        return None
    logger.info("packed weights are mapped, not read")
    return embedder


def run_natively(
    embedder: Embedder,
    model: Any,
    tests: list[list[int]],
    expected: Any,
    settings: EngineSettings,
    *,
    typed: bool = False,
) -> None:
    """Run the model natively if it can be and gives what its own code gave; if not, note the reason in its info.

    ``typed``: tokens may be of the second type. Raises ``NotNative`` if nothing but our kernels computes the model in
    the dtype asked for."""
    try:
        if settings.kernels != "auto":
            raise NotNative(f"the setting kernels is {settings.kernels!r}")
        embedder.native = native_encoder(model, position_offset(model), typed=typed)
        check(embedder, tests, expected, settings)
        runs = library.instruction_set()
        embedder.info = msgspec.structs.replace(embedder.info, kernels="native", instruction_set=runs)
    except NotNative as reason:
        if is_rounded(model, settings):
            raise
        embedder.info = msgspec.structs.replace(embedder.info, kernels_reason=str(reason))
    except PackagingError as error:
        refused = f"the self-test at load refused them: {error}"
        if is_rounded(model, settings):
            raise NotNative(refused) from error
        logger.warning("%s is not run natively: %s", type(model).__name__, error)
        embedder.native = None
        embedder.info = msgspec.structs.replace(embedder.info, kernels_reason=refused)


def tolerance(dtype: Any, settings: EngineSettings) -> float:
    """Return the tolerance, relative to the largest activation, for a model in ``dtype`` run with ``settings``."""
    return TOLERANCE[torch.bfloat16 if settings.dtype == "bfloat16" else dtype]


def check(embedder: Embedder, tests: list[list[int]], expected: Any, settings: EngineSettings | None = None) -> None:
    """Raise ``PackagingError`` if the model does not give ``expected``.

    ``settings`` are those that its linears were packed by; None if they are not packed yet."""
    int8 = settings is not None and settings.quantization != "none"
    allowed = TOLERANCE[expected.dtype] if settings is None else tolerance(expected.dtype, settings)
    allowed = WHOLE_TOLERANCE if int8 else allowed
    found = embedder.hidden(tests).float()
    distance = (relative_norm if int8 else relative_maximum)(found, expected.float())
    if not distance <= allowed:  # also true for NaN
        raise PackagingError(f"this model is not supported for embeddings: packed result differs by {distance:.2g}")


def refuse_unsupported(model: Any) -> None:
    """Raise ``PackagingError`` for an architecture that would run but give wrong results, or that reads no text."""
    name = type(model).__name__
    refused = f"{name} is not supported for embeddings: "
    if (reads := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise PackagingError(f"{refused}it reads {reads}, not the tokens of a text")
    if getattr(model, "_is_stateful", False):
        raise PackagingError(f"{refused}{RECURRENT}")
    if not getattr(model, "_supports_attention_backend", False) and name not in BY_LENGTH:
        raise PackagingError(f"{refused}its attention cannot be replaced")
    try:
        model.get_input_embeddings().weight.shape  # noqa: B018 - its table may be missing
    except (NotImplementedError, AttributeError):
        raise PackagingError(f"{refused}it has no single table of token vectors") from None


def use_ragged_attention(embedder: Embedder, model: Any, holder: ContextHolder) -> tuple[list[list[int]], Any]:
    """Switch the model to our attention and compare it with its own, run one sequence at a time.

    Returns the test's token ids and the hidden states of the model's own code. Raises ``PackagingError``."""
    name = type(model).__name__
    refuse_unsupported(model)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    special = _special_ids(model.config)
    allowed = [i for i in range(min(vocab, 1000)) if i not in special] or [0]
    lengths = (*_beyond_windows(model, embedder.max_length), *CHECK_LENGTHS)
    tests = [[allowed[(7 * i + 31 * n) % len(allowed)] for i in range(size)] for n, size in enumerate(lengths)]
    expected = torch.cat(
        [model(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0] for ids in tests]
    )
    _attend_raggedly(model, holder)
    try:
        check(embedder, tests, expected)
    except (UnsupportedAttentionError, AttributeError, TypeError) as error:
        raise PackagingError(f"{name} is not supported for embeddings: {error}") from error
    return tests, expected


def _special_ids(config: Any) -> set[Any]:
    """Return the ids that a model treats unlike others: padding, and the places of images and sounds."""
    configs = (config, config.get_text_config())
    names = {name for one in configs for name in vars(one) if name.endswith(("_token_id", "_token_index"))}
    return {getattr(one, name, None) for one in configs for name in names} | {
        getattr(one, "pad_token_id", None) for one in configs
    }


def _beyond_windows(model: Any, max_length: int) -> list[int]:
    """Return a length at which bidirectional windows have an effect; [] if there are none, or no text can exceed
    them."""
    windows = [
        module.sliding_window
        for module in model.modules()
        if getattr(module, "is_causal", None) is False and getattr(module, "sliding_window", None) is not None
    ]
    beyond = max(windows, default=max_length) + BEYOND_WINDOW_TOKENS
    return [beyond] if beyond <= max_length else []


def _attend_raggedly(model: Any, holder: ContextHolder) -> None:
    if type(model).__name__ in BY_LENGTH:
        return
    for module in model.modules():
        object.__setattr__(module, HOLDER, holder)
    model.set_attn_implementation(ragged_attention.NAME)


def resolve_max_length(model: Any, spec: EmbeddingSpec, settings: EngineSettings) -> int:
    """Return the most tokens that a text may have. Raises ``PackagingError`` if neither model nor settings say."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [own - position_offset(model) if own else None, spec.max_length, settings.max_model_len]
    known = [limit for limit in limits if limit]
    if not known:
        raise PackagingError("the model's configuration has no max_position_embeddings: set max_model_len")
    return int(min(known))


def _info(bundle: Bundle, model: Any, settings: EngineSettings, max_length: int) -> EngineInfo:
    return EngineInfo(
        content_hash=bundle.content_hash,
        tasks=bundle.tasks,
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        max_model_len=max_length,
        max_num_seqs=settings.max_num_seqs,
        max_kv_tokens=max_length,
        embedding_dim=int(model.config.get_text_config().hidden_size),
        dtype="bfloat16" if settings.dtype == "bfloat16" else str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        quantization=settings.quantization,
        quantization_reason=fp8.reason(settings, model.device, model.dtype),
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        capabilities=Capabilities(adapters=False),
    )
