"""Scores of pairs of texts: an encoder over one flat row of whole pairs, then the model's own head of one label.

The encoder runs like an embedder's (``embedder``), natively if it can. The head is the model's own code, whatever that
is: it is called with the encoder replaced by a module that returns what the encoder has computed, so new architectures
need no code here. At load the results are compared with the model's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...interface.bundle import Bundle, CrossEncoderSpec, EmbeddingSpec
from ...interface.engine import EngineInfo
from ...interface.errors import PackagingError
from ...interface.settings import EngineSettings
from ..weights import linear
from ..weights.forward_context import ContextHolder
from .embedder import (
    Embedder,
    check,
    embedder_of,
    load_in_dtype,
    num_token_types,
    row_tokens,
    rows,
    run_natively,
    tolerance,
)
from .embedder import use_ragged_attention as attend_raggedly
from .loader import from_pretrained
from .resolved_settings import ResolvedSettings

TESTS = ((9, 4), (5, 5), (2, 1))  # tokens of a pair, and of its first text
INT8_TOLERANCE = 0.25  # of the largest number; the encoder's own error is bounded more closely


class Computed(nn.Module):
    """A module that takes the encoder's place and returns what it has computed: ``states`` [n, L, D] of padded
    pairs."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)


class CrossEncoder:
    """A loaded cross-encoder. Only the thread that loaded it may call ``embed``, which ``EmbeddingQueue`` expects."""

    def __init__(self, encoder: Embedder, model: Any, computed: Computed) -> None:
        self._encoder, self.model, self._computed = encoder, model, computed
        self._padding = model.config.get_text_config().pad_token_id or 0
        self.info: EngineInfo = encoder.info

    def embed(
        self, token_ids: Sequence[Sequence[int]], second_from: Sequence[int] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Score pairs: float32 [n, 1], the head's number for each.

        From ``second_from`` on, a pair's tokens are of the second type. Raises ``ContextTooLong``.
        """
        self._encoder.check_lengths(token_ids)
        seconds = [len(ids) for ids in token_ids] if second_from is None else second_from
        numbers = np.empty((len(token_ids), 1), dtype=np.float32)
        for row in rows(token_ids, row_tokens(self._encoder)):
            numbers[row, 0] = self._row([token_ids[i] for i in row], [seconds[i] for i in row]).cpu().numpy()
        return numbers

    @torch.inference_mode()
    def _row(self, pairs: Sequence[Sequence[int]], second_from: Sequence[int]) -> Any:
        """Return the pairs' numbers [n], float32."""
        hidden = self._encoder.hidden(pairs, second_from)
        lengths = [len(pair) for pair in pairs]
        self._computed.states = pad_sequence(list(hidden.split(lengths)), batch_first=True)
        ids = [torch.tensor(pair, device=hidden.device) for pair in pairs]
        mask = [torch.ones_like(one) for one in ids]
        try:
            return (
                self.model(
                    input_ids=pad_sequence(ids, batch_first=True, padding_value=self._padding),
                    attention_mask=pad_sequence(mask, batch_first=True),
                )
                .logits[:, 0]
                .float()
            )
        finally:
            self._computed.states = None


@torch.inference_mode()
def load_cross_encoder(bundle: Bundle, settings: EngineSettings | ResolvedSettings) -> CrossEncoder:
    """Load ``bundle.model_dir`` (safetensors only) and check it against the model's own code.

    Raises ``PackagingError`` for an architecture whose results would be wrong.
    """
    spec = bundle.cross_encoder or CrossEncoderSpec()
    holder = ContextHolder()
    resolved = ResolvedSettings.of(settings)
    settings = resolved.settings

    def load(model: Any) -> CrossEncoder:
        model = model.to(resolved.device).eval().requires_grad_(False)
        pairs, second_from = _tests(_base(model))
        expected = _own_numbers(model, pairs, second_from)
        base, computed = _part(model)
        encoder = embedder_of(base, holder, bundle, EmbeddingSpec(max_length=spec.max_length), settings)
        encoder.info = msgspec.structs.replace(encoder.info, embedding_dim=0)
        tests, hidden = attend_raggedly(encoder, base, holder)
        linear.install(base, holder, settings)
        check(encoder, tests, hidden, settings)
        run_natively(encoder, base, tests, hidden, settings, typed=True)
        found = CrossEncoder(encoder, model, computed)
        _check(found, pairs, second_from, expected, settings)
        return found

    def read() -> Any:
        model = from_pretrained(AutoModelForSequenceClassification, bundle.model_dir, resolved)
        if model.config.num_labels != 1:
            raise PackagingError(f"a cross-encoder has a head of one label; this one has {model.config.num_labels}")
        return model

    return load_in_dtype(read, load, resolved, _base)


def _base(model: Any) -> Any:
    found = getattr(model, model.base_model_prefix, None)
    if found is None or found is model:
        raise PackagingError(f"{type(model).__name__} is not supported for scores: its encoder cannot be found")
    return found


def _part(model: Any) -> tuple[Any, Computed]:
    """Take the encoder out of the model; return it and the module in its place. A pooler counts as part of the head."""
    base = _base(model)
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        base.pooler = None
    computed = Computed(pooler)
    setattr(model, model.base_model_prefix, computed)
    return base, computed


def _tests(base: Any) -> tuple[list[list[int]], list[int]]:
    vocabulary, padding = int(base.get_input_embeddings().weight.shape[0]), base.config.pad_token_id
    allowed = [i for i in range(min(vocabulary, 1000)) if i != padding]
    pairs = [[allowed[(11 * i + 37 * n) % len(allowed)] for i in range(size)] for n, (size, _) in enumerate(TESTS)]
    typed = num_token_types(base) > 1
    return pairs, [first if typed else size for size, first in TESTS]


def _own_numbers(model: Any, pairs: list[list[int]], second_from: list[int]) -> Any:
    """Return the number that the model's own code gives each pair when run by itself."""
    found = []
    for ids, second in zip(pairs, second_from, strict=True):
        types = torch.tensor([[int(place >= second) for place in range(len(ids))]], device=model.device)
        typed = {"token_type_ids": types} if second < len(ids) else {}
        given = torch.tensor([ids], device=model.device)
        found.append(model(input_ids=given, attention_mask=torch.ones_like(given), **typed).logits[0, 0])
    return torch.stack(found).float()


def _check(
    found: CrossEncoder, pairs: list[list[int]], second_from: list[int], expected: Any, settings: EngineSettings
) -> None:
    name = type(found.model).__name__
    try:
        numbers = torch.from_numpy(found.embed(pairs, second_from)[:, 0])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PackagingError(f"{name} is not supported for scores: its head cannot be run: {error}") from error
    allowed = INT8_TOLERANCE if settings.quantization != "none" else tolerance(found.model.dtype, settings)
    distance = float((numbers - expected.cpu()).abs().max() / expected.abs().max().clamp(min=1.0))
    if not distance <= allowed:  # also true for NaN
        raise PackagingError(f"{name} is not supported for scores: they differ from its own by {distance:.2g}")
