"""Triton's kernels compile to machine code of a GPU, which its interpreter does not try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "native" / "compile_kernels.py"


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """Every kernel compiles for Hopper and bfloat16; that of rotary embeddings has no fused multiply-add."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from mlflow_llm.serving.engine.adapters import slots_kernel
    from mlflow_llm.serving.engine.attention import rotation_kernel
    from mlflow_llm.serving.engine.attention.paged import decode_kernel, prefill_kernel, wide_kernel, write_kernel
    from mlflow_llm.serving.engine.devices import overlap_kernel
    from mlflow_llm.serving.engine.models.fused import experts_kernel
    from mlflow_llm.serving.engine.models.fused import kernels as fused_kernels
    from mlflow_llm.serving.engine.sampling import (
        adjustment_kernel,
        device_sampling_kernel,
        greedy_kernel,
        top_logits_kernel,
    )
    from mlflow_llm.serving.engine.weights import few_rows_kernel, fp8_kernel, fp8_rows_kernel, int4_kernel

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    attention = (decode_kernel, prefill_kernel, write_kernel, rotation_kernel)
    modules = (*attention, device_sampling_kernel, greedy_kernel, fp8_kernel, fp8_rows_kernel, fused_kernels)
    modules += (experts_kernel, wide_kernel, slots_kernel, int4_kernel, adjustment_kernel, top_logits_kernel)
    modules += (few_rows_kernel, overlap_kernel)
    kinds = (InterpretedFunction, JITFunction)
    functions = {name for one in modules for name, value in vars(one).items() if isinstance(value, kinds)}
    called = {
        "begin",
        "begin_with",
        "bits",
        "block_bits",
        "codes",
        "decoded",
        "fold",
        "gated",
        "members_of",
        "rank_of",
        "halves",
        "joined",
        "quantize_row",
        "scale_of",
        "scales_at",
        "part_found",
        "width_found",
        "key_of",
        "value_of",
        "token_of",
        "time_of",
        "turn",
        "turn_heads",
        "weights_at",
        "write_normed",
        "words",
    }  # by others
    assert set(done.stdout.split()) == functions - called
