"""A check at load that our attention computes the same as the model's own, before any request is answered.

A few random tokens go through the model's eager attention one sequence at a time, then through ours in chunks and mixed
steps; the logits must agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...interface.errors import PackagingError
from ..attention.kv_cache import AttentionArgs, KVCache, LayerShape, PrefixKey, Row
from ..attention.latent_attention import Projections
from ..attention.paged.cache import PagedKVCache
from ..attention.slot_cache import SlotKVCache
from ..weights.forward_context import ContextHolder, ForwardContext

logger = logging.getLogger(__name__)

LENGTHS = (9, 6, 4)
# Two prompts start, one of them in chunks; then decodes and chunks are mixed: (sequence, start, count) per step.
STEPS = (
    ((0, 0, 4), (1, 0, 5)),
    ((1, 5, 1), (0, 4, 3), (2, 0, 2)),
    ((0, 7, 1), (2, 2, 1)),
    ((0, 8, 1), (2, 3, 1)),
)
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}  # relative to the largest logit
# int8 agrees as a whole but not in every element: the tolerance is for the norm of the difference over the norm of the
# expected logits, each row less its mean. SmolLM2-135M has 0.29 on these random tokens (fp8, few rows: 0.17), tiny
# random models up to 0.16; logits of another model have 1.4, all zeros 1. The same holds for experts below float32,
# where a token's last bits may choose other experts: tiny random Mixtrals in bfloat16, two layers of four experts, have
# up to 0.43.
WHOLE_TOLERANCE = 0.6
UNDECLARED_WINDOW = ("PhimoeForCausalLM",)  # their masks have windows that the layers do not pass to the attention
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of the number in configurations


@dataclass(frozen=True, slots=True)
class LayerUse:
    """The parameters with which one layer calls the attention."""

    shape: LayerShape
    scaling: float
    window: int | None
    softcap: float | None


class ProbePlan:
    """An attention plan that records the layers' calls."""

    def __init__(self) -> None:
        self.uses: dict[int, LayerUse] = {}

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: AttentionArgs) -> Any:
        self.uses[layer] = LayerUse(
            LayerShape(k.shape[1], k.shape[3], v.shape[3]), args.scaling, args.window, args.softcap
        )
        return q.new_zeros((1, q.shape[2], q.shape[1], v.shape[3]))

    def attend_latent(self, layer: int, q: Any, kept: Any, projections: Projections, args: AttentionArgs) -> Any:
        shape = LayerShape(1, kept.shape[3], projections.form.rank, shared=True)
        self.uses[layer] = LayerUse(shape, args.scaling, args.window, args.softcap)
        return q.new_zeros((1, q.shape[2], q.shape[1], projections.form.value_dim))


def probe_layers(model: Any, holder: ContextHolder, config: Any) -> list[LayerUse]:
    """Return how every layer calls the attention, found by running the model once."""
    plan = ProbePlan()
    _forward(model, holder, np.zeros(2, dtype=np.int64), np.arange(2), plan)
    if not plan.uses or sorted(plan.uses) != list(range(len(plan.uses))):
        raise PackagingError(f"{type(model).__name__} is not supported: its layers do not all call the attention")
    types = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(types[: len(plan.uses)]):
        if kind == "sliding_attention" and plan.uses[layer].window is None:
            raise PackagingError(f"{type(model).__name__} is not supported: layer {layer} does not pass its window")
    window = getattr(config, "sliding_window", None)
    if type(model).__name__ in UNDECLARED_WINDOW and window is not None and window < config.max_position_embeddings:
        raise PackagingError(
            f"{type(model).__name__} is not supported: its layers do not pass their window of {window}"
        )
    return [plan.uses[i] for i in range(len(plan.uses))]


# A way to run a step: (cache, token ids [T], the rows that they belong to) -> logits [T, V].
Forward = Callable[[Any, Any, Sequence[Row]], Any]


