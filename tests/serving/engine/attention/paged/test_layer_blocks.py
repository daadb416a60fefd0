"""The write of keys and values into blocks by a Triton kernel: what torch writes, or not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape
from mlflow_llm.serving.engine.attention.paged import layer_blocks
from mlflow_llm.serving.engine.attention.paged.layer_blocks import LayerBlocks
from mlflow_llm.serving.engine.devices import triton_support

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("num_kv_heads", "key_dim", "value_dim"), [(1, 16, 16), (3, 24, 40)])
def test_the_kernel_writes_what_torch_writes(num_kv_heads: int, key_dim: int, value_dim: int) -> None:
    """Strided keys and values are at their places, and nothing else has changed."""
    shape = LayerShape(num_kv_heads, key_dim, value_dim)
    by_torch, by_kernel = (LayerBlocks.of(shape, 6, 8, torch.float32, DEVICE) for _ in range(2))
    k, v = (torch.randn(1, 5, num_kv_heads, dim, device=DEVICE).transpose(1, 2)[0] for dim in (key_dim, value_dim))
    places = torch.tensor([9, 10, 47, 0, 23], device=DEVICE)
    by_torch.write(places, k, v)
    by_kernel.write_by_kernel(places, k, v)
    assert torch.equal(by_kernel.k, by_torch.k)
    assert torch.equal(by_kernel.v, by_torch.v)
    assert by_kernel.k.count_nonzero() == k.numel()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial finds a kernel that fails or writes something else; without a device it is not tried."""
    asked = torch.device("cpu"), torch.float32
    assert not layer_blocks.write_is_offered(*asked)
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)

    def broken(*args: Any) -> None:
        raise OSError("no compiler")

    for wrong in (broken, lambda *args: None):
        layer_blocks.writes_right.cache_clear()
        monkeypatch.setattr(LayerBlocks, "write_by_kernel", wrong)
        assert not layer_blocks.write_is_offered(*asked)
    layer_blocks.writes_right.cache_clear()
