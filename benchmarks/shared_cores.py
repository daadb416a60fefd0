"""Tokens per second on shared CPUs: alone, beside busy neighbours, and under a CPU quota.

Contenders are processes that hold the model all the time and run one after the other, a short burst each, in an order
that changes from round to round; what is reported are medians of the ratios within a round, because such a machine's
speed changes from minute to minute. Where a process's memory happens to lie makes it some percent faster or slower for
all its life, above all which one is started first: `--launches` (an even number) starts them anew, in both orders.
`passive` has OMP_WAIT_POLICY=passive. With `--against DIR` (the root of
another checkout, kernels built) that code runs too, as it is and passive. `--quota` needs root and a cpu controller.
`--alone` needs root: a burst runs before everything else on the machine (SCHED_FIFO).

    python benchmarks/shared_cores.py --model .cache/models/smollm2 --neighbours 2
    python benchmarks/shared_cores.py --model .cache/models/smollm2 --quota 0.5
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from decode import prompt_ids
from measured import say_kernels
from report import publish

ROOT = Path(__file__).resolve().parents[1]
BUSY = "while True: pass"


def hold(args: argparse.Namespace) -> None:
    """Run a contender: a burst of `size` sequences for each input line `size`; print its seconds per token."""
    sys.path.insert(0, args.code)
    from mlflow_llm.serving.interface.bundle import Bundle
    from mlflow_llm.serving.interface.settings import EngineSettings

    try:
        process = importlib.import_module("mlflow_llm.serving.transport.engine_process.main")
    except ModuleNotFoundError:  # the code of --against, where the module was elsewhere
        process = importlib.import_module("mlflow_llm.serving.transport.process")
    settings = EngineSettings(
        quantization=args.quantization, max_model_len=2048, prefix_caching=False, threads=args.threads or None,
        kernels=args.kernels, kv_cache_memory=1 << 28,
    )  # fmt: skip
    process.set_threads(settings)  # as an engine process does, before torch is there
    from transformers import AutoTokenizer

    from mlflow_llm.serving.engine.core import EngineCore
    from mlflow_llm.serving.interface.events import Tokens
    from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

    assert process.__file__ is not None
    assert Path(process.__file__).resolve().is_relative_to(Path(args.code).resolve()), process.__file__
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
    if Path(args.code).resolve() == ROOT:  # another checkout may be older than what is asked here
        say_kernels(args.kernels)
    core = EngineCore(bundle, settings)
    if args.alone and hasattr(core, "_contention"):  # its view of other processes is from before its bursts
        core._contention.look = lambda: None  # type: ignore[method-assign]

    def burst(size: int, number: int) -> Burst:
        for i in range(size):
            sequence = Sequence(prompt_token_ids=tuple(prompt_ids(tokenizer, i, args.prompt)))
            core.add(
                ValidRequest(
                    request_id=f"r{number}-{i}", task="completions", model="m", sequences=(sequence,),
                    sampling=Sampling(max_tokens=args.new, temperature=0.0),
                ),
                b"bench",
            )  # fmt: skip
        start, ran, count = time.perf_counter(), time.process_time(), 0
        while core.has_work():
            count += sum(len(event.token_ids) for *_, event in core.step() if isinstance(event, Tokens))
        return Burst((time.perf_counter() - start) / count, (time.process_time() - ran) / count)

    burst(1, -1)
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        print(*burst(int(line), number), flush=True)


class Burst(NamedTuple):
    """A burst's seconds per token, by the clock and as CPU time of the whole process, spinning included."""

    seconds: float
    processor: float


