"""The paged KV cache: whatever is shared, copied, evicted or forked, a sequence reads the KV of its own tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape, PrefixKey, Row
from mlflow_llm.serving.engine.attention.paged.cache import PagedKVCache
from mlflow_llm.serving.engine.attention.paged.chunks import gathered
from mlflow_llm.serving.engine.attention.slot_table import common_prefix

KEYS = [PrefixKey(adapter, salt) for adapter in ("", "x#1") for salt in ("s", "t")]
SIZE = 8


def make_cache(num_tokens: int = 30 * SIZE, **more: Any) -> PagedKVCache:
    return PagedKVCache(
        [LayerShape(2, 4, 4)], num_tokens=num_tokens, max_model_len=128, dtype=torch.float64, block_size=SIZE, **more
    )


def tokens_of(*ids: int) -> Any:
    return np.array(ids, dtype=np.int32)


def expected(key: PrefixKey, tokens: Any) -> Any:
    """Return a stand-in for each token's KV: a number computed from the key and all tokens up to it."""
    total, found = float(KEYS.index(key) + 1), []
    for token in tokens.tolist():
        total = (total * 31 + token) % 1_000_003
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


def write(cache: PagedKVCache, owner: int, key: PrefixKey, tokens: Any, start: int) -> None:
    """Write KV as a forward of ``tokens`` from ``start`` on does."""
    if start < len(tokens):
        values = expected(key, tokens)[start:, None].expand(-1, 4)
        plan = cache.plan([Row(owner, start, len(tokens) - start)])
        cache.layers[0].write(plan.tables.indexes, values.expand(2, -1, -1), -values.expand(2, -1, -1))
    cache.computed(owner, tokens, len(tokens))


def read(cache: PagedKVCache, owner: int, length: int) -> Any:
    layer, blocks = cache.layers[0], torch.tensor(cache.blocks_of(owner))
    k, v = (gathered(cube, blocks, 0, length) for cube in (layer.k, layer.v))
    assert torch.equal(k, -v)
    return k[1, :, 3]


def test_every_sequence_reads_its_own() -> None:
    """Over thousands of random starts, growths, forks, releases and evictions, reused KV is of the very same tokens,
    adapter and salt, nobody writes into shared blocks, and the accounts add up."""
    random.seed(3)
    cache = make_cache(num_tokens=18 * SIZE)
    running: dict[int, tuple[PrefixKey, Any]] = {}
    hits = forks = refused = 0
    for owner in range(800):
        key = random.choice(KEYS)
        tokens = tokens_of(*[random.randrange(2)] * 18, *(random.randrange(2) for _ in range(random.randrange(1, 16))))
        source = random.choice(list(running)) if running and random.random() < 0.3 else None
        if source is not None:
            key, tokens = running[source][0], np.append(running[source][1], np.int32(random.randrange(3)))
        length = cache.acquire(owner, key, tokens, source=source)
        if length is not None:
            hits += length > 0
            write(cache, owner, key, tokens, length)
            running[owner] = key, tokens
        refused += length is None
        for one in list(running):
            key, tokens = running[one]
            if random.random() < 0.5 and cache.grow(one, len(tokens) + 1) and len(tokens) < 120:
                running[one] = key, np.append(tokens, np.int32(random.randrange(2)))
                write(cache, one, *running[one], len(tokens))
        if len(running) > 1 and random.random() < 0.5:  # two beams: one continues from the other's tokens
            one, other = random.sample(list(running), 2)
            (key, tokens), (whose, others) = running[one], running[other]
            common = common_prefix(tokens, others)
            if key == whose and common and cache.grow(other, len(tokens)) and cache.pool.num_available:
                cache.copy(one, other, common, len(tokens))
                cache.computed(other, tokens, len(tokens))
                running[other] = running[one]
                forks += 1
        while len(running) > random.randrange(6):
            oldest = next(iter(running))
            cache.release(oldest, keep=random.random() < 0.8)
            del running[oldest]
        if random.random() < 0.01:
            cache.forget("x#1")
        cache.check_integrity()
        for one, (key, tokens) in running.items():
            assert torch.equal(read(cache, one, len(tokens)), expected(key, tokens))
    assert (hits > 100, forks > 20, refused > 5) == (True, True, True)


