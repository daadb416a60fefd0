"""Sequences that share a prefix read it in one slot: with the bits of a copy, and consistent accounts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import Outcome, run, take
from kept_runs import MODELS, WIDE, has_bf16_tiles, logits_of
from tiny_models import make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape, PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import BF16_LAYOUT, INT8_LAYOUT, SlotKVCache
from mlflow_llm.serving.engine.attention.slot_table import SHARED_BLOCK_TOKENS, common_prefix
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native.library import (
    AMX,
    EMULATED_TILES,
    NO_TILES,
    library,
    num_native_threads,
    tiles,
    use_threads,
    use_tiles,
)
from mlflow_llm.serving.interface.request import Beams
from mlflow_llm.serving.interface.settings import EngineSettings

native = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without kernels of ours")
BF16_TILES = AMX if has_bf16_tiles() else EMULATED_TILES
FORMS: list[tuple[dict[str, Any], int]] = [
    ({"dtype": torch.float32}, NO_TILES),
    (dict(BF16_LAYOUT), BF16_TILES),
    (dict(INT8_LAYOUT), NO_TILES),
    (dict(INT8_LAYOUT), AMX),
]
CAPPED = tf.Gemma2Config(**WIDE, head_dim=32, attn_logit_softcapping=3.0, sliding_window=600, query_pre_attn_scalar=16)
KEYS = [PrefixKey(adapter, salt) for adapter in ("", "x#1") for salt in ("s", "t")]
BASE = KEYS[0]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, used = num_native_threads(), tiles()
    yield
    if threads:
        use_threads(threads)
        use_tiles(used)


class Sequences:
    """Sequences over one cache, each of which keeps its logits by position."""

    def __init__(self, loaded: Any, kept: dict[str, Any], num_slots: int = 6) -> None:
        self.cache = SlotKVCache(
            loaded.layers,
            num_slots=num_slots,
            num_tokens=1400 * num_slots,
            max_model_len=2048,
            by_reference=True,
            **kept,
        )
        self.decoder = NativeDecoder(loaded.decoder, self.cache)
        self.tokens: dict[int, Any] = {}
        self.computed: dict[int, int] = {}

    def start(self, owner: int, tokens: Any) -> int:
        length = self.cache.acquire(owner, BASE, tokens.astype(np.int32))
        assert length is not None
        self.tokens[owner], self.computed[owner] = tokens, length
        return length

    def step(self, **counts: int) -> dict[int, Any]:
        """Compute so many tokens of each owner ``o<number>`` and return their logits."""
        owners = {int(name[1:]): count for name, count in counts.items()}
        rows = [Row(owner, self.computed[owner], count) for owner, count in owners.items()]
        ids = np.concatenate([self.tokens[row.owner][row.start : row.start + row.num_tokens] for row in rows])
        logits = self.decoder.forward(StepInput(ids, rows, [None] * len(rows), range(len(ids))))
        for row in rows:
            self.computed[row.owner] += row.num_tokens
            length = self.computed[row.owner]
            self.cache.computed(row.owner, self.tokens[row.owner][:length].astype(np.int32), length)
        self.cache.check_integrity()
        return dict(zip(owners, logits.split([row.num_tokens for row in rows]), strict=True))


@native
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("kept", "use"), FORMS)
def test_kv_read_in_place_has_the_bits_of_computed_kv(
    name: str, kept: dict[str, Any], use: int, tmp_path: Path
) -> None:
    """Over a segment's end, in prompts and decodes, beside a source that goes on and after it was aborted, by a reader
    of a reader: every logit is the one of the sequence computed alone and cold."""
    loaded = load_model(save_bundle(make_model(MODELS[name]()), tmp_path), EngineSettings())
    use_tiles(use)
    draw = np.random.default_rng(3)
    first = draw.integers(0, 131, 700)
    second = np.concatenate([first[:650], draw.integers(0, 131, 200)])
    third = np.concatenate([second[:760], draw.integers(0, 131, 20)])
    alone = {
        owner: logits_of(loaded, tokens, [len(tokens)], **kept) for owner, tokens in enumerate((first, second, third))
    }
    use_threads(3)
    sequences = Sequences(loaded, kept)
    sequences.start(0, first)
    sequences.step(o0=690)
    assert sequences.start(1, second) == 650
    found = {0: [], 1: [], 2: []}  # type: dict[int, list[Any]]

    def step(**counts: int) -> None:
        for owner, logits in sequences.step(**counts).items():
            found[owner].append(logits)

    step(o0=3, o1=130)
    assert sequences.start(2, third) == 760
    assert [stop for _, stop in sequences.cache.slot_of(2).parts] == [640, 704]
    step(o0=1, o1=1, o2=1)
    sequences.cache.release(0, keep=False)
    assert sequences.start(3, draw.integers(0, 131, 1500)) == 0  # takes memory, but not that
    sequences.step(o3=1500)
    use_threads(1)
    step(o1=1, o2=10)
    step(o1=40, o2=1)
    for owner, start in ((0, 690), (1, 650), (2, 760)):
        logits = torch.cat(found[owner])
        assert torch.equal(logits, alone[owner][start : start + len(logits)])


@native
@pytest.mark.parametrize(("kept", "use"), FORMS)
@pytest.mark.parametrize("name", ["qwen3", "many heads", "capped", "int8"])
def test_sequences_that_read_a_segment_together_have_the_bits_of_each_alone(
    name: str, kept: dict[str, Any], use: int, tmp_path: Path
) -> None:
    """Decodes of eleven sequences over two segments of a prompt, one of which begins a third, beside a prompt's piece
    that reads there too and a sequence that shares nothing: the logits of a step of each alone, with any number of
    threads."""
    config = CAPPED if name == "capped" else MODELS.get(name, MODELS["qwen3"])()
    settings = EngineSettings(quantization="int8" if name == "int8" else "none")
    loaded = load_model(save_bundle(make_model(config), tmp_path), settings)
    use_tiles(use)
    use_threads(2)
    draw = np.random.default_rng(4)
    prompt = draw.integers(0, 131, 1100)
    sequences = Sequences(loaded, kept, num_slots=13)
    sequences.start(0, prompt)
    sequences.step(o0=1090)
    for owner in range(1, 12):
        length = 700 if owner == 3 else 1080
        assert sequences.start(owner, np.append(prompt[:length], draw.integers(0, 131, 60 + owner))) >= length
        sequences.step(**{f"o{owner}": 1 + owner})
    sequences.start(12, draw.integers(0, 131, 1400))
    sequences.step(o12=1030)
    counts = {f"o{owner}": 7 if owner == 5 else 1 for owner in range(13)}
    for threads in (2, 1, 3):
        use_threads(threads)
        before = dict(sequences.computed)
        for owner, logits in sequences.step(**counts).items():
            start = before[owner]
            ids = sequences.tokens[owner][start : start + len(logits)]
            row = Row(owner, start, len(ids))
            alone = sequences.decoder.forward(StepInput(ids, [row], [None], range(len(ids))))
            assert torch.equal(logits, alone), (threads, owner)


def make_cache(num_tokens: int = 1000, num_slots: int = 8, **more: Any) -> SlotKVCache:
    shapes = [LayerShape(2, 4, 4)]
    more = {"dtype": torch.float64, "by_reference": True, **more}
    return SlotKVCache(shapes, num_slots=num_slots, num_tokens=num_tokens, max_model_len=512, **more)


def tokens_of(*ids: int) -> Any:
    return np.array(ids, dtype=np.int32)


def expected(key: PrefixKey, tokens: Any) -> Any:
    """Return a stand-in for each token's KV: a number computed from the key and all tokens up to it."""
    total, found = float(KEYS.index(key) + 1), []
    for token in tokens.tolist():
        total = (total * 31 + token) % 1_000_003
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


