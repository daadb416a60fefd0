"""Speed of provisioned requests while 64 pay-per-token callers flood the same engine, and speed of the flood.

Callers send one request after another (closed loop), drive the engine itself and stamp every token as it comes out;
reserved callers do so without rest (`busy`), or rest after each answer (`pausing`) and leave the engine idle at times.
Phases alternate in one process, because these machines are noisy: reserved callers alone, reserved callers and flood,
flood alone. `TPOT` is a request's mean time from one token to the next; `pause` any single time between two tokens.

    python benchmarks/guarantee.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings


@dataclass
class Seen:
    """The tokens, and times between them, of one class of callers in one kind of phase."""

    tokens: int = 0
    seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


class Callers:
    """A class of ``count`` callers; each sends its next request when the last has ended."""

    def __init__(self, core: EngineCore, name: str, count: int, args: argparse.Namespace, rest: float = 0.0) -> None:
        self.core, self.name, self.count, self.args, self.rest = core, name, count, args, rest
        self.due: list[float] = []  # when those that pause send again
        self.draw = random.Random(name)
        self.open: dict[str, list[float]] = {}  # by running request: the time it was sent, then that of each token

    def start(self) -> None:
        self.due = [time.perf_counter() + self.draw.uniform(0, self.rest) for _ in range(self.count)]

    def tick(self, now: float) -> None:
        due = [at for at in self.due if at <= now]
        self.due = [at for at in self.due if at > now]
        for _ in due:
            self.send()

    def send(self) -> None:
        request_id = f"{self.name}-{time.monotonic_ns()}-{len(self.open)}"
        vocabulary = self.core.info.vocab_size
        prompt = tuple(self.draw.randrange(vocabulary) for _ in range(self.args.prompt))
        self.open[request_id] = [time.perf_counter()]
        self.core.add(
            ValidRequest(
                request_id=request_id,
                task="completions",
                model="m",
                sequences=(Sequence(prompt_token_ids=prompt),),
                sampling=Sampling(max_tokens=self.draw.randint(self.args.new // 2, self.args.new), temperature=0.0),
                stream=True,
                provisioned=self.name == "reserved",
            )
        )

    def token(self, request_id: str, seen: Seen | None) -> None:
        times = self.open[request_id]
        times.append(time.perf_counter())
        if seen is None:
            return
        seen.tokens += 1
        if len(times) == 2:
            seen.first.append(times[1] - times[0])
        else:
            seen.pauses.append(times[-1] - times[-2])

    def end(self, request_id: str, seen: Seen | None) -> None:
        times = self.open.pop(request_id)
        if seen is not None and len(times) > 2:
            seen.tpots.append((times[-1] - times[1]) / (len(times) - 2))
        self.due.append(time.perf_counter() + self.rest * self.draw.uniform(0.5, 1.5))

    def stop(self) -> None:
        for request_id in list(self.open):
            self.core.abort(request_id)
        self.open.clear()
        self.due.clear()


def phase(core: EngineCore, callers: list[Callers], seconds: float, found: dict[str, Seen]) -> None:
    """Run ``callers`` for ``seconds`` after a warm-up that is not counted."""
    by_name = {c.name: c for c in callers}
    for c in callers:
        c.start()
    settle = time.perf_counter() + seconds / 5
    until = settle + seconds
    began = None
    while (now := time.perf_counter()) < until or began is None:
        counted = now >= settle
        if counted and began is None:
            began = now
        for c in callers:
            c.tick(now)
        if not core.has_work():
            time.sleep(0.001)
        for _, request_id, event in core.step():
            name = request_id.partition("-")[0]
            seen = found[name] if counted else None
            if isinstance(event, Tokens):
                by_name[name].token(request_id, seen)
            elif isinstance(event, Finished):
                by_name[name].end(request_id, seen)
    for c in callers:
        found[c.name].seconds += time.perf_counter() - began
        c.stop()
    while core.has_work():
        core.step()
    core.check_integrity()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def row(load: str, who: str, seen: Seen, alone: Seen | None) -> dict[str, Any]:
    rate = seen.tokens / seen.seconds
    tpot, pause = percentile(seen.tpots, 0.99), percentile(seen.pauses, 0.99)
    of_rate = rate / (alone.tokens / alone.seconds) if alone else None
    of_tpot = tpot / percentile(alone.tpots, 0.99) if alone and alone.tpots and seen.tpots else None
    return {
        "load": load,
        "callers": who,
        "tokens/s": rate,
        "× alone": of_rate,
        "TPOT p50 ms": statistics.median(seen.tpots) * 1000 if seen.tpots else None,
        "TPOT p99 ms": tpot * 1000 if seen.tpots else None,
        "TPOT p99 × alone": of_tpot,
        "pause p99 ms": pause * 1000 if seen.pauses else None,
        "first token p50 ms": statistics.median(seen.first) * 1000 if seen.first else None,
        "requests": len(seen.tpots),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--reserved", type=int, default=8, help="callers within their reserve")
    parser.add_argument("--flood", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens")
    parser.add_argument("--new", type=int, default=96, help="new tokens, half to all of them")
    parser.add_argument("--rest", type=float, default=3.0, help="mean seconds that a pausing caller waits")
    parser.add_argument("--seconds", type=float, default=11.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    say_kernels()
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
    settings = EngineSettings(quantization=args.quantization, max_model_len=2048, threads=args.threads)
    core = announced(EngineCore(bundle, settings))
    flood = Callers(core, "flood", args.flood, args)
    kinds = {
        "busy": Callers(core, "reserved", args.reserved, args),
        "pausing": Callers(core, "reserved", args.reserved, args, rest=args.rest),
    }
    found: dict[str, dict[str, Seen]] = defaultdict(lambda: defaultdict(Seen))
    phase(core, [kinds["busy"]], 2.0, defaultdict(Seen))
    for _ in range(args.rounds):
        for kind, reserved in kinds.items():
            phase(core, [reserved], args.seconds, found[f"{kind} alone"])
            phase(core, [reserved, flood], args.seconds, found[f"{kind} and flood"])
    phase(core, [flood], args.seconds, found["flood alone"])
    of_flood = found["flood alone"]["flood"]
    rows = [row("flood alone", f"{args.flood} flood", of_flood, None)]
    for kind in kinds:
        alone, both = found[f"{kind} alone"]["reserved"], found[f"{kind} and flood"]
        rows.append(row(f"{kind} alone", f"{args.reserved} reserved", alone, None))
        rows.append(row(f"{kind} and flood", f"{args.reserved} reserved", both["reserved"], alone))
        rows.append(row(f"{kind} and flood", f"{args.flood} flood", both["flood"], of_flood))
    load = f"{args.prompt} prompt, {args.new // 2} to {args.new} new tokens, greedy, {args.rounds} x {args.seconds:g} s"
    publish("guarantee", rows, load=load, quantization=args.quantization)


if __name__ == "__main__":
    main()
