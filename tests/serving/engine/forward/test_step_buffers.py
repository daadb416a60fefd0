"""The input of a recorded step: what is laid out, and how little is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape, PrefixKey, Row
from mlflow_llm.serving.engine.attention.paged.cache import PagedKVCache
from mlflow_llm.serving.engine.forward import step_buffers
from mlflow_llm.serving.engine.forward.step_buffers import StepBuffers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cache() -> PagedKVCache:
    made = PagedKVCache(
        [LayerShape(1, 4, 4)], num_tokens=256, max_model_len=64, dtype=torch.float32, block_size=4, device=DEVICE
    )
    for owner, size in enumerate((3, 10, 21)):
        made.acquire(owner, PrefixKey("", ""), np.arange(100 * owner, 100 * owner + size, dtype=np.int32))
        made.grow(owner, size + 1)
    return made


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Provide the sizes of what is staged for the device."""
    sizes: list[int] = []
    staging: Callable[..., Any] = step_buffers.staging

    def noted(size: int, dtype: Any, device: Any) -> Any:
        sizes.append(size)
        return staging(size, dtype, device)

    monkeypatch.setattr(step_buffers, "staging", noted)
    return sizes


def fill(buffers: StepBuffers, cache: PagedKVCache, owners: dict[int, int]) -> None:
    """Lay out a token of each of ``owners``, at its position, and check every buffer but the tables' unused part."""
    rows = [Row(owner, start, 1) for owner, start in owners.items()]
    ids = torch.arange(7, 7 + len(rows), device=DEVICE)
    buffers.fill(ids, rows)
    more = [0] * (buffers.ids.shape[1] - len(rows))
    tables = [cache.blocks_of(row.owner) for row in rows]
    indexes = [table[row.start // 4] * 4 + row.start % 4 for row, table in zip(rows, tables, strict=True)]
    assert buffers.ids[0, : len(rows)].tolist() == ids.tolist()
    assert buffers.positions[0].tolist() == [row.start for row in rows] + more
    assert buffers.tables.indexes.tolist() == indexes + more
    assert buffers.tables.lengths.tolist() == [row.start + 1 for row in rows] + [1 for _ in more]
    for i, table in enumerate(tables):
        assert buffers.tables.block_tables[i, : len(table)].tolist() == table
    assert buffers.tables.block_tables[len(rows) :, 0].tolist() == more


def test_a_step_is_one_copy_while_no_block_is_new(cache: PagedKVCache, copied: list[int]) -> None:
    """Positions, places and lengths are one copy; tables are another only when a row has a new block or owner."""
    buffers = StepBuffers(cache, 3)
    assert buffers.tables.lengths.tolist() == [1, 1, 1]  # of a step that nothing was laid out for
    fill(buffers, cache, {0: 3, 1: 10, 2: 21})
    assert copied == [3 * 6, 8]
    copied.clear()
    fill(buffers, cache, {0: 3, 1: 11, 2: 22})
    assert copied == [8]
    cache.grow(1, 13)
    fill(buffers, cache, {0: 3, 1: 12, 2: 23})
    assert copied == [8, 3 * 6, 8]
    copied.clear()
    fill(buffers, cache, {1: 12, 0: 3})
    fill(buffers, cache, {1: 12, 0: 3})
    assert copied == [3 * 4, 8, 8]


def test_blocks_that_change_in_place_are_laid_out_anew(cache: PagedKVCache) -> None:
    """A sequence that took over another's blocks, as beams do, and one that lost its own and came back, have theirs."""
    buffers = StepBuffers(cache, 4)
    fill(buffers, cache, {0: 3, 1: 10, 2: 21})
    before = cache.blocks_of(1)
    cache.grow(2, 30)
    cache.copy(2, 1, 0, 12)
    assert cache.blocks_of(1) != before
    fill(buffers, cache, {0: 3, 1: 11, 2: 29})
    cache.release(0, keep=False)
    cache.release(1, keep=False)
    for owner in (1, 0):
        cache.acquire(owner, PrefixKey("", ""), np.arange(50, 55, dtype=np.int32))
        cache.grow(owner, 6)
    fill(buffers, cache, {0: 5, 1: 5})
    fill(buffers, cache, {2: 29})
