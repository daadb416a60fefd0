"""Tokens per second of decoding on a GPU, in bfloat16 and with weights in fp8, beside its memory bound, and beside vLLM
(in bfloat16) if that is installed.

A Llama of random weights is made (what a token costs does not depend on what the weights are); prompts of random tokens
are computed, then every sequence generates, greedy and without an end. The floor is the time in which the device reads
all weights once a step and each sequence's keys and values, at the speed at which it copies a large tensor. Each
contender runs in a process of its own; ours twice, with each step launched before the last one's tokens are read and
without.

    python benchmarks/gpu.py --size 1b --sequences 1 8 32 128
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

SIZES: dict[str, dict[str, int]] = {  # Llama 3.2 1B and 3B, Llama 3.1 8B, and one for trying this out
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 500},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
}  # fmt: skip


def config_of(size: str) -> Any:
    from transformers import LlamaConfig

    common = {"vocab_size": 128256, "num_key_value_heads": 2 if size == "tiny" else 8, "max_position_embeddings": 4096}
    return LlamaConfig(**{**common, **SIZES[size]}, tie_word_embeddings=size != "8b", eos_token_id=None)


def make_weights(size: str, device: str, folder: Path) -> None:
    """Save random weights in bfloat16 (float32 on CPU) as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def prompts(vocab: int, count: int, length: int) -> list[tuple[int, ...]]:
    """Return prompts of different tokens, so that none has another's prefix."""
    return [tuple((i * 7919 + j * 104729 + 3) % (vocab - 3) + 3 for j in range(length)) for i in range(count)]


