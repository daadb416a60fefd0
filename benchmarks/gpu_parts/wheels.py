"""Installation of what a folder of wheels has and this Python lacks, beside it and without an index.

    python benchmarks/gpu_parts/wheels.py DIR TARGET

A wheel is left out if its version is installed. Of several versions in the folder, pip takes the newest that fits.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def lacking(folder: Path) -> list[str]:
    """Return the names of distributions of which no version in ``folder`` is installed."""
    there: dict[str, set[str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, release = wheel.name.split("-")[:2]
        there.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(release)
    return [name for name, releases in there.items() if _installed(name) not in releases]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    folder, target = map(Path, sys.argv[1:])
    if not folder.is_dir():
        print(f"--wheels {folder}: no folder of that name")
        return 2
    names = lacking(folder)
    print(f"of {folder}: {', '.join(names) or 'nothing is missing'}", flush=True)
    if not names:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--find-links", str(folder), "--target", str(target)]
    return subprocess.run([*command, *names], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