class Contender:
    def __init__(self, args: argparse.Namespace, code: str, environment: dict[str, str]) -> None:
        arguments = ["--hold", "--code", code, "--model", args.model, "--quantization", args.quantization]
        arguments += ["--prompt", str(args.prompt), "--new", str(args.new), "--threads", str(args.threads)]
        arguments += ["--kernels", args.kernels, *(["--alone"] if args.alone else [])]
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [*args.under.split(), sys.executable, "-P", __file__, *arguments], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, "PYTHONPATH": f"{code}:{ROOT / 'benchmarks'}", **environment},
        )  # fmt: skip
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def burst(self, size: int, *, alone: bool = False) -> Burst:
        assert self._process.stdin is not None
        with self._first() if alone else contextlib.nullcontext():
            print(size, file=self._process.stdin, flush=True)
            return Burst(*map(float, self._line().split()))

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        """Run its threads before all others (SCHED_FIFO)."""
        self._schedule(os.SCHED_FIFO, 1)
        try:
            yield
        finally:
            self._schedule(os.SCHED_OTHER, 0)

    def _schedule(self, policy: int, priority: int) -> None:
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run processes that are always busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota(processors: float) -> Iterator[Path | None]:
    """Make a control group with the given CPU time, of cgroup v2 if it has the controller, else of v1; None for 0."""
    if not processors:
        yield None
        return
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    unified = controllers.exists() and "cpu" in controllers.read_text().split()
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((path for _, names, path in (line.split(":", 2) for line in lines) if "cpu" in names.split(",")), "/")
    parent = Path("/sys/fs/cgroup") if unified else Path("/sys/fs/cgroup/cpu") / own.lstrip("/")
    group = parent / f"shared-cores-{os.getpid()}"
    group.mkdir()
    try:
        if unified:
            (group / "cpu.max").write_text(f"{int(processors * 100_000)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(int(processors * 100_000)))
        yield group
    finally:
        group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--against", help="root of another checkout")
    parser.add_argument("--spins", type=int, nargs="*", default=[], help="values of GOMP_SPINCOUNT to try besides")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside each burst")
    parser.add_argument("--quota", type=float, default=0.0, help="processors' worth of time that contenders get")
    parser.add_argument("--alone", action="store_true", help="bursts run before all others")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a burst")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the engine takes by itself")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--launches", type=int, default=1, help="times that contenders are started anew")
    parser.add_argument("--passive", action=argparse.BooleanOptionalAction, default=True, help="passive contenders too")
    parser.add_argument("--under", default="", help="what contenders are started with, as 'chrt -f 1'")
    parser.add_argument("--name", default="shared_cores", help="of the file in results/")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--code", default=str(ROOT), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold:
        hold(args)
        return
    bursts: dict[str, list[Burst]] = {}
    for number in range(args.launches):
        for name, found in launch(args, number).items():
            bursts.setdefault(name, []).extend(found)
    reference = "one core" if args.quota else "before" if args.against else "ours, passive"
    rows = []
    for name, own in bursts.items():
        row: dict[str, Any] = {"": name, "tokens/s": statistics.median(1 / burst.seconds for burst in own)}
        row["processor ms a token"] = statistics.median(1e3 * burst.processor for burst in own)
        for other in dict.fromkeys((reference, "before, passive" if args.against else "ours, passive")):
            if other not in bursts:
                continue
            pairs = list(zip(own, bursts[other], strict=True))
            ratios = sorted(theirs.seconds / ours.seconds for ours, theirs in pairs)
            row[f"× {other}"] = statistics.median(ratios)
            row[f"{other}: quartiles"] = f"{ratios[len(ratios) // 4]:.2f}–{ratios[-1 - len(ratios) // 4]:.2f}"
            row[f"{other}: by CPU time"] = statistics.median(b.processor / a.processor for a, b in pairs)
        rows.append(row)
    times = f"{args.rounds} rounds" if args.launches == 1 else f"{args.launches} launches of {args.rounds} rounds"
    publish(args.name, rows, load=f"{args.batch} × ({args.prompt} prompt + {args.new} new tokens), {times}")


def launch(args: argparse.Namespace, number: int) -> dict[str, list[Burst]]:
    """Start contenders anew and run their bursts, every other time in reverse: the one that starts first is some
    percent slower for all its life, even of the same code."""
    kinds: dict[str, tuple[str, dict[str, str]]] = {"ours": (str(ROOT), {})}
    kinds |= {f"ours, {n} spins": (str(ROOT), {"GOMP_SPINCOUNT": str(n)}) for n in args.spins}
    if args.against:
        kinds |= {"before": (os.path.abspath(args.against), {})}
    if args.passive:
        passive = {"OMP_WAIT_POLICY": "passive"}
        kinds |= {f"{name}, passive": (code, passive) for name, (code, _) in kinds.items() if "spins" not in name}
    kinds = dict(reversed(kinds.items())) if number % 2 else kinds
    threads = args.threads
    with quota(args.quota) as group, contextlib.ExitStack() as stack:
        contenders = {}
        if group is not None:  # children belong to our group: so they see the quota from their first moment
            (group / "cgroup.procs").write_text(str(os.getpid()))
            stack.callback((group.parent / "cgroup.procs").write_text, str(os.getpid()))
        for name, (code, environment) in kinds.items():
            contenders[name] = Contender(args, code, environment)
            stack.callback(contenders[name].close)
        if group is not None:  # the baseline without a quota: the same code outside of the group
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            args.threads = 1
            contenders["one core"] = Contender(args, str(ROOT), {})
            stack.callback(contenders["one core"].close)
            args.threads = threads
        return measure(args, contenders, random.Random(number))


def measure(
    args: argparse.Namespace, contenders: dict[str, Contender], chance: random.Random
) -> dict[str, list[Burst]]:
    """Measure each contender round by round: pairs of rounds, the second in the reverse order of the first."""
    bursts: dict[str, list[Burst]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(args.rounds):
        if number % 2:
            order.reverse()
        else:
            chance.shuffle(order)
        for name in order:
            with neighbours(args.neighbours):
                bursts[name].append(contenders[name].burst(args.batch, alone=args.alone))
        print(
            json.dumps({name: round(1 / found[-1].seconds, 1) for name, found in bursts.items()}),
            file=sys.stderr,
            flush=True,
        )
    return bursts


if __name__ == "__main__":
    main()
