"""Multi-head latent attention: the cache keeps, for each token, what the keys and values of all heads are made from.

With the module's ``kv_b_proj`` split into K_h [N, R] and V_h [Dv, R] for each head h::

    kept of a token    c [R] compressed and normed | r [P] the rotated key, one for all heads
    whole              k_h = K_h c | r             v_h = V_h c
    absorbed           q_h . k_h = (q_h K_h) . c + q_h' . r      sum of p v_h = V_h (sum of p c)

Absorbed, every head reads the same R + P numbers of a token. Expanded into whole keys and values, many queries at once
cost less. Which of the two a run of tokens takes depends only on its length and place (``prefers_expanded``).

transformers' modules of this form make whole keys and values in one place only, the method
``expand_kv(c, r) -> (keys, values)``. It is replaced by one that passes c and r on to our attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..adapters.lora_plan import LoraPlan, RowFactors
from ..weights.linear import EngineLinear, replaceable

FORM = "mlflow_llm_latent"  # the module's attribute with its ``LatentForm``
WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
PROBE_TOKENS = 3  # tokens that the module's own code and ours expand at load
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative to the largest value
EXPANDED_ELEMENTS = 1 << 24  # most elements of whole keys and values at once; heads beyond these wait their turn


class NotLatentError(Exception):
    """A module's attention is latent, but not in the form known here; the message says why."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """The latent form of a module. ``weight`` [H, N + Dv, R] is its ``kv_b_proj``, in the same memory."""

    weight: Any
    rank: int
    nope: int
    rope: int
    value_dim: int

    @classmethod
    def of(cls, module: Any) -> LatentForm:
        """Return the form of ``module``. Raises ``NotLatentError``."""
        rank, nope, rope, value_dim = (getattr(module, name, None) for name in WIDTHS)
        linear = getattr(module, "kv_b_proj", None)
        if not (rank and nope and rope and value_dim and linear is not None and replaceable(linear)):
            raise NotLatentError("its widths are not known, or its kv_b_proj is no plain linear")
        if linear.bias is not None:
            raise NotLatentError("its kv_b_proj has a bias")
        weight = linear.weight.detach()
        if weight.shape[1] != rank or weight.shape[0] % (nope + value_dim):
            raise NotLatentError(f"its kv_b_proj is {tuple(weight.shape)}")
        form = cls(weight.view(-1, nope + value_dim, rank), rank, nope, rope, value_dim)
        form.check(module)
        return form

    def check(self, module: Any) -> None:
        """Check that the module expands as we do. Raises ``NotLatentError``."""
        like, make = self.weight, torch.Generator().manual_seed(0)
        kept = torch.randn(PROBE_TOKENS, self.rank + self.rope, generator=make).to(like.device, like.dtype)
        latent, rotated = kept.split([self.rank, self.rope], -1)
        try:
            found = module.expand_kv(latent[None, None], rotated[None, None])
            ours = Projections(self, ()).expanded(kept, 0, slice(None))
            values = ours[1][..., : self.value_dim]
            pairs = [(found[0][0].float(), ours[0].float()), (found[1][0].float(), values.float())]
            far = any(float((a - b).abs().max()) > TOLERANCE[like.dtype] * float(b.abs().max()) for a, b in pairs)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
            raise NotLatentError(f"its expand_kv differs: {error}") from None
        if far:
            raise NotLatentError("its expand_kv gives different keys and values")

    def prefers_expanded(self, num_tokens: int, length: int) -> bool:
        """Return whether ``num_tokens`` queries over ``length`` tokens need fewer products with whole keys and
        values."""
        own = (self.nope + self.value_dim) * self.rank
        absorbed = num_tokens * (own + length * 2 * (self.rank + self.rope))
        expanded = length * own + num_tokens * length * 2 * (self.nope + self.rope)
        return expanded < absorbed


def install(model: nn.Module) -> tuple[list[str], str]:
    """Make every module of this form pass on what the cache keeps.

    Returns the names of their ``kv_b_proj``, which no kernel's layout may replace; or none, and the reason.
    """
    found = [(name, module) for name, module in model.named_modules() if hasattr(type(module), "expand_kv")]
    config: Any = model.config
    if not found:
        rank = getattr(config.get_text_config(), "kv_lora_rank", None)
        return [], "its code makes whole keys and values at once" if rank else ""
    try:
        forms = [LatentForm.of(module) for _, module in found]
    except NotLatentError as reason:
        return [], str(reason)
    for (_, module), form in zip(found, forms, strict=True):
        object.__setattr__(module, FORM, form)
        object.__setattr__(module, "expand_kv", _as_it_is)
    return [f"{name}.kv_b_proj" for name, _ in found], ""


def remove(model: nn.Module) -> None:
    """Undo ``install``."""
    for module in model.modules():
        if hasattr(module, FORM):
            object.__delattr__(module, FORM)
            object.__delattr__(module, "expand_kv")


