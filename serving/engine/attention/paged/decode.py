"""Attention of single tokens over block tables, by the Triton kernels if they run, else by torch.

The split depends only on the model's context length and heads, and splits are merged in order, so a row has the same
bits alone and in any batch."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ...devices import overlap
from ..kv_cache import AttentionArgs
from ..slot_attention import attend_unfused
from . import kernel_trial

MAX_SPLITS = 64  # for the longest sequence
MIN_SPLIT_TOKENS = 256  # tokens
MAX_WIDE_HEAD_DIM = 576  # of DeepSeek's latent keys; a program's sums are in registers
TARGET_PROGRAMS = 1024  # fills a device; a row's splits get programs of their own only while the grid is smaller
MAX_ROW_BYTES = 4 << 20  # of the sums of a row's splits; there are more than MAX_SPLITS where these are smaller


def split_tokens(max_model_len: int, sums: int) -> int:
    """Return the number of tokens in a split, with ``sums`` numbers in all heads: a power of two, the same for every
    sequence of a layer. One sequence alone fills a device by its splits."""
    most = max(MAX_SPLITS, MAX_ROW_BYTES // (4 * sums))
    split = MIN_SPLIT_TOKENS
    while split * most < max_model_len:
        split *= 2
    return split


def is_offered(k: Any, v: Any, q: Any) -> bool:
    """Return whether the kernels run on this device and match the reference for such heads."""
    return not why_not(k, v, q.shape[1] // k.shape[2])


def why_not(k: Any, v: Any, group: int) -> str:
    """Return why the kernels do not run over blocks like ``k`` and ``v`` with ``group`` query heads per KV head; "" if
    they do."""
    if not is_wide(k, v, group):
        return kernel_trial.why_not(k, v, group, probe)
    return kernel_trial.why_not(k, v, group, partial(probe, shared=is_shared(k, v)), MAX_WIDE_HEAD_DIM, group)


def is_wide(k: Any, v: Any, group: int) -> bool:
    """Return whether it is the kernel for wide heads, large groups or latent keys that attends."""
    wide = max(k.shape[-1], v.shape[-1]) > kernel_trial.MAX_HEAD_DIM or group > kernel_trial.MAX_GROUP_HEADS
    return wide or is_shared(k, v)


def is_shared(k: Any, v: Any) -> bool:
    """Return whether the values are the keys' first numbers, in the same memory."""
    return v.shape[-1] < k.shape[-1] and bool(v.data_ptr() == k.data_ptr())


@cache
def probe(
    device: Any, dtype: Any, block_size: int, group: int, key_dim: int, value_dim: int, shared: bool = False
) -> str:
    """Probe the kernels with two rows, one of them in two splits."""
    make = torch.Generator().manual_seed(0)
    k, v = (torch.randn(20, block_size, 1, dim, generator=make).to(device, dtype) for dim in (key_dim, value_dim))
    v = k[..., :value_dim] if shared else v
    q = torch.randn(2, group, key_dim, generator=make).to(device, dtype)
    tables = torch.arange(19, -1, -1, dtype=torch.int32, device=device).repeat(2, 1)
    lengths = torch.tensor([1, block_size * 19 + 3], dtype=torch.int32, device=device)
    example = (q, k, v, tables, lengths, AttentionArgs(key_dim**-0.5))
    return kernel_trial.why_wrong(
        lambda: attend_split(*example, longest=block_size * 20, split=block_size * 16),
        lambda: attend(*example),
        dtype,
        "paged attention falls back to torch, one row at a time",
    )


