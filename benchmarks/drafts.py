"""Gain and cost of speculation: tokens/s with drafts beside those without, on predictable texts and on others. Both
engines are in one process and take turns step by step, so that fast and slow moments of the machine affect both.

    python benchmarks/drafts.py --model .cache/models/smollm2 [--quantization int8] [--tasks free --rounds 20]

``copy``: a text that stands in the prompt is written again. ``edit``: a file of code is written again with one word of
each function changed, after an example of the change; ``rename``: with a name changed, so that something changes every
few tokens. Both with the unchanged file as the caller's prediction too (OpenAI's ``prediction``). ``free``: texts drawn
at temperature 1, in which nothing comes again. Texts with drafts and without are the same, or the run fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import msgspec
from measured import announced, say_kernels
from report import publish
from transformers import AutoTokenizer

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.request import DraftTokens, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

NOTES = (
    "The harbour was built in 1731 by a guild of rope makers. Its first wall was made of oak, the second of grey "
    "stone. Every spring the masters met in the tower, counted the ships that had come home, and wrote the names of "
    "the others into a green book. In 1802 the tower burned down; the book was saved by a boy named Tomas, who "
    "carried it across the ice. It lies in the town hall today, under glass, opened at the page of that winter."
)
PARTS = {
    "count": "return len({n})",
    "first": "return {n}[0] if {n} else None",
    "last": "return {n}[-1] if {n} else None",
    "total": "return sum(item.price for item in {n})",
    "cheapest": "return min({n}, key=lambda item: item.price)",
    "dearest": "return max({n}, key=lambda item: item.price)",
    "names": "return [item.name for item in {n}]",
    "in_stock": "return [item for item in {n} if item.stock > 0]",
    "without": "return [item for item in {n} if item.name != name]",
    "by_name": "return {{item.name: item for item in {n}}}",
}


def code(name: str, version: int) -> str:
    parts = (f"# v{version}\ndef {part}({name}):\n    {body.format(n=name)}" for part, body in PARTS.items())
    return "\n\n".join(parts) + "\n"


def tasks(tokenizer: Any, number: int) -> dict[str, tuple[list[int], Sampling]]:
    """Return prompt and sampling of each task; ``number`` makes them different each time."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def greedy(text: str, draft: str | None = None) -> Sampling:
        drafted = None if draft is None else DraftTokens(token_ids=tuple(ids(draft)))
        return Sampling(max_tokens=len(ids(text)), temperature=0.0, draft=drafted)

    note = f"Note {number}. {NOTES}"
    old, edited, renamed = (f"# file {number}\n{code(*how)}" for how in (("items", 1), ("items", 2), ("goods", 1)))
    rest = old[old.index("def total(") :]

    def again(new: str, change: str) -> list[int]:
        shown = new[: new.index("def total(")]
        return ids(f"```python\n{old}```\n\nThe same file with {change}:\n\n```python\n{shown}")

    edit, rename = again(edited, "`v1` changed to `v2`"), again(renamed, "`items` renamed to `goods`")
    return {
        "copy": (ids(f"{note}\n\n{note[:60]}"), greedy(note[60:])),
        "edit": (edit, greedy(rest)),
        "edit, predicted": (edit, greedy(rest, rest)),
        "rename": (rename, greedy(rest)),
        "rename, predicted": (rename, greedy(rest, rest)),
        "free": (ids(f"Story {number}. On that day"), Sampling(max_tokens=128, temperature=1.0)),
    }


class Run:
    """The results of an engine: ``seconds`` and CPU time (``processor``) from its first token to its end, and
    ``texts``."""

    def __init__(self, core: EngineCore, given: list[tuple[list[int], Sampling]], name: str) -> None:
        self._core = core
        self.seconds = self.processor = 0.0
        self._tokens: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(len(given))}
        for i, (request_id, (prompt, sampling)) in enumerate(zip(self._tokens, given, strict=True)):
            core.add(
                ValidRequest(
                    request_id=request_id, task="completions", model="m", sampling=sampling, cache_salt="bench",
                    sequences=(Sequence(prompt_token_ids=tuple(prompt), seed=i),),
                )
            )  # fmt: skip

    @property
    def texts(self) -> list[list[int]]:
        return list(self._tokens.values())

    def step(self) -> bool:
        """Run a step and return whether there is more to do."""
        if not self._core.has_work():
            return False
        has_begun = any(self._tokens.values())
        clock, processor = time.perf_counter(), time.process_time()
        events = self._core.step()
        if has_begun:
            self.seconds += time.perf_counter() - clock
            self.processor += time.process_time() - processor
        for _, request_id, event in events:
            if isinstance(event, Tokens):
                self._tokens[request_id] += event.token_ids
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", choices=("none", "int8"), default="int8")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    names = ("copy", "edit", "edit, predicted", "rename", "rename, predicted", "free")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    say_kernels()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir="")
    settings = EngineSettings(quantization=args.quantization, max_model_len=2048, prefix_caching=False)
    plain = announced(EngineCore(bundle, msgspec.structs.replace(settings, speculation="none")))
    drafting = announced(EngineCore(bundle, settings))
    rows = []
    for callers in args.callers:
        ratios: dict[str, list[tuple[float, float]]] = {}
        took: dict[str, list[float]] = {}
        counts: dict[str, list[int]] = {}
        for turn in range(args.rounds + 1):
            made = [tasks(tokenizer, turn * callers + i) for i in range(callers)]
            for task in args.tasks:
                given = [one[task] for one in made]
                bare = [(prompt, msgspec.structs.replace(sampling, draft=None)) for prompt, sampling in given]
                before = drafting.health()
                name = f"{callers}-{turn}-{task}"
                without, drafted = Run(plain, bare, name), Run(drafting, given, name)
                runs = (without, drafted) if turn % 2 else (drafted, without)
                while [run for run in runs if run.step()]:  # a step of each
                    pass
                after = drafting.health()
                if drafted.texts != without.texts:
                    raise SystemExit(f"{task}: texts with drafts differ")
                if turn:  # the first round warms up
                    ratios.setdefault(task, []).append(
                        (without.seconds / drafted.seconds, without.processor / drafted.processor)
                    )
                    took.setdefault(task, []).append(sum(map(len, without.texts)) / without.seconds)
                    new = counts.setdefault(task, [0, 0])
                    new[0] += after.draft_tokens - before.draft_tokens
                    new[1] += after.accepted_tokens - before.accepted_tokens
        for task, values in ratios.items():
            by_clock, by_processor = (statistics.median(column) for column in zip(*values, strict=True))
            rows.append(
                {
                    "callers": callers, "task": task, "without, tokens/s": statistics.median(took[task]),
                    "with / without": by_clock, "by CPU time": by_processor,
                    "drafted": counts[task][0], "taken": counts[task][1],
                }
            )  # fmt: skip
    for core in (plain, drafting):
        core.close()
    publish(f"drafts-{args.quantization}", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