def write(cache: SlotKVCache, owner: int, key: PrefixKey, tokens: Any, start: int) -> None:
    """Write KV as a forward of ``tokens`` from ``start`` on does: to the sequence's own slot."""
    slot = cache.slot_of(owner)
    cache.layers[0].k[slot.index, :, start : len(tokens)] = expected(key, tokens)[start:, None]
    cache.layers[0].v[slot.index, :, start : len(tokens)] = -expected(key, tokens)[start:, None]
    cache.computed(owner, tokens, len(tokens))


def read(cache: SlotKVCache, owner: int, length: int) -> Any:
    """Read the KV of a sequence as a native step does."""
    k, v = cache.layers[0].k, cache.layers[0].v
    ranges = list(cache.slot_of(owner).ranges(0, length))
    keys, values = (torch.cat([cube[slot.index, 1, a:b, 3] for slot, a, b in ranges]) for cube in (k, v))
    assert torch.equal(keys, -values)
    return keys


def start(cache: SlotKVCache, owner: int, tokens: Any, key: PrefixKey = BASE, **more: Any) -> int:
    length = cache.acquire(owner, key, tokens, **more)
    assert length is not None
    write(cache, owner, key, tokens, length)
    cache.check_integrity()
    return length


def test_every_sequence_reads_its_own() -> None:
    """Over thousands of random starts, growths, forks, failures, releases and evictions, each sequence reads the KV of
    its own tokens, adapter and salt, and the accounts add up."""
    draw = random.Random(5)
    cache = make_cache(900, num_slots=9)
    running: dict[int, tuple[PrefixKey, Any, int | None]] = {}
    hits = forks = refused = shared = chained = 0
    for owner in range(1500):
        key = draw.choice(KEYS)
        tokens = tokens_of(*[draw.randrange(2)] * 70, *(draw.randrange(2) for _ in range(draw.choice([1, 2, 70, 140]))))
        known = [s.tokens for s in cache.table.slots if s.key == key and s.length > 64]
        if known and draw.random() < 0.6:
            before = draw.choice(known)
            tokens = np.append(before[: draw.randrange(1, len(before) + 1)], tokens[: draw.randrange(1, 90)])[:400]
        fixed = len(tokens) if draw.random() < 0.3 else None  # the first beam of a search
        beams = [one for one, (_, whole, mine) in running.items() if mine is not None and len(whole) < 400]
        source = draw.choice(beams) if beams and draw.random() < 0.3 else None
        if source is not None:  # a further one
            key, tokens, fixed = running[source]
            tokens = np.append(tokens, np.int32(draw.randrange(3)))
        length = cache.acquire(owner, key, tokens, source=source, fixed=fixed)
        refused += length is None
        if length is not None:
            slot = cache.slot_of(owner)
            hits, shared, chained = hits + (length > 0), shared + bool(slot.parts), chained + (len(slot.parts) > 1)
            write(cache, owner, key, tokens, length)
            running[owner] = key, tokens, fixed
        for one, (key, tokens, fixed) in list(running.items()):
            if draw.random() < 0.3 and len(tokens) < 450 and cache.grow(one, len(tokens) + 9):
                running[one] = key, np.append(tokens, tokens_of(*(draw.randrange(2) for _ in range(9)))), fixed
                write(cache, one, key, running[one][1], len(tokens))
        beams = [one for one, (_, _, fixed) in running.items() if fixed is not None]
        if len(beams) > 1:  # one goes on from where another is
            one, other = draw.sample(beams, 2)
            (key, tokens, fixed), (whose, others, _) = running[one], running[other]
            alike = key == whose and fixed == running[other][2]
            if alike and common_prefix(tokens, others) >= fixed and cache.grow(other, len(tokens)):
                cache.copy(one, other, fixed, len(tokens))
                cache.computed(other, tokens, len(tokens))
                running[other] = running[one]
                forks += 1
        while len(running) > draw.randrange(7):
            gone = draw.choice(list(running))
            if draw.random() < 0.05:
                cache.wipe(gone)
            cache.release(gone, keep=draw.random() < 0.8)
            del running[gone]
        if draw.random() < 0.01:
            cache.forget("x#1")
        cache.check_integrity()
        for one, (key, tokens, _) in running.items():
            assert torch.equal(read(cache, one, len(tokens)), expected(key, tokens))
    assert min(hits, shared) > 300
    assert min(forks, refused, chained) > 5
    for one in running:
        cache.release(one, keep=False)
    cache.forget("")
    cache.forget("x#1")
    assert cache.num_tokens_used == 0


