"""The overhead of the server around its engine: alone, or with `--model` end to end; and the time until it is ready.

Alone: one worker, with an engine that answers at once (`serving/testing/instant_core.py`), beside a bare Flask
application that streams prepared events from the same gunicorn/gevent worker. End to end (`--model` is a saved MLflow
model): tokens/s of the server's streams beside the same requests put into the engine inside one process. The callers
run on the same cores.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --model DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
from bare_sse import BareServer
from load import LlmServe, Server, free_port
from measured import announced, say_kernels
from report import publish
from streams import Call, closed_loop, encode

from mlflow_llm.serving.cli.load_generator import percentile
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

PATH = "/v1/completions"
CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
PACE = 0.010  # seconds a token, of the paced engine


def instant_bundle(root: Path, step_delay: float) -> Bundle:
    """Return a bundle without weights and with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet()))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(root / "tokenizer")
    (root / "instant.json").write_text(json.dumps({"vocab_size": 64, "step_delay": step_delay}))
    return Bundle(
        content_hash=f"instant-{root.name}",
        tasks=("completions",),
        model_dir=str(root),
        tokenizer_dir=str(root / "tokenizer"),
    )


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def instant_server(root: Path, step_delay: float) -> LlmServe:
    """Run the server with an engine that answers at once, and one worker."""
    root.mkdir()
    port = free_port()
    engine = EngineSettings(idle_timeout=0.3, max_num_seqs=256)
    endpoint = EndpointSpec(
        name="bench", entity="bench", bundle=instant_bundle(root, step_delay), core=CORE, engine=engine
    )
    settings = ServerSettings(port=port, workers=1, log_level="warning")
    (root / "run").mkdir(mode=0o700)
    spec = ServeSpec(endpoints=(endpoint,), settings=settings, runtime_dir=str(root / "run"))
    (root / "spec.json").write_bytes(msgspec.json.encode(spec))
    return LlmServe("--spec", str(root / "spec.json"), port=port, log=root / "log")


