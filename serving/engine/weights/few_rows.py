"""Linears in floats on CUDA whose products of few rows are computed by our kernels where these are faster.

A product of few rows takes as long as reading the weights. Whether torch's library or one of our kernels
(``few_rows_kernel.py``) reads them faster depends on the shape and on the device, so both are timed at load, over
weights that no cache holds, recorded as decode steps are::

    shape [N, K], rows 1  2  4  8  16  32
                       └──┴──┴─ the fastest form, or None for torch ─── for each weight of that shape
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ...interface.settings import EngineSettings
from ..devices import overlap, triton_support
from .linear import LinearGroup, LinearSet
from .weight_layouts import PlainWeight

logger = logging.getLogger(__name__)
MAX_ROWS = 32
MIN_BLOCKS = 4  # of K in a part
PREFETCHED_WEIGHTS = 512  # weights of a row that a program fetches before it waits for the kernel before
DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4}  # relative to the example's largest value; 0.01 for 16-bit types
EXAMPLE = (112, 2048)  # N does not fill its blocks, and K is split; kernels are compiled as for common shapes
COLD_BYTES = 128 << 20  # read between two reads of a weight when products are timed, which no cache holds
MAX_LAUNCHES = 16  # that are timed together
NUM_REPEATS = 3
MAX_TIME_RATIO = 0.98  # of torch's time, which ours must not exceed to be chosen


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which a kernel divides a product. ``programs``: at least so many, if K is long enough; 0 for the kernel
    of one row, which does not split K. ``tiles``: weights come in blocks, by Hopper's tensor memory accelerator."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    programs: int = 0
    tiles: bool = False  # then block_k must divide K

    def fits(self, rows: int, K: int) -> bool:
        """Return whether a product of ``rows`` rows of K numbers can be divided so."""
        return (self.programs > 0 or rows == 1) and not (self.tiles and K % self.block_k)

    def split(self, N: int, K: int) -> int:
        """Return into how many parts K is split."""
        split, blocks = 1, -(-N // self.block_n)
        while blocks * split < self.programs and 2 * split * MIN_BLOCKS * self.block_k <= K:
            split *= 2
        return split


# One for one row, and two for any number, the fastest of 14 on an H100: each is compiled at load, which takes about as
# long as timing them
FORMS = (Form(4, 1024, 2), Form(64, 256, 4, 3, 264), Form(64, 128, 4, 5, 264, tiles=True))


class FewRowsWeight(PlainWeight):
    """A ``PlainWeight`` of which some products of few rows are computed by our kernels: those of as many rows as
    ``forms`` has a form for."""

    __slots__ = ("finished", "forms")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, forms: Sequence[Form | None]) -> None:
        super().__init__(weight, bias)
        self.forms = tuple(forms)
        self.finished = counters(weight, max((form.block_n for form in forms if form is not None), default=1))

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        form = self.forms[len(x)] if len(x) < len(self.forms) else None
        return super().matmul(x) if form is None else multiply(x, self.weight, self.bias, form, self.finished)


def counters(weight: torch.Tensor, block_n: int) -> torch.Tensor:
    """Return the zeros that the kernel counts finished programs in. Products that may run at the same time must not
    share them."""
    return torch.zeros(-(-len(weight) // block_n), dtype=torch.int32, device=weight.device)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: Form, finished: torch.Tensor
) -> torch.Tensor:
    """Multiply x [T, K] by ``weight`` [N, K] → [T, N] with the kernel that ``form`` is of."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import few_rows_kernel as kernel

    (rows, K), N = x.shape, len(weight)
    x, out = x.contiguous(), torch.empty(rows, N, dtype=x.dtype, device=x.device)
    known_bias = out if bias is None else bias
    same = {"HAS_BIAS": bias is not None, "BLOCK_N": form.block_n, "BLOCK_K": form.block_k}
    same |= {"WHOLE_K": K % form.block_k == 0, "num_warps": form.warps, "num_stages": form.stages}
    fetched = overlap.fetched(weight, PREFETCHED_WEIGHTS)
    if not form.programs:
        kernel.multiply_row[(-(-N // form.block_n),)](
            x, weight, known_bias, out, N, K, fetched, **same, **overlap.options(x.device)
        )
        return out
    split, block_m = form.split(N, K), max(16, 1 << (rows - 1).bit_length())
    partial = torch.empty(split, rows, N, device=x.device) if split > 1 else out
    tiles = TensorDescriptor.from_tensor(weight, [form.block_n, form.block_k]) if form.tiles else weight
    kernel.multiply[(-(-N // form.block_n), split)](
        x, weight, tiles, known_bias, out, partial, finished, rows, N, K, split, fetched,
        IN_PARTS=split > 1, IN_TILES=form.tiles, BLOCK_M=block_m, **same, **overlap.options(x.device),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Choice:
    """The forms chosen for a shape by numbers of rows, with the microseconds that torch's product and ours took."""

    N: int
    K: int
    forms: dict[int, Form | None]
    times: dict[int, tuple[float, float]]

    @property
    def text(self) -> str:
        """Return the numbers of rows that our kernels multiply, in one line."""
        rows = [
            f"{count} ({own:.1f} µs instead of {torchs:.1f})"
            for count, (torchs, own) in self.times.items()
            if self.forms[count] is not None
        ]
        return f"{self.N} x {self.K}: {', '.join(rows) or 'none'}"

    def by_count(self) -> list[Form | None]:
        """Return the form of each number of rows from 0 on: that of the next number that was timed."""
        found: list[Form | None] = [None]
        for count in sorted(self.forms):
            found += [self.forms[count]] * (count + 1 - len(found))
        return found


@dataclass(frozen=True, slots=True)
class Report:
    """The choices of ``install``, a line for each shape; ``reason``: why there are none, or not all."""

    lines: tuple[str, ...] = ()
    reason: str = ""


NOT_TIMED = Report(reason="there is no CUDA device")


def install(linears: LinearSet, settings: EngineSettings, device: Any, dtype: torch.dtype) -> Report:
    """Time the products of few rows of all linears in floats, up to the settings' max number of sequences, and have our
    kernels compute those that they compute faster."""
    if settings.batch_invariant:  # the same bits after a restart, which may measure otherwise
        return Report(reason="with batch_invariant nothing is chosen by its time")
    if reason := why_not_timed(device, dtype):
        return Report(reason=reason)
    forms, reason = usable_forms(device, dtype)
    if not forms:
        return Report(reason=reason)
    began, lines = time.monotonic(), []
    try:
        for groups in _by_shape(linears).values():
            choice = choose([weight for _, weight in groups], settings.max_num_seqs, forms)
            lines.append(choice.text)
            if any(choice.forms.values()):
                for group, weight in groups:
                    group.packed = FewRowsWeight(weight.weight, weight.bias, choice.by_count())
    except Exception as error:  # from Triton's compiler, the driver, or a recording
        failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        logger.warning("products of few rows were not all timed, so torch computes those left: %s", failed)
        return Report(tuple(lines), failed)
    logger.info(
        "products of few rows were timed in %.1f s; of outputs x inputs, our kernels compute these numbers of rows: %s",
        time.monotonic() - began,
        "; ".join(lines) or "none",
    )
    return Report(tuple(lines), reason)


def _by_shape(linears: LinearSet) -> dict[tuple[Any, ...], list[tuple[LinearGroup, PlainWeight]]]:
    """Return the groups of linears whose weights our kernels can read, with these, by shape."""
    found: dict[tuple[Any, ...], list[tuple[LinearGroup, PlainWeight]]] = {}
    for group in {id(one.group): one.group for one in linears.linears.values()}.values():
        packed = group.packed
        if isinstance(packed, PlainWeight) and packed.weight.is_contiguous() and packed.dtype in DTYPES:
            found.setdefault((*packed.weight.shape, packed.bias is None), []).append((group, packed))
    return found


def choose(weights: Sequence[PlainWeight], max_rows: int, forms: Sequence[Form] = FORMS) -> Choice:
    """Time the products of 1, 2, 4, … rows by weights of one shape, as torch and as ``forms`` compute them."""
    like = weights[0].weight
    (N, K), some = like.shape, _cold(weights)
    counts = [count for count in (1, 2, 4, 8, 16, MAX_ROWS) if count < 2 * max_rows]
    chosen: dict[int, Form | None] = {}
    times: dict[int, tuple[float, float]] = {}
    for count in counts:
        x = torch.randn(count, K, dtype=like.dtype, device=like.device)
        known = timed([partial(weight.matmul, x) for weight in some])
        own = {form: timed([_product(x, one, form) for one in some]) for form in forms if form.fits(count, K)}
        chosen[count] = None
        if own:
            best = min(own, key=own.__getitem__)
            chosen[count] = best if own[best] <= MAX_TIME_RATIO * known else None
            times[count] = known, own[best]
    return Choice(N, K, chosen, times)


def _cold(weights: Sequence[PlainWeight]) -> list[PlainWeight]:
    """Return as many weights as no cache holds, or all; one is taken twice."""
    each = weights[0].weight.numel() * weights[0].weight.element_size()
    some = list(weights[: min(max(-(-COLD_BYTES // each), 2), MAX_LAUNCHES)])
    return some * 2 if len(some) == 1 else some


def _product(x: torch.Tensor, weight: PlainWeight, form: Form) -> Callable[[], torch.Tensor]:
    return partial(multiply, x, weight.weight, weight.bias, form, counters(weight.weight, form.block_n))


def timed(products: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds of a product, recorded one after the other."""
    for product in products[:2]:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    graph.replay()
    took = []
    for _ in range(NUM_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return 1e3 * min(took) / len(products)


def why_not_timed(device: Any, dtype: torch.dtype) -> str:
    """Return why no products are timed on ``device``; empty if they are."""
    if device.type != "cuda":
        return NOT_TIMED.reason
    return "" if dtype in DTYPES else f"the model is in {str(dtype).removeprefix('torch.')}"


@cache
def usable_forms(device: Any, dtype: torch.dtype) -> tuple[tuple[Form, ...], str]:
    """Return the forms whose example agrees with torch's product, and why others do not."""
    if reason := triton_support.why_disabled(device):
        return (), reason
    reasons = {form: _why_not(form, device, dtype) for form in FORMS}
    for reason in set(filter(None, reasons.values())):
        logger.warning("a kernel of few rows is not used: %s", reason)
    return tuple(form for form, reason in reasons.items() if not reason), next(filter(None, reasons.values()), "")


def _why_not(form: Form, device: Any, dtype: torch.dtype) -> str:
    make, (N, K) = torch.Generator().manual_seed(0), EXAMPLE
    weight = torch.randn(N, K, generator=make).to(device, dtype)
    for rows in (1, 3, MAX_ROWS):
        x = torch.randn(rows, K, generator=make).to(device, dtype)
        if form.fits(rows, K) and (
            reason := triton_support.why_wrong(
                partial(multiply, x, weight, None, form, counters(weight, form.block_n)),
                partial(F.linear, x.float(), weight.float()),
                TOLERANCE.get(dtype, 0.01),
                "the product of few rows",
            )
        ):
            return reason
    return ""