def test_a_prefix_is_counted_once() -> None:
    """A prompt of 200 tokens that begins as a running one takes memory only for the tokens after the last shared
    block."""
    cache = make_cache()
    prompt = tokens_of(*range(200))
    start(cache, 0, prompt)
    assert start(cache, 1, tokens_of(*range(190), 7, 7)) == 190
    assert cache.num_tokens_used == 200 + 192 - 2 * SHARED_BLOCK_TOKENS
    assert cache.grow(1, 300)
    assert cache.num_tokens_used == 200 + 300 - 2 * SHARED_BLOCK_TOKENS


def test_a_source_that_ends_stays_for_its_readers() -> None:
    """Ten sequences continue over the slot of an aborted sequence: the KV they read stays, unread KV is freed at once,
    and the rest with the last reader."""
    cache = make_cache(2000, num_slots=14)
    prompt = tokens_of(*range(200))
    start(cache, 0, prompt)
    for owner in range(1, 11):
        start(cache, owner, tokens_of(*range(140), owner, owner))
    cache.release(0, keep=False)
    cache.check_integrity()
    assert cache.num_tokens_used == 128 + 10 * (142 - 128)
    for owner in range(20, 23):
        start(cache, owner, tokens_of(*[owner] * 300))
    for owner in range(1, 11):
        tokens = tokens_of(*range(140), owner, owner)
        assert torch.equal(read(cache, owner, 142), expected(BASE, tokens))
        cache.release(owner, keep=False)
        cache.check_integrity()
    for owner in range(20, 23):
        cache.release(owner, keep=False)
    cache.check_integrity()
    assert (cache.num_tokens_used, cache.match(BASE, prompt)) == (0, (0, None))


