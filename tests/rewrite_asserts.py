"""``python tests/rewrite_asserts.py FOLDER`` writes what pytest makes of the asserts of tests below ``FOLDER`` beside
them, as it does itself.

Processes of tests that start together each rewrite all files, ten seconds of CPU time, before they find what another
one has written. Private names of pytest's are used here alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir


def rewrite(file: Path) -> None:
    stat, code = _rewrite_test(file, None)  # type: ignore[arg-type]  # no config: the defaults
    compiled = get_cache_dir(file) / (file.stem + PYC_TAIL)
    compiled.parent.mkdir(parents=True, exist_ok=True)
    _write_pyc(None, code, stat, compiled)  # type: ignore[arg-type]  # no state: it would be told of errors
    assert _read_pyc(file, compiled) is not None, compiled


if __name__ == "__main__":
    for file in Path(sys.argv[1]).resolve().rglob("*.py"):
        if file.name == "conftest.py" or file.name.startswith("test_"):
            rewrite(file)
