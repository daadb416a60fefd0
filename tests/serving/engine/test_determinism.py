"""The promise of docs/determinism.md: a request's answer is bitwise the same alone and among any others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from grammar_runs import regex
from kept_runs import has_bf16_tiles
from peft import LoraConfig, get_peft_model
from tiny_models import COMMON, make_model, prompt_of, request_of
from tokenizer_kinds import KINDS, save

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.native.library import AMX, EMULATED_TILES, library, tiles, use_tiles
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.needle import Answer, Needles, answer, needles

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2"),
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
TOKEN_BYTES = 2 * 2 * 16 * 2 * 4  # layers, K and V heads, head width, K and V, float32
INT8_TOKEN_BYTES = 2 * 2 * (16 + 4) * 2  # beside weights in int8
WIDE_TOKEN_BYTES = {"bfloat16": 2 * 2 * 64 * 2 * 2, "int8": 2 * 2 * (64 + 4) * 2}
WORDS = regex("[a-z ]{6,40}")
FORBIDDEN: dict[str, Any] = {
    "bad_words": ((9,), (5, 7)), "no_repeat_ngram_size": 2, "penalize_prompt": True, "frequency_penalty": 0.7,
    "stop_sequences": ((8, 11),),
}  # fmt: skip
Made = Callable[..., EngineCore]
Wanted = list[tuple[ValidRequest, Answer]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Save a model that runs natively, with a tokenizer and two adapters."""
    return bundle_in(tmp_path_factory.mktemp("needle"))


def bundle_in(place: Path, **more: Any) -> Bundle:
    tokenizer = KINDS["byte_level"]()
    size = -(-tokenizer.get_vocab_size() // 16) * 16
    config = {"vocab_size": size, "hidden_size": 64, "max_position_embeddings": 512, **more}
    make_model(tf.LlamaConfig(**COMMON | config)).save_pretrained(place / "model")
    adapters = {}
    for name, rank in (("small", 2), ("large", 8)):
        torch.manual_seed(rank)
        adapted = get_peft_model(
            make_model(tf.LlamaConfig(**COMMON | config)),
            LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False),
        )
        adapted.save_pretrained(place / name)
        adapters[name] = str(place / name)
    return Bundle(
        content_hash="needle",
        tasks=("completions",),
        model_dir=str(place / "model"),
        tokenizer_dir=str(save(tokenizer, place / "tokenizer")),
        adapters=adapters,
    )


@pytest.fixture
def make(bundle: Bundle) -> Iterator[Made]:
    yield from making(bundle)