def _as_it_is(latent: Any, rotated: Any) -> tuple[Any, Any]:
    return latent, rotated


def projections_of(module: Any, lora: LoraPlan | None) -> Projections:
    """Return the projections of a module that has a form, with this step's adapters on its ``kv_b_proj``."""
    linear = module.kv_b_proj
    adapted = lora.by_rows(linear.group.key) if lora is not None and isinstance(linear, EngineLinear) else ()
    return Projections(getattr(module, FORM), adapted)


class Projections:
    """The maps between the latent space and the heads' spaces, in one layer of one step. Rows are those of the flat
    row.

    An adapter's A, B, gain and shift are applied as in a linear: k_h = g (K_h c + s B A c) + b. What b adds to a
    query's scores is the same for every key, so absorbed scores leave it out.
    """

    __slots__ = ("_adapted", "form")

    def __init__(self, form: LatentForm, adapted: Sequence[RowFactors]) -> None:
        self.form = form
        self._adapted = adapted

    def absorbed(self, q: Any, first: int) -> Any:
        """Map queries [H, n, N + P] of the rows from ``first`` on → [H, n, R + P]."""
        form = self.form
        nope, rope = q.split([form.nope, form.rope], -1)
        found = list(self._between(first, q.shape[1]))
        if any(own.gain is not None for _, own in found):
            nope = nope.clone()
            for rows, own in found:
                if own.gain is not None:
                    nope[:, rows] *= self._heads(own.gain)[:, None, : form.nope]
        latent = torch.bmm(nope, form.weight[:, : form.nope])
        for rows, own in found:
            b = self._heads(own.b)[..., : form.nope]  # [r, H, N]
            latent[:, rows] += torch.matmul(torch.bmm(nope[:, rows], b.permute(1, 2, 0)) * own.scaling, own.a.t())
        return torch.cat((latent, rope), -1)

    def values(self, sums: Any, first: int) -> Any:
        """Map weighted sums [n, H, R or more] of what is kept → weighted sums of values [n, H, Dv]."""
        form = self.form
        latent = sums[..., : form.rank].transpose(0, 1)
        out = torch.bmm(latent, form.weight[:, form.nope :].transpose(1, 2))
        for rows, own in self._between(first, sums.shape[0]):
            b = self._heads(own.b)[..., form.nope :]  # [r, H, Dv]
            out[:, rows] += torch.bmm(torch.matmul(latent[:, rows], own.a) * own.scaling, b.transpose(0, 1))
            if own.gain is not None and own.shift is not None:
                gain, shift = (self._heads(x)[:, None, form.nope :] for x in (own.gain, own.shift))
                out[:, rows] = out[:, rows] * gain + shift
        return out.transpose(0, 1)

    def expanded(self, kept: Any, row: int, heads: slice) -> tuple[Any, Any]:
        """Expand what is kept of a sequence [L, R + P] → keys and values [h, L, N + P] of some heads.

        Values are padded with zeros to the width of keys, since attention with equal widths is much faster. ``row`` is
        any row of the sequence."""
        form = self.form
        latent, rotated = kept.split([form.rank, form.rope], -1)
        weight = form.weight[heads]
        whole = F.linear(latent, weight.reshape(-1, form.rank))
        for _, own in self._between(row, 1):
            part = self._heads(own.b)[:, heads].flatten(1)
            whole += torch.mm(torch.mm(latent, own.a) * own.scaling, part)
            if own.gain is not None and own.shift is not None:
                gain, shift = (self._heads(x)[heads].flatten() for x in (own.gain, own.shift))
                whole = whole * gain + shift
        k_nope, values = whole.unflatten(-1, (len(weight), -1)).split([form.nope, form.value_dim], -1)
        keys = torch.cat((k_nope, rotated[:, None].expand(-1, len(weight), -1)), -1)
        values = F.pad(values, (0, max(form.nope + form.rope - form.value_dim, 0)))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def head_groups(self, length: int) -> Iterator[slice]:
        """Yield all heads, as many at a time as ``length`` tokens leave room for."""
        form = self.form
        at_once = max(EXPANDED_ELEMENTS // (length * 2 * (form.nope + form.rope)), 1)
        for head in range(0, len(form.weight), at_once):
            yield slice(head, head + at_once)

    def _between(self, first: int, num_rows: int) -> Iterator[tuple[Any, RowFactors]]:
        """Yield each adapter that has rows among these, with its rows counted from ``first``."""
        for own in self._adapted:
            rows = own.rows[(own.rows >= first) & (own.rows < first + num_rows)] - first
            if len(rows):
                yield rows, own

    def _heads(self, x: Any) -> Any:
        """Split the last dimension of ``x``, the outputs of ``kv_b_proj``, by head."""
        return x.unflatten(-1, self.form.weight.shape[:2])