def test_whole_blocks_are_shared_and_the_last_is_copied() -> None:
    """A prompt that is running lends its whole blocks by reference: 3 sequences of 20 tokens take 2 blocks and 3."""
    cache = make_cache()
    tokens = tokens_of(*range(20))
    assert cache.acquire(0, KEYS[0], tokens) == 0
    write(cache, 0, KEYS[0], tokens, 0)
    assert [cache.acquire(owner, KEYS[0], tokens) for owner in (1, 2)] == [19, 19]
    first, second, third = (cache.blocks_of(owner) for owner in range(3))
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert cache.num_tokens_used == 5 * SIZE


def test_memory_is_counted_in_blocks() -> None:
    """A request that does not fit into whole blocks is refused without side effects; idle blocks are evicted from the
    end of a prompt."""
    cache = make_cache(num_tokens=4 * SIZE + 3)
    assert cache.num_tokens_total == 4 * SIZE
    assert cache.acquire(0, KEYS[0], tokens_of(*range(33))) is None
    assert cache.acquire(0, KEYS[0], tokens_of(*range(25))) == 0
    assert cache.grow(0, 32)
    assert not cache.grow(0, 33)
    write(cache, 0, KEYS[0], tokens_of(*range(25)), 0)
    cache.release(0, keep=True)
    assert cache.match(KEYS[0], tokens_of(*range(25))) == (24, None)
    assert cache.acquire(1, KEYS[1], tokens_of(*range(10))) == 0
    assert cache.match(KEYS[0], tokens_of(*range(25))) == (16, None)
    cache.check_integrity()


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    """A prompt like a running one's waits until its prefix is computed, under the same key alone."""
    cache = make_cache()
    tokens = tokens_of(*range(60))
    cache.acquire(0, KEYS[0], tokens)
    assert [cache.match(key, tokens) for key in KEYS[:2]] == [(0, 0), (0, None)]
    write(cache, 0, KEYS[0], tokens, 0)
    assert cache.match(KEYS[0], tokens) == (59, None)


def test_wiped_blocks_are_never_reused() -> None:
    """Blocks with numbers that are not finite are removed from the pool's cache and from the prefix tree."""
    cache = make_cache()
    tokens = tokens_of(*range(20))
    cache.acquire(0, KEYS[0], tokens)
    cache.layers[0].k[cache.blocks_of(0)] = float("nan")
    cache.computed(0, tokens, 20)
    cache.wipe(0)
    cache.release(0, keep=True)
    assert cache.match(KEYS[0], tokens) == (0, None)
    assert bool(torch.isfinite(cache.layers[0].k).all())
    cache.check_integrity()


def test_without_prefix_caching_only_forks_share() -> None:
    """Without prefix caching nothing is found by its tokens, while a beam still shares its root's blocks."""
    cache = make_cache(prefix_caching=False)
    tokens = tokens_of(*range(20))
    cache.acquire(0, KEYS[0], tokens)
    write(cache, 0, KEYS[0], tokens, 0)
    assert cache.acquire(1, KEYS[0], tokens) == 0
    assert cache.acquire(2, KEYS[0], tokens, source=0) == 19
    assert cache.blocks_of(2)[:2] == cache.blocks_of(0)[:2]
    for owner in range(3):
        cache.release(owner, keep=True)
    assert cache.num_tokens_used == 0
    cache.check_integrity()


def test_check_integrity_reports_inconsistent_counts() -> None:
    """A block that is counted twice is reported by ``check_integrity``."""
    cache = make_cache()
    cache.acquire(0, KEYS[0], tokens_of(1, 2, 3))
    cache.tables[0].blocks[0].ref_count += 1
    with pytest.raises(RuntimeError, match="block 1 has 1 references, not 2"):
        cache.check_integrity()


def test_bookkeeping_grows_with_used_blocks_only() -> None:
    """A cache of a thousand million tokens keeps records only for blocks that were used."""
    cache = make_cache(num_tokens=1 << 30)
    assert cache.acquire(0, KEYS[0], tokens_of(*range(20))) == 0
    assert (len(cache.pool.blocks), cache.pool.num_available) == (3, (1 << 30) // SIZE - 3)
