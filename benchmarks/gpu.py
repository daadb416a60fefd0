"""Everything that is measured on a GPU: texts, prompts, decoding, features, HTTP, kernels and peers, in one table.

    bash benchmarks/gpu.sh                                       # all parts but the profile, with what is installed
    bash benchmarks/gpu.sh --wheels DIR --weights DIR prefill decode features --profile --size 8b

A Llama of random weights is made, or found in ``--weights``. Prompts of random tokens are computed, then every sequence
generates, greedy and without an end. The floor is the time in which the device reads all weights once a step and each
sequence's keys and values, at the speed at which it copies a large tensor. Each contender runs in a process of its own;
ours also with no step launched before the last one's tokens are read, and with weights in fp8. What time cuts is named.
Results are a table, and JSON beside it. Each is shown and written as soon as it comes, and SIGTERM and SIGINT end the
run with the table of what there is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from gpu_parts import inputs, suite
from gpu_parts.plan import FOLDERS, PARTS, Contender, Plan, Record
from gpu_parts.processes import Beside, Runner, Stop, in_a_process, serve_records
from gpu_parts.results import Results
from report import shown, versions

CONTENDERS = {  # imported where they run: most of them import torch
    "inputs": "inputs:make",
    "tests": "suite:run",
    "families": "families:run",
    "ours": "ours:run",
    "not ahead": "ours:run",
    "fp8": "ours:run",
    "http": "served:run",
    "static": "peers:static",
    "generate_batch": "peers:batched",
    "vllm": "peers:vllm",
    "compiled": "peers:compiled",
}
SIDE_BY_SIDE = 3  # processes of the families
TINY: dict[str, Any] = {"sequences": (1, 3), "prefills": ((1, 24), (2, 60)), "batch": 8, "prompt": 16, "new": 12,
                        "rounds": 1}  # fmt: skip


class Run:
    """A run within its time: each part gets what is left, up to its own limit, and nothing after ``stop``."""

    def __init__(self, plan: Plan, run: Runner, results: Results, stop: Stop, seconds: float) -> None:
        self._plan, self._run, self._results, self._stop = plan, run, results, stop
        self._ends = time.monotonic() + seconds

    @property
    def _left(self) -> float:
        return self._ends - time.monotonic()

    def take(self, name: str, plan: Plan | None = None, seconds: float = 600.0) -> list[Record]:
        cut = f"ended by {self._stop.signal}" if self._stop.signal else "no time was left" if self._left < 1 else ""
        records = [{"part": name, "cut": cut}] if cut else self._run(name, plan or self._plan, min(seconds, self._left))
        found = []
        for record in records:
            self._results.add(record)
            found.append(record)
        self._results.say()
        return found

    def checks(self, seconds: float) -> None:
        """Run the tests and the families side by side, and make the weights: meanwhile if there are CPUs for all."""
        plan, beside = self._plan, Beside(self.take)
        checked = {*plan.parts} & {"tests", "families"}
        wants_inputs = {*plan.parts} != checked
        is_alone = (os.cpu_count() or 1) < 2 * (suite.PROCESSES + SIDE_BY_SIDE) or not checked
        if wants_inputs and is_alone:
            self.take("inputs")
        seconds = min(seconds, self._left)
        if "tests" in plan.parts:
            beside.start("tests", plan.but(limit=max(seconds - 20, 1)), seconds)
        if "families" in plan.parts:
            for share in range(SIDE_BY_SIDE):
                beside.start("families", plan.but(share=(share, SIDE_BY_SIDE)), seconds)
        if wants_inputs and not is_alone:
            self.take("inputs")
        beside.join()

    def measure(self) -> None:
        """Run each contender alone."""
        plan, parts = self._plan, {*self._plan.parts}
        if parts & {"prefill", "decode", "features", "profile"}:
            found = self.take("ours", seconds=150)
            if "decode" in parts and any(record.get("ahead") for record in found):
                self.take("not ahead", plan.but(by="not ahead", async_scheduling="none", parts=("decode",)), 60)
        if named := tuple(part for part in ("prefill", "decode") if part in parts):
            self.take("fp8", plan.but(by="fp8", quantization="fp8", parts=named), 90)
        if "http" in parts:
            self.take("http", seconds=100)
        if "peers" in parts:
            self.take("static", seconds=60)
            self.take("generate_batch", seconds=60)
            if installed("vllm") and not plan.on_cpu:
                self.take("vllm", seconds=150)
            if not plan.on_cpu:
                self.take("compiled", seconds=150)


def contender(name: str) -> Contender:
    module, _, function = CONTENDERS[name].partition(":")
    found: Contender = getattr(import_module(f"gpu_parts.{module}"), function)
    return found


def installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def machine(device: str = "") -> dict[str, Any]:
    """Return the versions of what runs, and the name of ``device`` if it is given, which takes some of its memory."""
    found: dict[str, Any] = {"processors": os.cpu_count()}
    if device:
        import torch

        found["device"] = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    return found | versions("torch", "triton", "transformers", "huggingface_hub", "peft", "llguidance", "vllm")


def read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all but profile if none")
    parser.add_argument("--size", choices=inputs.SIZES, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="tables of the time of each kernel: the part profile")
    parser.add_argument("--weights", type=Path, help="a folder in which weights are found, or made and kept")
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of random weights")
    parser.add_argument("--sequences", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, help="tokens of the prompts of decoding")
    parser.add_argument("--new", type=int, help="tokens of each text")
    parser.add_argument("--cuda-graphs", choices=("auto", "none"), default="auto")
    parser.add_argument("--async-scheduling", choices=("auto", "none"), default="auto")
    parser.add_argument("--families", nargs="+", default=(), help="some of them, by name")
    parser.add_argument("--tests", nargs="+", default=FOLDERS, help="files or folders of tests")
    parser.add_argument("--seconds", type=float, default=345, help="for all parts")
    parser.add_argument("--checks", type=float, default=160, help="seconds of the tests and the families together")
    parser.add_argument("--json", type=Path, help="default: gpu-SIZE.json in $OUT, or in benchmarks/results")
    parser.add_argument("--run", choices=("weights", *CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := {*args.parts} - {*PARTS}:
        parser.error(f"part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    args.parts = tuple(args.parts) or tuple(part for part in PARTS if part != "profile")
    if args.profile:
        args.parts = tuple(part for part in PARTS if part in {*args.parts, "profile"})
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    args.json = args.json or out / f"gpu-{args.size}.json"
    return args


def plan_of(args: argparse.Namespace, folder: str) -> Plan:
    given = {"sequences": args.sequences and tuple(args.sequences), "prompt": args.prompt, "new": args.new}
    sized = (TINY if args.size == "tiny" else {}) | {name: value for name, value in given.items() if value}
    return Plan(
        size=args.size, device=args.device, folder=folder, model=str(args.model or ""), parts=args.parts,
        cuda_graphs=args.cuda_graphs, async_scheduling=args.async_scheduling, families=tuple(args.families),
        tests=tuple(args.tests), **sized,
    )  # fmt: skip


def main(arguments: list[str] | None = None, run: Runner | None = None) -> int:
    args = read(arguments)
    if args.run == "weights":
        inputs.make_weights(args.size, args.device, args.model)
        return 0
    if args.run:
        serve_records(contender(args.run), msgspec.json.decode(args.plan, type=Plan))
        return 0
    began = time.monotonic()
    command = "bash benchmarks/gpu.sh " + shlex.join(shown(arguments if arguments is not None else sys.argv[1:]))
    with Stop() as stop, tempfile.TemporaryDirectory(prefix="mlflow-llm-gpu-") as own:
        plan = plan_of(args, str(args.weights.absolute() if args.weights else own))
        results = Results(plan, args.json, {"command": command.strip(), "machine": machine()})
        done = Run(plan, run or partial(in_a_process, stop=stop), results, stop, args.seconds)
        done.checks(args.checks)
        done.measure()
        seconds = time.monotonic() - began
        print(f"\n{results.text()}\n{seconds:.0f} s; {args.json.name}", flush=True)
        results.write(seconds=round(seconds))
        if not stop.signal:
            results.write(machine=machine(args.device))
    return stop.status or int(any(failed(record) for record in results.records))


def failed(record: Record) -> bool:
    """Return whether something went wrong, other than that time was short."""
    wrong = record["part"] == "families" and record.get("equal") is False
    return (
        "error" in record
        or wrong
        or bool(record.get("failed"))
        or (record["part"] == "tests" and "cut" not in record and record.get("status", 0) != 0)
    )


if __name__ == "__main__":
    sys.exit(main())