ROUNDED: dict[str, dict[str, Any]] = {
    "keys and values": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "all": {"dtype": "bfloat16"},
    "keys and values in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@pytest.fixture(params=ROUNDED.values(), ids=list(ROUNDED))
def make_rounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    """Return a factory of engines with bfloat16 or int8 keys and values, beside int8 linears, or all in bfloat16."""
    before = tiles()
    use_tiles(AMX if has_bf16_tiles() else EMULATED_TILES)
    for build in making(bundle_in(tmp_path, head_dim=64)):
        yield partial(build, **request.param)
    use_tiles(before)


def making(bundle: Bundle) -> Iterator[Made]:
    cores: list[EngineCore] = []

    def build(**more: Any) -> EngineCore:
        cores.append(EngineCore(bundle, EngineSettings(**{"max_num_seqs": 8, "kv_cache_memory": 1 << 26, **more})))
        return cores[-1]

    yield build
    for core in cores:
        core.check_integrity()
        core.close()


def kinds() -> list[ValidRequest]:
    """Return requests of every kind, with every kind of returned value."""
    shown: dict[str, Any] = {"logprobs": 3, "generation_logits": True}
    return [
        request_of("greedy", prompt_of(70, 1), max_tokens=10, **shown),
        request_of("drawn", prompt_of(21, 2), seed=5, temperature=1.0, top_p=0.9, presence_penalty=0.5, **shown),
        request_of("read", prompt_of(33, 3), max_tokens=4, prompt_logprobs=3, context_logits=True, **shown),
        request_of("adapted", prompt_of(18, 4), adapter="large", **shown),
        request_of("held", prompt_of(9, 5), seed=7, temperature=1.0, max_tokens=16, grammar=WORDS, **shown),
        request_of("searched", prompt_of(12, 6), n=2, max_tokens=6, beams=Beams(width=3), **shown),
        request_of("forbidden", prompt_of(25, 7), seed=3, temperature=1.0, **FORBIDDEN, **shown),
        request_of("repeats", (5, 9, 17, 3) * 10, max_tokens=24, logit_bias=((5, 90.0),), **shown),
    ]


def neighbour(chance: random.Random, name: str) -> ValidRequest:
    """Return a random request of any length and kind."""
    kind = chance.random()
    prompt: Any = prompt_of(chance.randint(1, 90), chance.randrange(10**6))
    if kind < 0.3:  # a prompt that begins like a needle
        prompt = (*prompt_of(70, 1)[: chance.randint(8, 70)], *prompt[:10])
    more: dict[str, Any] = {"max_tokens": chance.randint(1, 20), "seed": chance.randrange(99)}
    more |= {"temperature": chance.choice([0.0, 1.0]), "cache_salt": chance.choice([None, "needles"])}
    if kind > 0.9:
        more |= {"beams": Beams(width=2), "temperature": 0.0}
    elif kind > 0.8:
        more |= {"grammar": WORDS}
    elif kind > 0.5:
        more |= {"adapter": chance.choice(["small", "large"])}
    elif kind > 0.4:
        more |= {"prompt_logprobs": 1}
    elif kind > 0.3:
        more |= FORBIDDEN
    return request_of(name, prompt, **more)


def wanted_of(core: EngineCore) -> Wanted:
    found = [(request, answer(core, request)) for request in kinds()]
    assert all(one.failed is None for _, one in found)
    return found


def run(core: EngineCore, wanted: Wanted, **more: Any) -> Needles:
    return needles(core, wanted, neighbour, **{"count": 35, "at_once": 8, **more})


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_needle(make: Made, quantization: str) -> None:
    """A needle alone in one engine and among neighbours in others, with warm and cold prefixes, chunks of any size,
    preemption, resumption, adapters, grammars, searches and drafts, has the same bits."""
    wanted = wanted_of(make(quantization=quantization, prefix_caching=False, speculation="none"))
    token_bytes = INT8_TOKEN_BYTES if quantization == "int8" else TOKEN_BYTES
    preempted = resumed = cached = 0
    for seed, more in enumerate(
        (
            {},
            {"max_num_batched_tokens": 9},
            {"kv_cache_memory": 260 * token_bytes, "max_num_batched_tokens": 40},
            {"max_num_seqs": 3},
        )
    ):
        core = make(quantization=quantization, **more)
        assert core.info.kernels == "native"
        found = run(core, wanted, seed=seed, at_once=4 if seed == 3 else 8)
        assert not found.mismatches, (more, [kinds()[place].request_id for place in found.mismatches])
        resumed += found.resumed
        cached += core.health().prefix_hit_tokens
        preempted += core.parts.scheduler.num_preemptions
    assert min(resumed, cached, preempted) > 0
    few = make(quantization=quantization)  # so few that there are drafts
    assert not run(few, [one for one in wanted if one[0].request_id == "repeats"], count=4, at_once=2).mismatches
    assert few.health().accepted_tokens > 0


def test_the_needle_in_reduced_precision(make_rounded: Made) -> None:
    """A needle has the same bits with bfloat16 or int8 keys and values, and in bfloat16 models, with tiles."""
    alone = make_rounded(prefix_caching=False, speculation="none")
    wanted = wanted_of(alone)
    core = make_rounded(kv_cache_memory=260 * WIDE_TOKEN_BYTES[alone.info.kv_cache_dtype], max_num_batched_tokens=19)
    assert core.info.kernels == "native"
    found = run(core, wanted, count=24)
    assert not found.mismatches, [kinds()[place].request_id for place in found.mismatches]
    assert min(found.resumed, core.parts.scheduler.num_preemptions) > 0
    few = make_rounded()
    long = [one for one in wanted if one[0].request_id in ("greedy", "repeats")]
    assert not run(few, long, count=8, at_once=2).mismatches
    assert min(few.health().accepted_tokens, few.health().prefix_hit_tokens) > 0


@pytest.mark.parametrize("seed", range(3))
def test_searches_where_memory_is_scarce(make: Made, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Beams preempted together and resumed one by one have the texts that they have alone; no step has tokens of a
    sequence preempted in it."""
    kind = {one.request_id: one for one in kinds()}
    alone = make(speculation="none")
    wanted = [(kind[name], answer(alone, kind[name])) for name in ("searched", "greedy")]

    def plain(chance: random.Random, name: str) -> ValidRequest:
        more: dict[str, Any] = {"beams": Beams(width=2)} if chance.random() > 0.7 else {}
        more |= {"cache_salt": chance.choice([None, "needles"]), "max_tokens": chance.randint(1, 20)}
        return request_of(name, prompt_of(chance.randint(1, 90), chance.randrange(10**6)), **more)

    core = make(kv_cache_memory=260 * TOKEN_BYTES, max_num_batched_tokens=40, speculation="none")
    found = needles(core, wanted, plain, count=12, at_once=8, seed=seed, resume=False)
    assert core.parts.scheduler.num_preemptions
    assert not found.mismatches
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_needle_finds_kernels_that_depend_on_the_batch(make: Made) -> None:
    """The needle test finds differences with kernels whose order of sums depends on the batch."""
    wanted = wanted_of(make(kernels="torch", dtype="bfloat16"))
    assert run(make(kernels="torch", dtype="bfloat16"), wanted).mismatches


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "float32"), ("torch", "bfloat16"), ("auto", "bfloat16")])
def test_batch_invariant(make: Made, kernels: str, dtype: str) -> None:
    """With batch_invariant those kernels too give the same bits alone and among others, also in bfloat16."""
    settings = {"kernels": kernels, "dtype": dtype, "batch_invariant": True}
    wanted = wanted_of(make(**settings))
    core = make(**settings, max_num_batched_tokens=32, kv_cache_memory=500 * TOKEN_BYTES)
    assert core.parts.cache.prefix_caching == (core.info.kernels == "native")
    found = run(core, wanted, count=14)
    assert not found.mismatches, [kinds()[place].request_id for place in found.mismatches]
    assert found.resumed
