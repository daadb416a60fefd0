"""Compilation of every Triton kernel for Hopper to machine code, which needs no GPU. Run by
``test_kernels_compile``, because kernels cannot be compiled in a process that chose the interpreter."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mlflow_llm.serving.engine.adapters import slots_kernel as adapters
from mlflow_llm.serving.engine.attention import rotation_kernel as rotation
from mlflow_llm.serving.engine.attention.paged import decode_kernel as decode
from mlflow_llm.serving.engine.attention.paged import prefill_kernel as prefill
from mlflow_llm.serving.engine.attention.paged import wide_kernel as wide_heads
from mlflow_llm.serving.engine.attention.paged import write_kernel as write
from mlflow_llm.serving.engine.attention.rotation import UNFUSED
from mlflow_llm.serving.engine.devices import overlap_kernel as overlap
from mlflow_llm.serving.engine.models.fused import experts_kernel as experts
from mlflow_llm.serving.engine.models.fused import kernels as fused
from mlflow_llm.serving.engine.sampling import adjustment_kernel as adjustment
from mlflow_llm.serving.engine.sampling import device_sampling_kernel as race
from mlflow_llm.serving.engine.sampling import greedy_kernel as greedy
from mlflow_llm.serving.engine.sampling import top_logits_kernel as top
from mlflow_llm.serving.engine.weights import few_rows_kernel, fp8_kernel, fp8_rows_kernel, int4_kernel

HALF, FLOAT, BYTE, INT, LONG = "*bf16", "*fp32", "*u8", "*i32", "*i64"


def build(kernel: Any, types: list[str], options: dict[str, Any] | None = None, **constants: Any) -> Any:
    names = kernel.arg_names
    others = [name for name in names if name not in constants]
    signature = dict.fromkeys(names, "constexpr") | dict(zip(others, types, strict=True))
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    if constants.get("OVERLAP"):
        assert "griddepcontrol.wait" in compiled.asm["ptx"]
    print(kernel.__name__)
    return compiled


heads = {"HKV": 8, "GROUP": 4, "D": 128, "DV": 128, "GROUP_PADDED": 16, "D_PADDED": 128, "DV_PADDED": 128}
split = {"BLOCK_SIZE": 16, "SPLIT": 256, "TILE": decode.TILE, "HAS_SOFTCAP": True}
arrays = [HALF, HALF, HALF, INT, INT, FLOAT, FLOAT, FLOAT]
build(decode.decode_split, [*arrays, "fp32", "fp32", *["i32"] * 4], **heads, **split, OVERLAP=True)
arrays = [FLOAT, FLOAT, FLOAT, FLOAT, INT, HALF]
heads_of = {"H": 32, "DV": 128, "SPLIT": 256, "DV_PADDED": 128}
build(decode.merge_splits, [*arrays, "i32", "i32"], HAS_SINKS=True, OVERLAP=True, **heads_of)
several = {"BLOCK_SIZE": 16, "ROWS": 128, "TILE": 64, "HAS_SOFTCAP": True, "HAS_SINKS": True}
wide = {name: value for name, value in heads.items() if name != "GROUP_PADDED"}
arrays = [HALF, HALF, HALF, INT, INT, INT, FLOAT, HALF]
options = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}  # as ``chunks`` has them for 16 bits
build(prefill.attend_chunks, [*arrays, "fp32", "fp32", *["i32"] * 4], options, **wide, **several)
build(race.exponentials, [LONG, FLOAT, "i32"], BLOCK=1024)
build(race.exponentials_at, [LONG, LONG, FLOAT, "i32"], BLOCK=1024)
build(race.race, [HALF, LONG, FLOAT, FLOAT, FLOAT, FLOAT, LONG, "i32", "i32"], BLOCK=1024)
search = {"CHUNKS": 32, "RANGE": 40.0, "PARTS": 8, "DIGITS": 8}
sums = {"BLOCK": 4096, "TILE": 1024}
build(race.sums_of_parts, [HALF, *[FLOAT] * 6, "*fp64", *["i32"] * 4], **sums, **search)
build(race.nucleus, [FLOAT, "*fp64", *[FLOAT] * 6, "i32"], SEARCHED=True, **search)
build(race.mean_distance, [HALF, *[FLOAT] * 5, "i32", "i32"], TILE=4096, RANGE=40.0)
build(race.typical, [FLOAT, "*fp64", *[FLOAT] * 7, "i32"], **search)
build(race.race_limited, [FLOAT, LONG, LONG, FLOAT, "*fp64", LONG, "i32"], PADDED=64)
build(top.largest_of_parts, [HALF, FLOAT, FLOAT, "i32", "i32"], PART=512, PARTS=8)
build(top.bound_of_row, [FLOAT, FLOAT, FLOAT, FLOAT, INT, "i32", "i32"], PARTS=8, PADDED=256)
build(top.candidates, [HALF, FLOAT, INT, LONG, "i32", "i32"], ROOM=256, BLOCK=4096)
build(top.sort_candidates, [HALF, INT, LONG, FLOAT, LONG, "i32", "i32", "i32"], ROOM=256, BLOCK=1024)
build(adjustment.penalize, [HALF, INT, LONG, FLOAT, FLOAT, "i32", "i32"], BLOCK=2048)
build(greedy.largest_of_chunk, [HALF, FLOAT, INT, "i32", "i32"], BLOCK=4096, OVERLAP=True)
build(greedy.largest_of_row, [FLOAT, INT, LONG, "i32"], PADDED=32, OVERLAP=True)
turned = {"H": 32, "HKV": 8, "HALF": 64, "HALF_PADDED": 64, "HEADS": 8}
rotations = [
    build(rotation.rotate, [HALF] * 6 + ["i32"] * 4, UNFUSED, **turned),
    build(
        write.rotate_and_write,
        [HALF] * 8 + [LONG] + ["i32"] * 6,
        UNFUSED,
        DV=128,
        DV_PADDED=128,
        OVERLAP=True,
        **turned,
    ),
]
for compiled in rotations:  # a fused product and sum round once less than torch
    assert "mul.rn.bf16" in compiled.asm["ptx"]
    assert "fma" not in compiled.asm["ptx"]
for quantize in (False, True):
    rows = {"N": 3072, "PADDED": 4096, "QUANTIZE": quantize, "OVERLAP": not quantize}
    build(fused.rms_norm, [HALF, HALF, HALF, BYTE, FLOAT, "fp32"], **rows)
    build(fused.add_rms_norm, [HALF, HALF, HALF, HALF, HALF, BYTE, FLOAT, "fp32"], **rows)
    rows = {"BLOCK": 1 << 14 if quantize else 1024, "QUANTIZE": quantize, "OVERLAP": not quantize}
    build(fused.silu_gate, [HALF, HALF, HALF, BYTE, FLOAT, "i32", "i32", "i32"], **rows)
build(fp8_rows_kernel.quantize, [HALF, BYTE, FLOAT, "i32", "i32"], BLOCK=4096)
each = {"HKV": 8, "D": 128, "DV": 128, "HKV_PADDED": 8, "D_PADDED": 128, "DV_PADDED": 128}
build(write.write_kv, [HALF] * 4 + [LONG] + ["i32"] * 4, **each)
for rows, split, way, floats in ((16, 1, "packed", HALF), (64, 4, "native", HALF), (32, 2, "shift", "*fp16")):
    several = {"SPLIT": split, "BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "WHOLE_K": True, "DECODE": way}
    several |= {"HAS_BIAS": True, "OVERLAP": split > 1}
    arrays = [floats, BYTE, FLOAT, FLOAT, floats, FLOAT, INT]
    for tiles in (BYTE, "tensordesc<u8[64, 128]>"):
        types = [*arrays[:2], tiles, *arrays[2:], "i32", "i32", "i32", "i32"]
        build(fp8_kernel.multiply, types, IN_TILES=tiles != BYTE, **several)
    several = {"BLOCK_N": 4, "BLOCK_K": 1024, "WHOLE_K": True, "DECODE": way, "OVERLAP": split > 1}
    build(fp8_kernel.multiply_row, [*arrays[:5], "i32", "i32", "i32"], HAS_BIAS=True, **several)
build(overlap.add_neighbours, [FLOAT, FLOAT], BLOCK=256, OVERLAP=True)
for parts, tiles in ((True, HALF), (False, "tensordesc<bf16[64, 128]>")):
    several = {"IN_PARTS": parts, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "IN_TILES": not parts}
    several |= {"HAS_BIAS": True, "WHOLE_K": True, "OVERLAP": True}
    arrays = [HALF, HALF, tiles, HALF, HALF, FLOAT, INT]
    build(few_rows_kernel.multiply, [*arrays, *["i32"] * 5], **several)
    several = {"HAS_BIAS": True, "BLOCK_N": 4, "BLOCK_K": 512, "WHOLE_K": parts, "OVERLAP": parts}
    build(few_rows_kernel.multiply_row, [HALF, HALF, HALF, HALF, "i32", "i32", "i32"], **several)
for way, weights in (("", HALF), ("native", BYTE), ("packed", BYTE)):
    more = {"HAS_BIAS": True, "DECODE": way, "TOP": 8}
    for step in (experts.few_up, experts.grouped_up):
        sizes = {"BLOCK_N": 4, "BLOCK_K": 1024} if step is experts.few_up else {"BLOCK_N": 32, "BLOCK_K": 128}
        sizes |= {} if step is experts.few_up else {"BLOCK_M": 16, "CHUNK": 128}
        numbers = ["i32"] * 9 + ["fp32", "fp32"] + ([] if step is experts.few_up else ["i32"])
        build(step, [HALF, LONG, weights, FLOAT, HALF, HALF, *numbers], GATE=2, **more, **sizes)
    arrays, sizes = [HALF, HALF, LONG, HALF, weights, FLOAT, HALF, HALF], {"BLOCK_N": 2, "BLOCK_K": 1024}
    build(experts.few_down, [*arrays, *["i32"] * 6], IDENTITY=True, **more, **sizes)
    sizes = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "CHUNK": 128}
    arrays = [HALF, LONG, weights, FLOAT, HALF, HALF, *["i32"] * 7]
    build(experts.grouped_down, arrays, HAS_BIAS=True, DECODE=way, **sizes)
build(experts.combine, [HALF, HALF, LONG, HALF, HALF, "i32", "i32"], TOP=8, IDENTITY=True, BLOCK=512)
arrays = [HALF, HALF, HALF, INT, INT, FLOAT, FLOAT, FLOAT, "fp32", "fp32", *["i32"] * 4]
split = {"BLOCK_SIZE": 16, "SPLIT": 256, "TILE": 32, "HAS_SOFTCAP": True}
latent = {"HKV": 1, "GROUP": 128, "D": 576, "DV": 512, "REST_DIM": 64, "REST_PADDED": 64, "SHARED": True}
main = {"MAIN_DIM": 512, "MAIN_PADDED": 512, "DV_PADDED": 512}
build(wide_heads.decode_wide, arrays, **split, **latent, **main, HEADS=16)
plain = {"HKV": 2, "GROUP": 4, "D": 512, "DV": 512, "REST_DIM": 0, "REST_PADDED": 16, "SHARED": False}
build(wide_heads.decode_wide, arrays, **split, **plain, **main, HEADS=16)
sizes = {"MEMBERS": 3, "SPLITS": 2, "MAX_RANK": 64, "RANK_BLOCK": 16}
arrays = [HALF, INT, LONG, INT, FLOAT]
build(adapters.shrink, [*arrays, "i32", "i32", "i32"], SPLIT_K=1024, BLOCK_K=256, **sizes)
arrays = [FLOAT, INT, LONG, INT, FLOAT, INT, HALF]
build(adapters.expand, [*arrays, "i32", "i32", "i32", "i32"], BLOCK_N=256, **sizes)
for rows, split, way in ((16, 4, True), (64, 1, False)):
    several = {
        "SPLIT": split,
        "BLOCK_M": rows,
        "BLOCK_N": 64,
        "CHUNK": 128,
        "GROUP": 128,
        "PACKED": way,
        "OVERLAP": way,
    }
    arrays = [HALF, BYTE, "*fp16", BYTE, FLOAT, HALF, FLOAT, INT]
    build(int4_kernel.multiply, [*arrays, "i32", "i32", "i32", "i32"], HAS_BIAS=True, **several)
several = {"BLOCK_N": 64, "CHUNK": 128, "GROUP": 128}
build(int4_kernel.dequantize, [BYTE, "*fp16", BYTE, HALF, "i32", "i32"], **several)