def model_forward(model: Any, holder: ContextHolder) -> Forward:
    """Return a forward by transformers' code with our attention."""

    def forward(cache: KVCache, ids: Any, rows: Sequence[Row]) -> Any:
        positions = np.concatenate([np.arange(row.start, row.start + row.num_tokens) for row in rows])
        return _forward(model, holder, ids, positions, cache.plan(rows))

    return forward


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The test data: ``tokens`` and the ``expected`` logits of the model's own attention, one array per sequence.
    ``block_size`` is that of the KV cache, None for slots."""

    tokens: list[Any]
    expected: list[Any]
    routed: bool = False  # the model has experts
    block_size: int | None = None

    @classmethod
    def of(cls, model: Any, *, vocab_size: int, max_model_len: int, block_size: int | None = None) -> SelfTest:
        """Run the model with its eager attention, to get the expected logits."""
        random = np.random.default_rng(0)
        tokens = [random.integers(0, vocab_size, size=min(n, max_model_len)) for n in LENGTHS]
        expected = []
        for ids in tokens:
            row = torch.from_numpy(ids).to(model.device)[None]
            expected.append(model(input_ids=row, use_cache=False).logits[0].float())
            if not bool(torch.isfinite(expected[-1]).all()):
                raise PackagingError(
                    "the model computes logits that are not finite: its weights hold such values, or they overflow"
                )
        config = model.config.get_text_config()
        return cls(tokens, expected, any(getattr(config, name, None) for name in EXPERTS), block_size)

    def check(
        self,
        forward: Forward,
        layers: Sequence[LayerShape],
        like: Any,
        *,
        int8: bool = False,
        rounded: bool = False,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise ``PackagingError`` if ``forward`` gives different logits. ``like`` is a parameter of the model;
        ``rounded``: to bfloat16, though it is in float32. ``kept``: the layout of keys and values, if different from
        it."""
        kept = kept or {"dtype": like.dtype}
        cache = self._cache(layers, kept, like.device)
        for owner, ids in enumerate(self.tokens):
            cache.acquire(owner, PrefixKey("", ""), ids.astype(np.int32))
        dtype = torch.bfloat16 if rounded else like.dtype
        on_the_whole = int8 or (self.routed and dtype != torch.float32)
        allowed = WHOLE_TOLERANCE if on_the_whole else TOLERANCE[dtype]
        for step in STEPS:
            found = self._step(forward, cache, [part for part in step if self._fits(part)])
            if found is None:
                continue
            distance = relative_norm(*found) if on_the_whole else relative_maximum(*found)
            logger.debug("self-test: logits differ by %.2g of at most %.2g", distance, allowed)
            if not distance <= allowed:  # also true for NaN
                raise PackagingError(f"the model is not supported: in the self-test logits differ by {distance:.2g}")

    def _cache(self, layers: Sequence[LayerShape], kept: Mapping[str, Any], device: Any) -> KVCache:
        size = {"num_tokens": 4 * 64, "max_model_len": 64, "device": device}
        if self.block_size is None:
            return SlotKVCache(layers, num_slots=4, **size, **kept)
        size["num_tokens"] = 4 * max(64, self.block_size)
        return PagedKVCache(layers, dtype=kept["dtype"], block_size=self.block_size, **size)

    def _fits(self, part: tuple[int, int, int]) -> bool:
        return part[1] + part[2] <= len(self.tokens[part[0]])

    def _step(self, forward: Forward, cache: KVCache, parts: list[tuple[int, int, int]]) -> tuple[Any, Any] | None:
        """Return the found and the expected logits of one step, [T, V] each."""
        singles = cache.decode_order([s for s, _, n in parts if n == 1])
        parts = sorted((p for p in parts if p[2] == 1), key=lambda p: singles.index(p[0])) + [
            p for p in parts if p[2] > 1
        ]
        if not parts:
            return None
        ids = np.concatenate([self.tokens[s][a : a + n] for s, a, n in parts])
        logits = forward(cache, ids, [Row(s, a, n) for s, a, n in parts]).float()
        for sequence, start, n in parts:
            cache.computed(sequence, self.tokens[sequence].astype(np.int32), start + n)
        return logits, torch.cat([self.expected[s][a : a + n] for s, a, n in parts])


def relative_maximum(found: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def relative_norm(found: Any, wanted: Any) -> float:
    """Return the norm of the difference of two [T, N] relative to the expected one. A row's mean is subtracted, since a
    common offset of logits has no meaning."""
    wanted = wanted - wanted.mean(-1, keepdim=True)
    found = found - found.mean(-1, keepdim=True)
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-6))


def _forward(model: Any, holder: ContextHolder, ids: Any, positions: Any, plan: Any) -> Any:
    holder.context = ForwardContext(num_tokens=len(ids), attention=plan)
    try:
        return model(
            input_ids=torch.from_numpy(ids).to(model.device)[None],
            position_ids=torch.from_numpy(positions).to(model.device)[None],
            use_cache=False,
        ).logits[0]
    finally:
        holder.context = None
