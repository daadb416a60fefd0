"""The needle test of docs/determinism.md on real weights: each answer bit for bit that of the request alone.

    python benchmarks/needle.py --model .cache/models/smollm2 [--quantization int8] [--count 1000]

One prompt is asked for in several ways (greedily, drawn with penalties, with its own log probabilities, to be searched)
among random neighbours: in engines with other chunk sizes, with memory that is too small, with prefixes warm and cold,
with few callers so that drafts are made, among long texts that are held to grammars, and in an engine process that is
killed again and again. ``--kv-cache-dtype bfloat16`` and ``--dtype bfloat16`` do so in those forms.
``--kernels torch --dtype bfloat16`` shows that the test finds what depends on a batch; with ``--batch-invariant`` it
finds nothing there either.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
from typing import Any

import msgspec
from llguidance import LLMatcher
from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.request import Beams, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.needle import Answer, again, answer, needles
from mlflow_llm.serving.transport import connect

WORDS = Grammar(source=LLMatcher.grammar_from_regex("([A-Za-z]{2,9} ){40,90}[a-z]+[.]"), field="guided_regex")
_LINES = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 8}
LINES = Grammar(
    source=LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {"lines": _LINES}, "required": ["lines"]}
    ),
    field="guided_json",
)
SHOWN: dict[str, Any] = {"logprobs": 5, "generation_logits": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
    "read": {"temperature": 0.0, "prompt_logprobs": 2},
    "searched": {"temperature": 0.0, "beams": Beams(width=3)},
    "held": {"temperature": 1.0, "grammar": WORDS, "max_tokens": 24},
}


def request_of(name: str, prompt: tuple[int, ...], **sampling: Any) -> ValidRequest:
    sequence = Sequence(prompt_token_ids=prompt, seed=sampling.pop("seed", 7))
    adapter = sampling.pop("adapter", None)
    return ValidRequest(
        request_id=name, task="completions", model="m", sequences=(sequence,), adapter=adapter,
        sampling=Sampling(**{"max_tokens": 12, **sampling}), cache_salt="needles",
    )  # fmt: skip


class Neighbours:
    """A source of random requests of any length; some share the needle's prefix, some use adapters, sampling or
    beams."""

    def __init__(self, prompt: tuple[int, ...], vocab_size: int, adapters: tuple[str, ...]) -> None:
        self._prompt, self._size, self._adapters = prompt, vocab_size, adapters

    def __call__(self, chance: random.Random, name: str) -> ValidRequest:
        begins = self._prompt[: chance.choice([0, 0, len(self._prompt) // 2])]
        ids = (*begins, *(chance.randrange(self._size) for _ in range(chance.randint(1, 60))))
        more: dict[str, Any] = {"max_tokens": chance.randint(1, 16), "seed": chance.randrange(99)}
        if chance.random() < 0.1:
            return request_of(name, ids, temperature=0.0, beams=Beams(width=2), **more)
        if self._adapters and chance.random() < 0.3:
            more["adapter"] = chance.choice(self._adapters)
        return request_of(name, ids, temperature=chance.choice([0.0, 1.0]), **more)

    def held(self, chance: random.Random, name: str) -> ValidRequest:
        """Return requests for long texts within grammars, some with adapters or beams."""
        request = self(chance, name)
        if chance.random() < 0.3:
            return request
        more: dict[str, Any] = {"grammar": chance.choice([WORDS, LINES]), "max_tokens": chance.randint(40, 160)}
        assert request.sampling is not None
        sampling = msgspec.structs.replace(request.sampling, **more)
        return msgspec.structs.replace(request, sampling=sampling)


def beside_a_killer(bundle: Bundle, settings: EngineSettings, wanted: Any, neighbour: Neighbours, count: int) -> Any:
    """Run ``count`` needles in an engine process that is killed after every fortieth: (needles, mismatches, kills)."""
    found, kills, lock, chance = [0, 0], 0, threading.Lock(), random.Random(1)
    with (
        tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as state,
        connect(bundle, settings, state_dir=os.path.join(state, "r")) as engine,
    ):

        def ask() -> None:
            nonlocal kills
            while found[0] < count:
                with lock:
                    name, kind = f"{chance.random()}", chance.random() < 0.5
                    place = chance.randrange(len(wanted))
                    request = again(wanted[place][0], name) if kind else neighbour(chance, name)
                got = Answer()
                for event in engine.submit(request):
                    got.take(event)
                with lock:
                    if kind:
                        found[0] += 1
                        found[1] += got != wanted[place][1]
                        if found[0] % 40 == 0:
                            kills += 1
                            os.kill(engine.info.pid, signal.SIGKILL)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found[0], found[1], kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--adapters", help="a directory of peft adapters of the model, whose requests are neighbours")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    say_kernels(args.kernels)
    listed = sorted(os.listdir(args.adapters)) if args.adapters else []
    adapters = {name: os.path.join(args.adapters, name) for name in listed}
    bundle = Bundle(
        content_hash=f"needle{os.getpid()}", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model,
        adapters=adapters,
    )  # fmt: skip
    basic: dict[str, Any] = {
        "quantization": args.quantization, "dtype": args.dtype, "kernels": args.kernels, "max_model_len": 512,
        "batch_invariant": args.batch_invariant, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip

    def core_of(**more: Any) -> GenerationCore:
        return announced(GenerationCore(bundle, EngineSettings(**{"kv_cache_memory": 1 << 30, **basic, **more})))

    core = core_of(prefix_caching=False, speculation="none")
    walk = random.Random(5)
    words = tuple(walk.randrange(core.info.vocab_size) for _ in range(24))
    prompt = (*words, *words, *words[:12])  # with repeats, for drafts
    wanted = []
    for name, sampling in KINDS.items():
        request = request_of(name, prompt, **SHOWN, **sampling)
        wanted.append((request, answer(core, request)))
    cache = core.parts.cache
    assert isinstance(cache, SlotKVCache)
    tokens = 8 * 110 * cache.slot_elements // cache.slot_tokens * cache.dtype.itemsize
    neighbour = Neighbours(prompt, core.info.vocab_size, tuple(adapters))
    kernels = core.info.kernels
    core.close()
    part, rows = max(args.count // 6, 1), list[dict[str, Any]]()
    for name, at_once, more in (
        ("among many", 24, {}),
        ("chunks of 24", 12, {"max_num_batched_tokens": 24}),
        ("little memory", 16, {"kv_cache_memory": tokens}),
        ("few, with drafts", 3, {}),
        ("among grammars", 12, {}),
    ):
        core = core_of(**more)
        beside = neighbour.held if name == "among grammars" else neighbour
        found = needles(core, wanted, beside, count=part, at_once=at_once, seed=len(rows))
        health = core.health()
        rows.append({
            "engine": name, "needles": found.count, "mismatches": len(found.mismatches), "resumed": found.resumed,
            "preempted": core.parts.scheduler.num_preemptions, "prefix_tokens": health.prefix_hit_tokens,
            "drafts_taken": health.accepted_tokens, "kills": 0,
        })  # fmt: skip
        core.close()
        print(rows[-1], flush=True)
    count, mismatches, kills = beside_a_killer(bundle, EngineSettings(**basic), wanted, neighbour, part)
    rows.append({"engine": "killed", "needles": count, "mismatches": mismatches, "kills": kills})
    kv = "" if args.kv_cache_dtype == "auto" else f"-kv-{args.kv_cache_dtype}"
    publish(
        f"needle-{kernels}-{args.quantization}-{args.dtype}{kv}{'-invariant' if args.batch_invariant else ''}", rows,
        kernels=kernels, adapters=len(adapters),
    )  # fmt: skip


if __name__ == "__main__":
    main()
