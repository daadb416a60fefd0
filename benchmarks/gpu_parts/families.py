"""The equality of all supported architectures with ``generate()`` in float32, with the tests' tiny models."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from .plan import Plan, Record, in_blocks

TESTS = Path(__file__).parents[2] / "tests"
LENGTHS = (1, 3, 40, 9, 23, 17)


def cases() -> dict[str, Callable[[], Any]]:
    """Return the configurations by name: the tests' families, and those with heads that kernels take."""
    wide: dict[str, Callable[[], Any]] = of_tests("architectures").NATIVE
    return of_tests("tiny_models").FAMILIES | {f"wide {name}": make for name, make in wide.items()}


def of_tests(name: str) -> Any:
    """Return a module of the tests, which are no package."""
    for folder in (TESTS, TESTS / "serving", TESTS / "serving" / "engine"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module(name)


def run(plan: Plan) -> Iterator[Record]:
    """Yield a record per architecture of the plan's share."""
    found = cases()
    names = list(plan.families or found)
    first, step = plan.share
    for name in names[first::step]:
        try:
            yield {"part": "families", "family": name, **compare(found[name](), plan.device)}
        except Exception as error:
            told = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            yield {"part": "families", "family": name, "equal": False, "error": told}


def compare(config: Any, device: str) -> Record:
    """Return whether an engine's texts equal those of ``generate()`` on the CPU, and what runs by torch."""
    from mlflow_llm.serving.engine.core import EngineCore
    from mlflow_llm.serving.interface.settings import EngineSettings

    tiny, runs = of_tests("tiny_models"), of_tests("engine_runs")
    model = tiny.make_model(config)
    asked = [tiny.prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    settings = EngineSettings(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory=1 << 24,
        device=device,
        dtype="float32",
        **in_blocks(device),
    )
    with tempfile.TemporaryDirectory() as folder:
        bundle = tiny.save_bundle(model, Path(folder))
        with closing(EngineCore(bundle, settings)) as core:
            done = runs.run(core, *(tiny.request_of(str(number), prompt) for number, prompt in enumerate(asked)))
            paged = core.info.paged
    texts = [done[str(number)].tokens[0] for number in range(len(asked))]
    differs = [number for number, prompt in enumerate(asked) if texts[number] != tiny.greedy(model, prompt, 12)]
    reasons: tuple[str, ...] = ()
    if paged is not None:
        reasons = (paged.attention_reason, paged.prefill_reason, paged.cuda_graphs_reason)
    return {
        "equal": not differs,
        "differs": differs,
        "reasons": [reason[:200] for reason in dict.fromkeys(reasons) if reason],
    }
