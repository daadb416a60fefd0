"""Our engine beside OpenVINO GenAI, llama.cpp, transformers, vLLM and `mlflow.transformers`, in one run and one table.

    python benchmarks/compare.py --model .cache/models/smollm2
    python benchmarks/compare.py --table                # results as Markdown into docs/performance.md

Each contender has an environment of its own, made once under `--environments`, and the same weights in its own form.
It runs in a process of its own, which is asked by lines of JSON (`comparison/drive.py`) and idle while others run.
In each round all of them run each workload one after the other, ours between the peers, in an order that turns from
round to round; what is shown are medians of rounds, and the ratio is the median of the ratios within a round. Prompts
are drawn from a seed: the same for all, others in each round. Contenders with a prefix cache use it; speculation is
off.
A contender that cannot be installed, fails, or takes longer than `--limit` is a row, or a cell, without figures but
with the reason, and the run goes on. Texts are compared with transformers' `generate()` in float32 before any timing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison import tables, workloads
from comparison.contenders import CONTENDERS, REFERENCE, made, start
from comparison.environments import Environments, Models
from comparison.figures import Figures, figures, medians, ratio
from comparison.protocol import Failed, Process
from comparison.texts import Reference
from comparison.without_amx import refuse_amx
from report import RESULTS, machine, publish

OURS = "ours int8"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
LOADED_SECONDS = 25.0
Make = Callable[[workloads.Writer], workloads.Workload]


def loaded_name(share: float) -> str:
    return f"chats at {share:.0%} of what each can do"


class Comparison:
    """The contenders' processes, their results so far, and the reasons of those that are out."""

    def __init__(self, args: argparse.Namespace, environments: Environments, models: Models, tokenizer: Any) -> None:
        self._args, self._environments, self._models, self._tokenizer = args, environments, models, tokenizer
        self.processes: dict[str, Process] = {}
        self.errors: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.texts: dict[str, dict[str, Any]] = {}
        self.found: dict[str, dict[str, list[Figures]]] = {name: {} for name in args.contenders}

    def _start(self, name: str, contender: Any) -> Process:
        args = self._args
        process, told = start(name, contender, self._environments, self._models, args.model, args.start_limit)
        self.versions[name] = told
        return process

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start all contenders that can be started and compare their texts."""
        try:
            asked = workloads.questions(self._tokenizer, 8 if self._args.quick else 32)
            with self._reference(asked) as reference:
                for name in self._args.contenders:
                    self._note(name, "loading")
                    with self.excluding(name):
                        self.processes[name] = self._start(name, CONTENDERS[name])
                        self.run(name, workloads.closed_loop(self._writer("warm"), 2, 2, 32, 4))
                        answers = self.run(name, asked)["answers"]
                        if reference:
                            self.texts[name] = reference.compare({a["id"]: self._tokens(a) for a in answers})
            yield
        finally:
            for process in self.processes.values():
                process.close()

    @contextlib.contextmanager
    def _reference(self, asked: workloads.Workload) -> Iterator[Reference | None]:
        """Return the reference, or None if it fails: texts are not compared then."""
        with contextlib.ExitStack() as ending:
            reference = None
            with self.excluding("reference"):
                process = self._start("reference", REFERENCE)
                ending.callback(process.close)
                reference = Reference(process, asked.requests, self._args.limit)
            yield reference

    @contextlib.contextmanager
    def excluding(self, name: str) -> Iterator[None]:
        """Exclude a contender that fails, and keep the reason."""
        try:
            yield
        except Failed as error:
            self._note(name, f"out: {error}")
            self.errors[name] = str(error)
            if process := self.processes.pop(name, None):
                process.close()

    def _note(self, name: str, said: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {name}: {said}", file=sys.stderr, flush=True)

    def _tokens(self, answer: dict[str, Any]) -> list[int]:
        return answer["tokens"] or self._tokenizer.encode(answer["text"], add_special_tokens=False)

    def _writer(self, seed: str) -> workloads.Writer:
        return workloads.Writer(self._tokenizer, f"{self._args.seed}-{seed}")

    def run(self, name: str, workload: workloads.Workload) -> dict[str, Any]:
        requests = [asdict(request) for request in workload.requests]
        limit = self._args.limit
        message = {"do": "run", "requests": requests, "callers": workload.callers, "limit": limit}
        return self.processes[name].ask(message, limit + 60)

    def round(self, number: int, kinds: list[Make]) -> None:
        names = list(self._args.contenders)[:: 1 if number % 2 == 0 else -1]
        for place, make in enumerate(kinds):
            for name in names:
                if name not in self.processes:
                    continue
                workload = make(self._writer(f"{number}-{place}"))
                with self.excluding(name):
                    self._measure(name, workload)

    def under_load(self, number: int, share: float) -> None:
        """Run chats at ``share`` of each contender's capacity, which is measured first."""
        for name in list(self.processes):
            with self.excluding(name):
                all_at_once = workloads.chats_at_once(self._writer(f"{number}-able"), 64, 32)
                able = self._measure(name, all_at_once)
                rate = share * (len(all_at_once.requests) - able.cut) / able.seconds
                writer, count = self._writer(f"{number}-loaded"), max(16, round(rate * LOADED_SECONDS))
                self._measure(name, workloads.chats(writer, count, rate, loaded_name(share)))

    def _measure(self, name: str, workload: workloads.Workload) -> Figures:
        process = self.processes[name]
        before = process.cpu_seconds()
        answer = self.run(name, workload)
        found = figures(answer, process.cpu_seconds() - before, CONTENDERS[name].streams)
        rate = found.tokens_per_second
        self._note(name, f"{workload.name}: {tables.number(rate)} tokens/s" + f", {found.cut} cut" * bool(found.cut))
        self.found[name].setdefault(workload.name, []).append(found)
        if found.cut:  # its unfinished requests would run into the next workload
            self._note(name, "started anew after a workload that took too long")
            process.close()
            self.processes[name] = self._start(name, CONTENDERS[name])
        return found

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, found in self.found.items():
            ours = self.found.get(OURS, {})
            each: dict[str, Any] = {}
            for workload, rounds in found.items():
                beside = ratio(ours.get(workload, ()), rounds)
                each[workload] = {**medians(rounds), "ratio": beside, "rounds": [asdict(one) for one in rounds]}
            row = {"contender": name, "texts": self.texts.get(name), "versions": self.versions.get(name, {})}
            rows.append({**row, "error": self.errors.get(name), "workloads": each})
        return rows