def test_a_wiped_slot_is_never_reused_while_it_is_read() -> None:
    """A wiped slot loses all but the KV that others read; that is freed with the last reader."""
    cache = make_cache()
    start(cache, 0, tokens_of(*range(200)))
    start(cache, 1, tokens_of(*range(140), 5))
    cache.layers[0].k[cache.slot_of(0).index, :, 150:200] = float("nan")
    cache.wipe(0)
    cache.release(0, keep=True)
    cache.check_integrity()
    assert bool(torch.isfinite(cache.layers[0].k).all())
    assert torch.equal(read(cache, 1, 141), expected(BASE, tokens_of(*range(140), 5)))
    cache.wipe(1)
    cache.release(1, keep=True)
    cache.check_integrity()
    assert cache.num_tokens_used == 0


def test_an_adapter_that_is_forgotten_leaves_when_its_readers_do() -> None:
    """Idle KV of a removed adapter is never found again, and is freed after its last running reader."""
    cache = make_cache()
    key = KEYS[2]
    start(cache, 0, tokens_of(*range(200)), key)
    start(cache, 1, tokens_of(*range(140), 5), key)
    cache.release(0, keep=True)
    cache.forget("x#1")
    cache.check_integrity()
    assert cache.num_tokens_used == 128 + 141 - 128
    assert torch.equal(read(cache, 1, 141), expected(key, tokens_of(*range(140), 5)))
    cache.release(1, keep=True)
    assert cache.match(key, tokens_of(*range(200))) == (140, None)  # by the sequence that ran when it was forgotten
    cache.forget("x#1")
    assert cache.num_tokens_used == 0


def test_a_sequence_alone_may_have_all_memory() -> None:
    """Idle KV is evicted down to the tokens that the one running sequence reads of it."""
    cache = make_cache(400)
    start(cache, 0, tokens_of(*range(300)))
    start(cache, 1, tokens_of(*range(140), 5))
    cache.release(0, keep=True)
    assert not cache.grow(1, 401)
    assert cache.grow(1, 400)
    cache.check_integrity()
    assert cache.num_tokens_used == 400
    assert torch.equal(read(cache, 1, 141), expected(BASE, tokens_of(*range(140), 5)))


def test_kv_that_a_search_may_rewrite_is_copied() -> None:
    """Sequences share only the prompt of a beam, and a beam shares no more than its prompt."""
    cache = make_cache()
    texts = tokens_of(*range(300))
    start(cache, 0, texts, fixed=130)
    start(cache, 1, np.append(texts, np.int32(1)), source=0, fixed=130)
    start(cache, 2, np.append(texts, np.int32(2)))
    assert [cache.slot_of(owner).shared for owner in (1, 2)] == [128, 128]
    cache.release(2, keep=True)
    start(cache, 3, np.append(texts, tokens_of(2, 3)), fixed=70)
    assert cache.slot_of(3).shared == 64
    other = np.append(texts[:130], tokens_of(*[9] * 171))
    write(cache, 0, BASE, other, 130)
    cache.copy(0, 3, 130, len(other))
    assert torch.equal(read(cache, 3, len(other)), expected(BASE, other))
    assert torch.equal(read(cache, 1, 300), expected(BASE, texts))


