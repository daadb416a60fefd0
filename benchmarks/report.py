"""Output of every benchmark: the machine, the command, a table, and the same as JSON beside it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")
PACKAGES = ("mlflow-llm", "torch", "transformers", "peft", "mlflow", "sentence-transformers", "openvino-genai")


def machine() -> dict[str, Any]:
    """Return the CPU and its features among ``FLAGS``, cores this process may use, memory in GiB, relevant versions."""
    import psutil

    cpu = platform.processor() or platform.machine()
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    for line in said.splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "flags": [flag for flag in FLAGS if flag in said.split()],
        "cores": len(psutil.Process().cpu_affinity()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "packages": versions(*PACKAGES),
    }


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows with the same keys as a Markdown table."""
    heads = list(rows[0])
    cells = [[_cell(row.get(head)) for head in heads] for row in rows]
    widths = [max(len(head), *(len(line[i]) for line in cells)) for i, head in enumerate(heads)]
    out = ["| " + " | ".join(h.ljust(w) for h, w in zip(heads, widths, strict=True)) + " |"]
    out.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    out += ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join(out)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def publish(name: str, rows: list[dict[str, Any]], *, show: str | None = None, **notes: Any) -> None:
    """Print the table, or ``show``, and write ``results/<name>.json``."""
    command = "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *map(shlex.quote, shown(sys.argv[1:]))])
    print(table(rows) if show is None else show, flush=True)
    RESULTS.mkdir(exist_ok=True)
    data = {"command": command, "machine": machine(), **notes, "rows": rows}
    write(RESULTS / f"{name}.json", data)


def shown(arguments: list[str]) -> list[str]:
    """Return arguments without the folders of this machine, which are private: each shows by its name alone."""
    pairs = (one.rpartition("=") if one.startswith("--") else ("", "", one) for one in arguments)
    return [f"{option}{sign}{Path(value).name if os.path.isabs(value) else value}" for option, sign, value in pairs]


def write(file: Path, data: dict[str, Any]) -> None:
    """Write results as JSON that a diff can be read of."""
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
