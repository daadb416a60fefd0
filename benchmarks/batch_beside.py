"""Interactive requests of a server while one of its batches runs, and while none does.

Callers stream one chat after another and rest between them, so that requests also come while the engine has nothing but
the batch. Rounds have a phase of each kind, in alternating order, because these machines are noisy. The table has the
requests of all rounds together, and the ratio of the 99th percentiles of each round's phases. TTFT is the time to the
first text, TPOT a request's mean time from one token to the next. `probe` is the wall time of a second of work in
another process: what neighbours take shows there.

    python benchmarks/batch_beside.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from load import Server, free_port
from measured import say_kernels
from report import publish

from mlflow_llm.serving.cli.http import Client
from mlflow_llm.serving.cli.load_generator import Body, Result, Sample, closed_loop, percentile, prompt, streamed

ROUTE: Final = "/v1/chat/completions"
LOOP = 200_000  # additions of the probe


def body(number: int, words: int, tokens: int, **more: Any) -> Body:
    messages = [{"role": "user", "content": prompt(number, words)}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


class Batch:
    """A batch with more rows than a phase can answer."""

    def __init__(self, url: str, args: argparse.Namespace, seed: int) -> None:
        import openai

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": ROUTE,
                "body": body(10**6 + seed * args.rows + i, args.batch_words, args.batch_new),
            }
            for i in range(args.rows)
        ]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = self._client.files.create(file=("rows.jsonl", text), purpose="batch")
        made = self._client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
        self._id = made.id

    def answered(self) -> int:
        counts = self._client.batches.retrieve(self._id).request_counts
        return 0 if counts is None else counts.completed

    def wait_for_rows(self) -> None:
        """Wait until rows are answered."""
        until = time.monotonic() + 300
        while not self.answered():
            if time.monotonic() > until:
                raise RuntimeError("no row of the batch was answered in 300 s")
            time.sleep(0.2)

    def end(self) -> None:
        """Cancel the batch, and wait until none of its rows runs."""
        self._client.batches.cancel(self._id)
        until = time.monotonic() + 300
        while self._client.batches.retrieve(self._id).status != "cancelled":
            if time.monotonic() > until:
                raise RuntimeError("the batch was not cancelled in 300 s")
            time.sleep(0.2)
        self._client.close()


class Probe(threading.Thread):
    """A thread that times a loop now and then: the share of a core that is left for a process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._times: list[float] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            began = time.thread_time(), time.perf_counter()
            sum(range(LOOP))
            used = time.thread_time() - began[0]
            self._times.append((time.perf_counter() - began[1]) / max(used, 1e-9))

    def end(self) -> float:
        """Return the mean wall time of a second of work."""
        self._ended.set()
        self.join()
        return statistics.fmean(self._times)


def phase(url: str, args: argparse.Namespace, seed: int) -> tuple[Result, float]:
    """Return what interactive callers saw, and the probe."""
    draw = random.Random(seed)
    probe = Probe()
    until = time.monotonic() + args.seconds

    def bodies() -> Iterator[Body]:
        number = seed * 10**4
        while time.monotonic() < until:
            number += 1
            yield body(number, args.words, args.new, stream=True, stream_options={"include_usage": True})

    def ask(asked: Body) -> Sample:
        time.sleep(draw.uniform(0, 2 * args.rest))
        return streamed(Client(url, None), asked)

    probe.start()
    result = closed_loop(ask, bodies(), args.callers)
    if result.errors:
        raise RuntimeError(result.errors[0])
    return result, probe.end()


@contextmanager
def running(url: str, args: argparse.Namespace, seed: int, *, beside: bool) -> Iterator[Batch | None]:
    """Have a batch run for as long as the ``with`` lasts, if ``beside``."""
    if not beside:
        yield None
        return
    batch = Batch(url, args, seed)
    try:
        batch.wait_for_rows()
        yield batch
    finally:
        batch.end()


def times(result: Result, name: str) -> list[float]:
    """Return the times of a phase in milliseconds, sorted."""
    return sorted(value * 1e3 for one in result.samples if (value := getattr(one, name)) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--words", type=int, default=60, help="words of an interactive prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an interactive reply")
    parser.add_argument("--rest", type=float, default=1.0, help="mean seconds between a caller's requests")
    parser.add_argument("--rows", type=int, default=2000, help="rows of each batch")
    parser.add_argument("--batch-words", type=int, default=300)
    parser.add_argument("--batch-new", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    say_kernels()
    port = free_port()
    found: dict[bool, list[tuple[Result, float]]] = {False: [], True: []}
    rows_per_second = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", f"{args.model}=m", "--port", str(port)]
        command += ["--workers", "1", "--database", f"sqlite:///{folder}/serving.db"]
        with Server(command, port, log=Path(folder, "log")) as server:
            phase(server.url, argparse.Namespace(**vars(args) | {"seconds": 3}), 999)
            for round_number in range(args.rounds):
                order = (False, True) if round_number % 2 else (True, False)
                for beside in order:
                    seed = 2 * round_number + beside
                    with running(server.url, args, seed, beside=beside) as batch:
                        before, began = batch.answered() if batch else 0, time.perf_counter()
                        found[beside].append(phase(server.url, args, seed))
                        if batch:
                            rows_per_second.append((batch.answered() - before) / (time.perf_counter() - began))
                    result, probe = found[beside][-1]
                    ttft, tpot = (percentile(times(result, name), 99) for name in ("ttft", "tpot"))
                    said = f"TTFT p99 {ttft:.0f} ms, TPOT p99 {tpot:.1f} ms"
                    kind = "beside" if beside else "alone"
                    print(f"round {round_number + 1}, {kind}: {said}, probe {probe:.2f}", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for name in ("ttft", "tpot"):
        rounds = [[times(result, name) for result, _ in found[beside]] for beside in (False, True)]
        ratios = [percentile(other, 99) / percentile(one, 99) for one, other in zip(*rounds, strict=True)]
        alone, beside_batch = (sorted(chain(*each)) for each in rounds)
        rows.append(
            {
                "time": name.upper(),
                "requests": f"{len(alone)} + {len(beside_batch)}",
                "p50 alone ms": percentile(alone, 50),
                "p50 × alone": percentile(beside_batch, 50) / percentile(alone, 50),
                "p99 alone ms": percentile(alone, 99),
                "p99 × alone": percentile(beside_batch, 99) / percentile(alone, 99),
                "of the median round": statistics.median(ratios),
                "its rounds": f"{min(ratios):.2f} to {max(ratios):.2f}",
            }
        )
    probes = [statistics.median(probe for _, probe in found[beside]) for beside in (False, True)]
    load = f"{args.callers} callers, {args.words} words, {args.new} new tokens, rest {args.rest:g} s; batch: "
    load += f"{args.batch_words} words, {args.batch_new} new tokens, {statistics.median(rows_per_second):.2f} rows/s; "
    load += f"{args.rounds} rounds of 2 x {args.seconds:g} s; probe {probes[0]:.2f} alone, {probes[1]:.2f} beside"
    publish("batch_beside", rows, load=load)


if __name__ == "__main__":
    main()
