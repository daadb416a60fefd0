"""Decoding by others on the same weights and prompts: transformers with a static cache and in continuous batching, and
vLLM. Each yields the seconds of a step by number of sequences, as it has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from .inputs import prompts, vocab_of
from .plan import Plan, Record

STATIC, COMPILED = "transformers, static cache", "transformers, static cache, compiled"
BATCHED, VLLM = "transformers, generate_batch", "vLLM"


def model_of(plan: Plan) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if plan.on_cpu else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(plan.model_dir, dtype=dtype).to(plan.device).eval()


def record(by: str, count: int, seconds: float) -> Record:
    """Return a step's record. Runs that other work delayed may differ by less than nothing."""
    if seconds <= 0:
        return {"part": "peers", "by": by, "count": count, "error": f"{by}, {count}: runs differ by chance alone"}
    return {"part": "peers", "by": by, "count": count, "seconds": seconds}


def difference(run: Callable[[int], Any], new: int) -> float:
    """Return seconds a token: the difference of two runs, of which one has half as many tokens, as the median of three.
    A run before warms up."""

    def timed(tokens: int) -> float:
        began = time.perf_counter()
        run(tokens)
        return time.perf_counter() - began

    timed(new)
    return median(timed(new) - timed(new // 2) for _ in range(3)) / (new - new // 2)


def static(plan: Plan) -> Iterator[Record]:
    """Yield transformers' steps with a static cache, as its own code runs them."""
    yield from _static(plan, STATIC, plan.but(new=max(plan.new // 4, 4)), compiled=False)


def compiled(plan: Plan) -> Iterator[Record]:
    """Yield the same compiled, which transformers does by itself on CUDA, the smallest number first."""
    yield from _static(plan, COMPILED, plan, compiled=True)


def _static(plan: Plan, by: str, shorter: Plan, *, compiled: bool) -> Iterator[Record]:
    import torch

    model = model_of(plan)
    for count in sorted(plan.sequences):
        asked = torch.tensor(prompts(vocab_of(plan), count, plan.prompt), device=plan.device)

        def generate(new: int, asked: Any = asked) -> None:
            model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=new, do_sample=False, pad_token_id=0,
                cache_implementation="static", disable_compile=not compiled,
            )  # fmt: skip
            if not plan.on_cpu:
                torch.cuda.synchronize()

        yield record(by, count, difference(generate, shorter.new))


def batched(plan: Plan) -> Iterator[Record]:
    """Yield transformers' continuous batching, by the times of tokens while all sequences decode."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, more = model_of(plan), {}
    if plan.on_cpu:  # it would take nearly all memory of the machine for its cache
        cache = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256}
        more = {"continuous_batching_config": ContinuousBatchingConfig(**cache)}
    for count in plan.sequences:
        asked = [list(prompt) for prompt in prompts(vocab_of(plan), count, plan.prompt)]
        config = GenerationConfig(max_new_tokens=plan.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        steps = []
        for _ in range(2):  # the first warms up
            replies = model.generate_batch(asked, generation_config=config, record_timestamps=True, **more)
            if len(replies) < count:
                raise RuntimeError(f"generate_batch returned {len(replies)} of {count} texts")
            steps.append(pace([reply.timestamps for reply in replies.values()]))
        yield record(BATCHED, count, steps[-1])


def pace(times: list[list[float]]) -> float:
    """Return the median seconds between tokens while all texts grow; ``times`` are of each text's tokens."""
    first, last = max(one[0] for one in times), min(one[-1] for one in times)
    gaps = [after - before for before, after in pairwise(times[0]) if first <= before and after <= last]
    if not gaps:
        raise RuntimeError("no step in which all sequences decode")
    return median(gaps)


def vllm(plan: Plan) -> Iterator[Record]:
    """Yield vLLM's steps, without its prefix cache."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=str(plan.model_dir), skip_tokenizer_init=True, max_num_seqs=max(plan.sequences), max_model_len=4096,
              enable_prefix_caching=False, gpu_memory_utilization=0.6)  # fmt: skip
    for count in plan.sequences:
        asked = [TokensPrompt(prompt_token_ids=list(p)) for p in prompts(vocab_of(plan), count, plan.prompt)]

        def generate(new: int, asked: Any = asked) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            llm.generate(asked, sampling, use_tqdm=False)

        yield record(VLLM, count, difference(generate, plan.new))
