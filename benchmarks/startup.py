"""The time of a model to its first token: in a process of its own, by phases, and as `mlflow-llm serve`.

    python benchmarks/startup.py MODEL_DIR [--rounds 5]

``MODEL_DIR`` is a Hugging Face directory. It is packaged with MLflow as it is and in int8 (``quantize="int8"``), and
started as float32, with ``quantization="int8"``, and from the int8 weights: ``first`` for the first time on a machine,
``again`` with what the first start has packed. What a start imports is found by one start before; measured ones import
that first, so that "beyond imports" is all that is left: weights, self-test, the prompt, the first token. Rounds take
turns with all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from load import free_port
from measured import say_kernels
from report import publish

CHILD = """
import importlib, json, sys, threading, time, warnings
warnings.simplefilter("ignore")
path, quantization, imports = sys.argv[1], sys.argv[2], json.load(sys.stdin)
marks = [(time.perf_counter(), time.process_time())]
for name in imports:
    try:
        importlib.import_module(name)
    except Exception:  # made at run time, or not to be imported alone
        pass
marks.append((time.perf_counter(), time.process_time()))
from pathlib import Path
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

bundle = read_bundle(Path(path))
core = EngineCore(bundle, EngineSettings(quantization=quantization, max_model_len=2048))
marks.append((time.perf_counter(), time.process_time()))
sampling = Sampling(max_tokens=4, temperature=0.0)
sequence = Sequence(prompt_token_ids=tuple(range(100, 200)), seed=1)
core.add(ValidRequest(request_id="r", task="completions", model="m", sampling=sampling, sequences=(sequence,)))
while not any(isinstance(event, Tokens) for _, _, event in core.step()):
    pass
marks.append((time.perf_counter(), time.process_time()))
loaded = [name for name in sys.modules if not name.startswith("__")]
while core.has_work():
    core.step()
core.close()
for thread in threading.enumerate():
    if thread.name == "mlflow-llm-packed":  # what the next start maps
        thread.join()
print(json.dumps([marks, loaded]))
"""
FORMS = {"float32": ("plain", "none"), "int8": ("plain", "int8"), "int8, logged as such": ("int8", "int8")}


def start(path: Path, quantization: str, cache: Path, imports: list[str]) -> tuple[list[Any], list[str]]:
    """Return wall and CPU times before and after imports, after the load and the first token; and the modules."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), quantization],
        input=json.dumps(imports),
        env={**os.environ, "MLFLOW_LLM_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    marks, loaded = json.loads(done.stdout.splitlines()[-1])
    return marks, loaded


def phases(marks: list[Any]) -> dict[str, float]:
    (_, imported, loaded, token) = marks
    began = marks[0]
    return {
        "imports, s": imported[0] - began[0],
        "load, s": loaded[0] - imported[0],
        "prompt of 100 tokens, s": token[0] - loaded[0],
        "beyond imports, s": token[0] - imported[0],
        "of CPU time, s": token[1] - imported[1],
    }


def serve(path: Path, quantization: str, cache: Path) -> dict[str, float]:
    """Return the times from the command to `/health` and to the first token of a chat."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "-m", f"{path}=m", "--port", str(port)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mll-") as place:
        process = subprocess.Popen(
            [*command, "-C", f"quantization={quantization}"],
            env={**os.environ, "MLFLOW_LLM_CACHE": str(cache), "XDG_RUNTIME_DIR": place},
            cwd=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not is_ready(port):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}")
                time.sleep(0.01)
            ready = time.perf_counter() - began
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
            return {"server ready, s": ready, "its first answer, s": time.perf_counter() - began}
        finally:
            process.terminate()
            process.wait(60)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def package(model: Path, place: Path) -> dict[str, Path]:
    from mlflow_llm.flavors import llm

    found = {"plain": place / "plain", "int8": place / "int8"}
    llm.save_model(found["plain"], model)
    llm.save_model(found["int8"], model, quantize="int8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-server", action="store_true")
    args = parser.parse_args()
    say_kernels()
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        place = Path(directory)
        models = package(args.model, place)
        imports = {form: start(models[kind], how, place / "c", [])[1] for form, (kind, how) in FORMS.items()}
        for turn in range(args.rounds):
            for form, (kind, how) in FORMS.items():
                cache = place / f"cache-{turn}-{kind}-{how}"
                for when in ("first", "again"):
                    marks, _ = start(models[kind], how, cache, imports[form])
                    row = phases(marks)
                    if when == "again" and not args.no_server:
                        row |= serve(models[kind], how, cache)
                    found.setdefault((form, when), []).append(row)
    rows = [
        {"weights": form, "start": when} | {name: statistics.median(one[name] for one in values) for name in values[0]}
        for (form, when), values in found.items()
    ]
    heads = list(dict.fromkeys(name for row in rows for name in row))
    publish("startup", [{head: row.get(head) for head in heads} for row in rows], rounds=args.rounds)


if __name__ == "__main__":
    main()