def attend(
    q: Any,
    k: Any,
    v: Any,
    block_tables: Any,
    lengths: Any,
    args: AttentionArgs,
    *,
    longest: int = 0,
    split: int = 0,
) -> Any:
    """Compute q [B, H, D] over k, v [blocks, block size, Hkv, D] → [B, H, Dv] row by row, as the reference.

    ``block_tables`` int32 [B, n]; ``lengths`` int32 [B], including a row's own token."""
    size, Hkv = k.shape[1], k.shape[2]
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    window = args.window
    unfused = args if args.sinks is None else args._replace(sinks=args.sinks.view(Hkv, -1, 1))
    for row, length in enumerate(lengths.tolist()):
        lo = max(length - window, 0) if window else 0
        first = lo // size
        blocks = block_tables[row, first : -(-length // size)]
        keys, values = (
            cube[blocks].flatten(0, 1)[lo - first * size : length - first * size].transpose(0, 1) for cube in (k, v)
        )
        packed = q[row].reshape(Hkv, -1, q.shape[-1])
        if args.is_plain:
            some = F.scaled_dot_product_attention(packed[None], keys[None], values[None], scale=args.scaling)[0]
        else:
            some = attend_unfused(packed, keys, values, None, unfused)
        out[row] = some.flatten(0, 1)
    return out


def attend_split(
    q: Any,
    k: Any,
    v: Any,
    block_tables: Any,
    lengths: Any,
    args: AttentionArgs,
    *,
    longest: int,
    split: int,
) -> Any:
    """Compute the same by the kernels, for sequences of at most ``longest`` tokens in splits of ``split``."""
    from . import decode_kernel as kernel
    from . import wide_kernel

    scaling, window, softcap, sinks = args
    B, H, D = q.shape
    size, Hkv, Dv = k.shape[1], k.shape[2], v.shape[-1]
    q = q.contiguous()
    splits = max(-(-longest // split), 1)
    sums = torch.empty(B, H, splits, Dv, dtype=torch.float32, device=q.device)
    largest, total = torch.empty(2, B, H, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, Dv, dtype=q.dtype, device=q.device)
    widths = {"D_PADDED": kernel.padded(D), "DV_PADDED": kernel.padded(Dv)}
    wide = _wide_options(k, v) if is_wide(k, v, H // Hkv) else None
    heads = Hkv if wide is None else Hkv * -(-(H // Hkv) // wide["HEADS"])
    programs = min(splits, max(TARGET_PROGRAMS // (B * heads), 1))
    arrays = (q, k, v, block_tables, lengths, sums, largest, total)
    numbers = (scaling, softcap or 0.0, window or 0, block_tables.stride(0), programs, splits)
    same = {"HKV": Hkv, "GROUP": H // Hkv, "D": D, "DV": Dv, "BLOCK_SIZE": size, "SPLIT": split}
    same["HAS_SOFTCAP"] = softcap is not None
    if wide is not None:
        wide_kernel.decode_wide[(B, heads, programs)](*arrays, *numbers, **same, **wide)
    else:
        kernel.decode_split[(B, heads, programs)](
            *arrays,
            *numbers,
            **same,
            TILE=kernel.TILE,
            GROUP_PADDED=kernel.padded(H // Hkv),
            **widths,
            **overlap.options(q.device),
        )
    kernel.merge_splits[(B, H)](
        sums, largest, total, out if sinks is None else sinks.float().contiguous(), lengths, out, window or 0, splits,
        H=H, DV=Dv, SPLIT=split, HAS_SINKS=sinks is not None, DV_PADDED=widths["DV_PADDED"],
        **overlap.options(q.device),
    )  # fmt: skip
    return out


def _wide_options(k: Any, v: Any) -> dict[str, Any]:
    from . import wide_kernel
    from .decode_kernel import padded

    D, Dv, shared = k.shape[-1], v.shape[-1], is_shared(k, v)
    tile, heads = wide_kernel.sizes(shared=shared, half=k.element_size() == 2)
    main = Dv if shared else 1 << (D.bit_length() - 1)  # the largest power of two in D
    return {
        "TILE": tile,
        "HEADS": heads,
        "MAIN_DIM": main,
        "MAIN_PADDED": padded(main),
        "REST_DIM": D - main,
        "REST_PADDED": padded(max(D - main, 1)),
        "DV_PADDED": padded(Dv),
        "SHARED": shared,
    }