def copy_speed(device: str) -> float:
    """Return the bytes per second that the device reads and writes: the best of several copies of a large tensor."""
    import torch

    size = 1 << (24 if device == "cpu" else 30)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def floor_seconds(
    config: Any, itemsize: int, count: int, length: float, speed: float, linear_itemsize: int | None = None
) -> float:
    """Return the min time of a step: reading all weights of linears and the head, and ``length`` tokens' keys and
    values of each sequence. ``linear_itemsize``: bytes of a linear's number, if different."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = hidden // heads * config.num_key_value_heads
    layer = 2 * hidden * hidden + 2 * hidden * width + 3 * hidden * config.intermediate_size
    kv = count * length * 2 * width * config.num_hidden_layers
    linears = config.num_hidden_layers * layer * (linear_itemsize or itemsize)
    return (linears + (hidden * config.vocab_size + kv) * itemsize) / speed


def run_ours(args: argparse.Namespace, quantization: Literal["none", "fp8"] = "none") -> dict[str, Any]:
    """Return seconds a step of pure decoding, by number of sequences."""
    from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
    from mlflow_llm.serving.interface.bundle import Bundle
    from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
    from mlflow_llm.serving.interface.settings import EngineSettings

    on_cpu: dict[str, Any] = {"kv_block_size": 16, "kernels": "torch"} if args.device == "cpu" else {}
    most = max(args.sequences)
    settings = EngineSettings(
        device=args.device,
        max_num_seqs=most,
        max_num_batched_tokens=max(512, most),
        cuda_graphs=args.cuda_graphs,
        quantization=quantization,
        launch_ahead=args.launch_ahead,
        **on_cpu,
    )
    bundle = Bundle(content_hash="gpu", tasks=("completions",), model_dir=str(args.model), tokenizer_dir="")
    began = time.perf_counter()
    core = GenerationCore(bundle, settings)
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "steps": {}, "prefill": {}}
    assert core.info.paged is not None
    found["attention"] = core.info.paged.attention
    paged = core.info.paged
    found["graphs"] = [] if paged.cuda_graphs_reason else list(paged.cuda_graphs)
    found["ahead"] = paged.launch_ahead
    reasons = (
        paged.attention_reason,
        paged.cuda_graphs_reason,
        paged.launch_ahead_reason,
        core.info.quantization_reason,
    )
    found["reasons"] = [reason for reason in reasons if reason]
    for round_number, count in enumerate(args.sequences):
        for number, prompt in enumerate(prompts(core.info.vocab_size, count, args.prompt)):
            sampling = Sampling(temperature=0.0, max_tokens=args.new)
            request = ValidRequest(
                request_id=f"{round_number}-{number}", task="completions", model="m",
                sequences=(Sequence(prompt_token_ids=prompt),), sampling=sampling,
            )  # fmt: skip
            core.add(request)
        began = time.perf_counter()
        while any(not sequence.decodes for sequence in core.parts.scheduler.running) or core.parts.scheduler.waiting:
            core.step()
        synchronize(args.device)
        found["prefill"][count] = time.perf_counter() - began
        times = []
        while core.has_work():
            before, began = len(core.parts.scheduler.running), time.perf_counter()
            core.step()
            if before == count:
                times.append(time.perf_counter() - began)
        found["steps"][count] = sorted(times)[len(times) // 2] if times else float("nan")
    core.close()
    return found


def run_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Return the same of vLLM: the difference of two runs, of which one has half as many tokens, is pure decoding."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=str(args.model), skip_tokenizer_init=True, max_num_seqs=max(args.sequences), max_model_len=4096,
              enable_prefix_caching=False, gpu_memory_utilization=0.6)  # fmt: skip
    found: dict[str, Any] = {"steps": {}}
    for count in args.sequences:
        asked = [
            TokensPrompt(prompt_token_ids=list(p)) for p in prompts(config_of(args.size).vocab_size, count, args.prompt)
        ]
        seconds = {}
        for new in (args.new, args.new // 2, args.new):  # the first warms up
            began = time.perf_counter()
            llm.generate(
                asked, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False), use_tqdm=False
            )
            seconds[new] = time.perf_counter() - began
        found["steps"][count] = (seconds[args.new] - seconds[args.new // 2]) / (args.new - args.new // 2)
    return found


def in_a_process(args: argparse.Namespace, contender: str, seconds: float) -> dict[str, Any]:
    """Run a contender in a process of its own and return its measurements, or ``error``."""
    command = [sys.executable, __file__, "--run", contender, "--model", str(args.model), "--size", args.size]
    command += ["--device", args.device, "--prompt", str(args.prompt), "--new", str(args.new)]
    command += ["--cuda-graphs", args.cuda_graphs, "--launch-ahead", args.launch_ahead]
    command += ["--sequences", *map(str, args.sequences)]
    seconds = min(seconds, max(args.ends - time.monotonic(), 1))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]}
    return json.loads(lines[-1].removeprefix("RESULT "))


HEADS = (
    *("sequences", "ours", "not ahead", "fp8", "of bfloat16", "vLLM", "of vLLM"),
    *("floor", "times it", "fp8's floor", "times it"),
)


def table(
    args: argparse.Namespace,
    ours: dict[str, Any],
    plain: dict[str, Any],
    fp8: dict[str, Any],
    theirs: dict[str, Any],
    speed: float,
) -> str:
    """Return a line per number of sequences: tokens per second, and the step time relative to the floor. ``plain`` is
    ours with no step launched ahead."""
    config, itemsize = config_of(args.size), 4 if args.device == "cpu" else 2
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for count in args.sequences:
        step, one, narrow, other = (found.get("steps", {}).get(str(count)) for found in (ours, plain, fp8, theirs))
        length = args.prompt + args.new / 2
        least, least_narrow = (floor_seconds(config, itemsize, count, length, speed, size) for size in (None, 1))
        rates = [f"{count / seconds:,.0f}" if seconds else "–" for seconds in (step, one, narrow, other)]
        cells = [str(count), *rates[:3], _ratio(step, narrow), rates[3], _ratio(other, step)]
        cells += [f"{count / least:,.0f}", _ratio(step, least), f"{count / least_narrow:,.0f}"]
        lines.append(f"| {' | '.join((*cells, _ratio(narrow, least_narrow)))} |")
    return "\n".join(lines)


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other else "–"


def prompts_line(name: str, found: dict[str, Any]) -> str:
    """Return the seconds in which the prompts of each number of sequences were computed."""
    return f"{name}: prompts in " + ", ".join(f"{n}: {seconds:.2f} s" for n, seconds in found["prefill"].items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--cuda-graphs", choices=("auto", "none"), default="auto")
    parser.add_argument("--launch-ahead", choices=("auto", "none"), default="auto")
    parser.add_argument("--seconds", type=float, default=200, help="for each contender")
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of random weights")
    parser.add_argument("--total", type=float, default=3600, help="seconds, for all of them")
    parser.add_argument("--run", choices=("ours", "fp8", "vllm", "weights"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.ends = time.monotonic() + args.total
    if args.run == "weights":
        make_weights(args.size, args.device, args.model)
        print("RESULT " + json.dumps({"speed": copy_speed(args.device)}))
        return 0
    if args.run:
        runs = {"ours": run_ours, "fp8": lambda args: run_ours(args, "fp8"), "vllm": run_vllm}
        print("RESULT " + json.dumps(runs[args.run](args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-gpu-") as folder:
        args.model = args.model or Path(folder)
        made = in_a_process(args, "weights", args.seconds)
        if "error" in made:
            print(f"no weights were made: {made['error']}")
            return 1
        ours = in_a_process(args, "ours", args.seconds)
        plain: dict[str, Any] = {}
        if ours.get("ahead"):
            without = argparse.Namespace(**{**vars(args), "launch_ahead": "none"})
            plain = in_a_process(without, "ours", args.seconds)
        fp8 = in_a_process(args, "fp8", args.seconds)
        theirs = {"error": "vLLM is not installed"}
        if find_spec("vllm") is not None and args.device != "cpu":
            theirs = in_a_process(args, "vllm", args.seconds)
    print(
        f"Llama {args.size}, prompts of {args.prompt} tokens, {args.new} new, copies at {made['speed'] / 1e9:,.0f} GB/s"
    )
    print(table(args, ours, plain, fp8, theirs, made["speed"]))
    for name, found in (("bfloat16", ours), ("fp8", fp8)):
        if "error" not in found:
            graphs, ahead = found["graphs"] or "none", "yes" if found["ahead"] else "no"
            start = f"{found['start_seconds']:.1f} s"
            print(f"{name}: attention: {found['attention']}; graphs: {graphs}; launched ahead: {ahead}; start: {start}")
            print(prompts_line(name, found))
        for line in (*found.get("reasons", ()), found.get("error")):
            if line:
                print(f"- {name}: {line}")
    for found in (plain, theirs):
        if "error" in found:
            print(f"- {found['error']}")
    return int("error" in ours or "error" in fp8)


if __name__ == "__main__":
    sys.exit(main())
