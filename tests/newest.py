"""The parts of tests/newest.sh that are Python: import every module of the wheel, and write the outcome into a page.

python tests/newest.py import FILE                         # modules that cannot be imported, a line each
python tests/newest.py report PAGE FILE JUNIT_XML [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import datetime
import importlib.metadata
import pkgutil
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "mlflow-llm"
BESIDE = ("huggingface_hub", "tokenizers", "sentence-transformers", "gguf", "openai", "anthropic")
# No modules to import: programs, ctypes' libraries, what Alembic runs, and what vLLM loads in its own environment.
NOT_IMPORTED = re.compile(r"\.__main__$|\.native\._native|\.migrations\.|\.vllm\.race$")
BEGIN, END = "<!-- newest.sh writes from here -->", "<!-- to here -->"


def import_all(out: Path) -> int:
    """Import all modules in one process, and write their number and those that failed into ``out``."""
    root = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(PACKAGE.replace("-", "_"))))
    found = pkgutil.walk_packages([str(root)], "mlflow_llm.", onerror=lambda name: None)
    names = [module.name for module in found if not NOT_IMPORTED.search(module.name)]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except BaseException as failure:\n"
        "        print(name, f'{type(failure).__name__}: {failure}'.splitlines()[0], sep='\\t')\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *names], capture_output=True, text=True, check=False
    )
    lines = [line for line in run.stdout.splitlines() if line.partition("\t")[0] in names]
    if run.returncode:
        lines.append(f"{PACKAGE}\tthe process ended with {run.returncode}")
    out.write_text("".join(f"{line}\n" for line in [str(len(names)), *lines]))
    print(f"{len(names)} modules, {len(lines)} failures", *lines, sep="\n")
    return bool(lines)


def versions() -> list[tuple[str, str, str]]:
    """Return name, bounds and installed version of what the package requires, and of what is used beside it."""
    required = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or []]
    bounds = {each.name: str(each.specifier) for each in required if each.marker is None}
    rows = []
    for name in sorted({*bounds, *BESIDE}, key=str.lower):
        try:
            rows.append((name, bounds.get(name, "") or "none of ours", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, bounds.get(name, "") or "none of ours", "not installed"))
    return rows


def outcomes(report: Path) -> tuple[Counter[str], list[str]]:
    """Return how many tests of a JUnit file passed, failed or were skipped, and which failed, with the reason."""
    counts: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        trouble = kinds.get("failure", kinds.get("error"))
        counts["failed" if trouble is not None else "skipped" if "skipped" in kinds else "passed"] += 1
        if trouble is not None:
            said = (trouble.get("message") or "").strip().splitlines() or [""]
            name = f"{case.get('classname')}::{case.get('name')}"
            failed.append(f"`{name}`: `{plain(said[0])}`")
    return counts, failed


def plain(message: str) -> str:
    """Return a message as the page shows it: cut, and without the folders of the machine that it was written on."""
    return re.sub(r"(?:/[\w.+-]+){2,}/", "…/", message.replace("`", "'"))[:200]


def outcome(imports: list[str], counts: Counter[str], failed: list[str], arguments: list[str], date: str) -> str:
    """Return the Markdown of a run; ``imports``: how many modules there are, then those that failed."""
    number, *not_imported = imports
    lines = [
        f"Run on {date}, Python {platform.python_version()}, {platform.system()} {platform.machine()}:",
        "",
        f"- imports: {int(number) - len(not_imported)} of {number} modules",
        f"- tests: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped",
        f"- what was run: `{' '.join(arguments)}`",
        "",
    ]
    broken = [f"`{name}`: `{plain(said)}`" for name, _, said in (line.partition("\t") for line in not_imported)]
    broken += failed
    if broken:
        lines += ["Failed:", "", *(f"- {each}" for each in broken), ""]
    lines += ["| package | bounds | version |", "|---|---|---|"]
    lines += [f"| {name} | {f'`{allowed}`' if allowed[0] in '<>=!~' else allowed} | {version} |"
              for name, allowed, version in versions()]  # fmt: skip
    return "\n".join(lines)


def replace_outcome(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between the two marks; raise ``ValueError`` if it has not both, once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have each of {BEGIN!r} and {END!r} once")
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.S)


def main(command: str, first: str, *rest: str) -> int:
    if command == "import":
        return import_all(Path(first))
    imports, junit, *arguments = rest
    page = Path(first)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = outcome(Path(imports).read_text().splitlines(), *outcomes(Path(junit)), arguments, date)
    page.write_text(replace_outcome(page.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