def test_every_slot_stays_available_to_readers() -> None:
    """Sequences that each read kept slots still leave a slot for every sequence that may run beside them."""
    running, maximum = 4, 3
    cache = make_cache(100_000, num_slots=running * maximum)
    for owner in range(running):
        tokens = tokens_of(*[owner] * 100)
        for part in range(4):
            start(cache, 10 * owner + part, tokens)
            tokens = np.append(tokens, tokens_of(*[owner] * 63, part))
        for part in range(4):
            cache.release(10 * owner + part, keep=True)
    for owner in range(running):
        start(cache, 100 + owner, tokens_of(*[owner] * 163, 0, *[owner] * 63, 9))
    assert len({cache.slot_of(100 + owner).index for owner in range(running)}) == running


def test_check_integrity_reports_an_unknown_reader() -> None:
    """A reader that its slot does not know of is reported by ``check_integrity``."""
    cache = make_cache()
    start(cache, 0, tokens_of(*range(200)))
    start(cache, 1, tokens_of(*range(140), 5))
    cache.slot_of(0).lent.clear()
    with pytest.raises(RuntimeError, match="slot 0"):
        cache.check_integrity()


@native
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_requests_over_one_prompt_have_the_texts_they_have_alone(kept: str, tmp_path: Path) -> None:
    """Twelve requests over one prompt of 150 tokens, with choices, a search, drafts and an abort among them, have the
    texts of each alone without a prefix cache, and take memory for one prompt."""
    bundle = save_bundle(make_model(MODELS["qwen3"]()), tmp_path)
    settings = {"kv_cache_dtype": kept, "max_num_seqs": 16, "kv_cache_memory": 1 << 25}
    prompt = prompt_of(150, 1)
    asked = [request_of(f"{i}", prompt + prompt_of(9 + i, i), max_tokens=12, logprobs=1) for i in range(9)]
    asked += [
        request_of("n", prompt, n=3, max_tokens=12, temperature=0.8),
        request_of("beams", prompt + prompt_of(4, 1), max_tokens=12, beams=Beams(width=4), n=2),
        request_of("repeating", prompt + (5, 6, 7, 8) * 5, max_tokens=30),
    ]
    alone: dict[str, Outcome] = {}
    core = EngineCore(bundle, EngineSettings(**settings, prefix_caching=False, speculation="none"))
    for request in asked:
        alone |= run(core, request)
    core.close()
    core = EngineCore(bundle, EngineSettings(**settings))
    assert core.info.kernels == "native"
    source = request_of("source", prompt, max_tokens=80)
    outcomes = {request.request_id: Outcome() for request in [source, *asked]}
    core.add(source)
    take(core, outcomes, max_steps=3)
    for request in asked:
        core.add(request)
    take(core, outcomes, max_steps=3)
    cache = core.parts.cache
    readers = [slot for slot in cache.table.by_owner.values() if slot.parts]
    assert len(readers) > 9
    assert cache.num_tokens_used < 2 * 150 + 16 * 80
    core.abort("source")
    found = take(core, outcomes)
    core.close()
    for name, wanted in alone.items():
        assert (found[name].tokens, found[name].logprobs) == (wanted.tokens, wanted.logprobs)


@native
def test_scarce_memory_changes_no_text(tmp_path: Path) -> None:
    """Requests over a few prompts in memory for two of them: all end as alone, however often one loses its memory, and
    a prompt that has ended is given up while others still read of it."""
    bundle = save_bundle(make_model(MODELS["qwen3"]()), tmp_path)
    draw = random.Random(2)
    starts = [prompt_of(140, i) for i in range(3)]
    asked = [
        request_of(f"{i}", draw.choice(starts)[: draw.choice([70, 130, 140])] + prompt_of(draw.randint(1, 40), i),
                   max_tokens=draw.randint(1, 60), n=draw.choice([1, 1, 2]))
        for i in range(30)
    ]  # fmt: skip
    core = EngineCore(bundle, EngineSettings(max_num_seqs=6, prefix_caching=False))
    alone = {request.request_id: run(core, request)[request.request_id] for request in asked}
    token_bytes = core.info.kv_cache_memory // core.parts.cache.num_tokens_total
    core.close()
    core = EngineCore(bundle, EngineSettings(max_num_seqs=6, kv_cache_memory=token_bytes * 420))
    outcomes = run(core, *asked)
    assert core.parts.scheduler.num_preemptions > 0
    core.close()
    assert {name: one.tokens for name, one in outcomes.items()} == {name: one.tokens for name, one in alone.items()}