def show(results: list[Path], document: Path) -> None:
    """Show the runs' tables on stdout and between the marks of ``document``."""
    text = "\n\n".join(tables.markdown(json.loads(path.read_text()), path.stem) for path in results)
    print(text)
    document.write_text(tables.insert(document.read_text(), text))


def parsed() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2"))
    parser.add_argument("--gguf", type=Path, help="the same weights as GGUF (default: the package SmolLM2 comes from)")
    parser.add_argument(
        "--environments", type=Path, default=cache / "mlflow-llm" / "compare", help="where to keep them"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=128, help="new tokens in the closed loops")
    parser.add_argument("--rounds", type=int, default=3, help="of closed loops and long prompts")
    parser.add_argument("--traffic-rounds", type=int, default=1, help="of requests that come by themselves")
    parser.add_argument("--rate", type=float, default=2.0, help="such requests a second")
    parser.add_argument(
        "--load", type=float, help="chats at this share of what each contender can do of them (0.8), which is measured"
    )
    parser.add_argument("--minutes", type=float, help="begin no further round that would not end in time")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one workload may take")
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds that loading may take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-amx", action="store_true", help="as on a processor without it: refused to all")
    parser.add_argument("--name", default="compare", help="of the result")
    parser.add_argument("--quick", action="store_true", help="does it work: tiny loads, whose figures mean nothing")
    parser.add_argument("--prepare", action="store_true", help="make environments and models, and measure nothing")
    parser.add_argument("--list", action="store_true", help="the contenders' names")
    parser.add_argument(
        "--table", nargs="*", type=Path, metavar="RESULT", help=f"Markdown of results into {DOCUMENT.name}"
    )
    return parser.parse_args()


def prepare(args: argparse.Namespace, environments: Environments, models: Models) -> None:
    for name in args.contenders:
        contender = CONTENDERS[name]
        try:
            if contender.environment:
                environments.python(contender.environment)
            made(contender, environments, models)
            print(f"{name}: ready")
        except Failed as error:
            print(f"{name}: {error}")


def main() -> None:
    args = parsed()
    if args.list:
        print("\n".join(CONTENDERS))
        return
    if args.table is not None:
        results = args.table or sorted(RESULTS.glob("compare*.json"))
        if not results:
            sys.exit(f"there are no results in {RESULTS}: run the comparison first")
        show(results, DOCUMENT)
        return
    environments = Environments(args.environments.resolve())
    args.model = args.model.resolve()
    models = Models(environments, args.model, args.gguf)
    if args.prepare:
        prepare(args, environments, models)
        return
    if args.without_amx:
        refuse_amx()
    from transformers import AutoTokenizer

    began, load = time.monotonic(), os.getloadavg()[0]
    steady = workloads.steady(args.quick, args.callers, args.new)
    traffic = workloads.traffic(args.quick, args.rate)
    comparison = Comparison(args, environments, models, AutoTokenizer.from_pretrained(args.model))
    done, longest = 0, 0.0
    with comparison.running():
        while done < max(args.rounds, args.traffic_rounds):
            left = args.minutes * 60 - (time.monotonic() - began) if args.minutes else longest
            if done and left < longest:
                break
            at = time.monotonic()
            if done < args.rounds:
                comparison.round(done, steady)
            longest = time.monotonic() - at  # later rounds may have no traffic
            if done < args.traffic_rounds:
                comparison.round(done, traffic)
            done += 1
        if args.load:
            comparison.under_load(done, args.load)
    writer = workloads.Writer(comparison._tokenizer, "names")
    names = [
        {"name": make(writer).name, "kind": kind}
        for kind, made in (("steady", steady), ("traffic", traffic))
        for make in made
    ]
    if args.load:
        names += [{"name": name, "kind": "loaded"} for name in ("chats at once", loaded_name(args.load))]
    rows = comparison.rows()
    notes = {
        "load": "tiny loads, whose figures mean nothing"
        if args.quick
        else f"about 100 tokens in, {args.new} out, greedy",
        "rounds": min(done, args.rounds),
        "without_amx": args.without_amx,
        "load_average": (load, os.getloadavg()[0]),
        "workloads": names,
        "seconds": round(time.monotonic() - began),
    }
    shown = tables.markdown({"machine": machine(), **notes, "rows": rows})
    if args.quick:
        print(shown)
    else:
        publish(args.name, rows, show=shown, **notes)


if __name__ == "__main__":
    main()
