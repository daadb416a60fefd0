"""Programmatic dependent launch in Triton kernels: a kernel that starts while the one before it still runs.

::

    before   ├──── runs ────┤
    kernel        ├ begins ┤·····waits·····├──── runs ────┤
                    weights come nearer, which the one before does not write

Until it has waited, a kernel neither reads what other kernels write nor writes anything. Each waits, so all that came
earlier has ended too. The instructions exist from compute capability 9.0 on; ``OVERLAP`` says whether they are used."""

from __future__ import annotations

import triton
import triton.language as tl

# The first $3 threads fetch $4 bytes each to the second level of cache, from $1 on and $2 bytes apart.
PREFETCH = tl.constexpr("""{
.reg .pred wanted;
.reg .b32 thread;
.reg .b64 from;
mov.u32 thread, %tid.x;
setp.lt.u32 wanted, thread, $3;
mad.wide.u32 from, thread, $2, $1;
@wanted cp.async.bulk.prefetch.L2.global [from], $4;
mov.b32 $0, 0;
}""")


@triton.jit
def begin(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel begin, and wait for the one before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_with(weights: tl.tensor, stride: tl.tensor, rows: tl.tensor, size: tl.tensor, OVERLAP: tl.constexpr) -> None:
    """Do the same, and meanwhile fetch ``size`` weights of each of ``rows`` rows, ``stride`` weights apart. There are
    at most as many rows as threads, and all of it is aligned to 16 bytes."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if size > 0:
            each: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
            numbers = [weights.to(tl.int64), stride * each, rows, size * each]
            tl.inline_asm_elementwise(PREFETCH, "=r,l,r,r,r", numbers, dtype=tl.int32, is_pure=False, pack=1)
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_neighbours(x: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    """Write each program's block as the next program's block of x plus its number; the trial of it all."""
    begin(OVERLAP)
    block, at = tl.program_id(0), tl.arange(0, BLOCK)
    other = (block + 1) % tl.num_programs(0)
    tl.store(out + block * BLOCK + at, tl.load(x + other * BLOCK + at) + block)