def body(number: int, tokens: int, *, stream: bool, prompt: list[int] | None = None) -> bytes:
    ids = prompt or [(number * 7 + i) % 60 for i in range(16)]
    request = {"model": "bench", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return encode(PATH, request | ({"stream": True} if stream else {}))


def tpot(calls: list[Call]) -> list[float]:
    """Return the mean seconds between the streamed events of each call."""
    short = [c.data[:500] for c in calls if len(c.chunks) < 3]
    if short:
        raise RuntimeError(f"streams without events: {short[0]!r}")
    return sorted((c.chunks[-1] - c.chunks[0]) / (len(c.chunks) - 1) for c in calls)


def alone(name: str, at_once: Server, paced: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Measure whole replies of one token, streams as fast as they come, and streams of a paced engine."""
    row: dict[str, Any] = {"server": name}
    with at_once as server:
        row["ready after s"] = server.ready_after
        ones = [body(i, 1, stream=False) for i in range(args.requests)]
        closed_loop(server.port, ones[:50], 8, streamed=False)
        calls, seconds = closed_loop(server.port, ones[: args.requests // 4], 1, streamed=False)
        row["1 caller: requests/s"] = len(calls) / seconds
        row["p50 ms"] = percentile(sorted(c.ended - c.started for c in calls), 50) * 1e3
        before = server.worker_seconds()
        calls, seconds = closed_loop(server.port, ones, 32, streamed=False)
        row["32: requests/s"] = len(calls) / seconds
        row["worker µs a request"] = (server.worker_seconds() - before) / len(calls) * 1e6
        before = server.worker_seconds()
        streams = [body(i, args.new, stream=True) for i in range(args.requests // 10)]
        calls, seconds = closed_loop(server.port, streams, 32, streamed=True)
        events = sum(len(c.chunks) for c in calls)
        row["32 streams: events/s"] = events / seconds
        row["worker µs an event"] = (server.worker_seconds() - before) / events * 1e6
    with paced as server:
        closed_loop(server.port, [body(i, 4, stream=True) for i in range(8)], 8, streamed=True)
        for callers in (1, 32):
            asked = [body(i, args.new, stream=True) for i in range(callers)]
            before = server.worker_seconds()
            calls, _ = closed_loop(server.port, asked, callers, streamed=True)
            row[f"10 ms pace, {callers}: ms an event"] = statistics.median(tpot(calls)) * 1e3
            spent = server.worker_seconds() - before
            row[f"10 ms pace, {callers}: worker µs an event"] = spent / sum(len(c.chunks) for c in calls) * 1e6
    return row


def in_process(args: argparse.Namespace) -> None:
    """Run the engine in this process and on this thread: a line "SIZE FIRST" in, tokens/s of that burst out."""
    from mlflow_llm.serving.cli.model_options import endpoint_specs
    from mlflow_llm.serving.engine.core import EngineCore
    from mlflow_llm.serving.interface.events import Tokens
    from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

    (spec,) = endpoint_specs({"bench": args.model}, {})
    core = announced(EngineCore(spec.bundle, spec.engine))
    for line in sys.stdin:
        size, first = map(int, line.split())
        began = time.perf_counter()
        for number in range(first, first + size):
            sequence = Sequence(prompt_token_ids=tuple(prompt(number, core.info.vocab_size)))
            sampling = Sampling(max_tokens=args.new, temperature=0.0)
            request = ValidRequest(
                request_id=f"r{number}", task="completions", model="m", sequences=(sequence,), sampling=sampling
            )
            core.add(request, b"bench")
        tokens = 0
        while core.has_work():
            tokens += sum(len(event.token_ids) for *_, event in core.step() if isinstance(event, Tokens))
        print(tokens / (time.perf_counter() - began), flush=True)


def prompt(number: int, vocab_size: int) -> list[int]:
    """Return 100 token ids that differ from the first one on for each number."""
    return [(number * 7919 + i * (number % 13 + 3) * 31 + 500) % min(vocab_size, 30_000) for i in range(100)]


def end_to_end(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run bursts of requests at the server and in process, in turn: a machine's pace drifts, so each pair is a
    ratio."""
    command = [sys.executable, __file__, "--in-process", "--model", args.model, "--new", str(args.new)]
    rates: dict[int, list[tuple[float, float]]] = {callers: [] for callers in args.callers}
    serve = LlmServe("-m", args.model, "--name", "bench", "--workers", "1", "--log-level", "warning")
    with serve as server, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as inside:
        own_burst(inside, 2, 0), served_burst(server, args, 2, 0)
        for turn in range(args.rounds):
            for callers in args.callers:
                first = turn * 10_000 + callers * 100
                own = own_burst(inside, callers, first)
                rates[callers].append((own, served_burst(server, args, callers, first)))
        inside.stdin.close()  # type: ignore[union-attr]
    return [
        {
            "callers": callers,
            "in process: tokens/s": statistics.median(own for own, _ in pairs),
            "server: tokens/s": statistics.median(served for _, served in pairs),
            "server / in process": statistics.median(served / own for own, served in pairs),
            "lowest": min(served / own for own, served in pairs),
            "highest": max(served / own for own, served in pairs),
            "ready after s": server.ready_after,
        }
        for callers, pairs in rates.items()
    ]


def own_burst(inside: subprocess.Popen[str], size: int, first: int) -> float:
    assert inside.stdin is not None
    assert inside.stdout is not None
    print(size, first, file=inside.stdin, flush=True)
    while not (said := inside.stdout.readline()).strip().replace(".", "").isdigit():
        if not said:
            raise RuntimeError("the engine in process ended")
    return float(said)


def served_burst(server: Server, args: argparse.Namespace, size: int, first: int) -> float:
    requests = [body(n, args.new, stream=True, prompt=prompt(n, 30_000)) for n in range(first, first + size)]
    _, seconds = closed_loop(server.port, requests, size, streamed=True)
    return size * args.new / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a saved MLflow model, for the end to end part")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=128, help="new tokens a request")
    parser.add_argument("--requests", type=int, default=2000, help="of one token; a tenth as many streams")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of bursts for each number of callers")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        in_process(args)
        return
    if args.model:
        say_kernels()
        rows = end_to_end(args)
        publish("gateway_end_to_end", rows, load=f"100 prompt + {args.new} new tokens, greedy, {args.rounds} rounds")
        return
    with tempfile.TemporaryDirectory(prefix="mlb-") as folder:
        root = Path(folder)
        bare = alone("bare Flask, gevent", BareServer(args.new, 0), BareServer(args.new, PACE), args)
        ours = alone("mlflow-llm", instant_server(root / "a", 0), instant_server(root / "p", PACE), args)
    added = ours["worker µs an event"] - bare["worker µs an event"]
    publish("gateway", [bare, ours], load="one worker; callers on the same cores", added_us_per_streamed_token=added)
    print(f"added per streamed token: {added:.0f} µs of the worker's CPU time")


if __name__ == "__main__":
    main()
