"""The headers of the native kernels."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parents[4] / "serving/engine/native"


def included_by(name: str) -> set[str]:
    """Return the headers of ours that a header includes directly."""
    return set(re.findall(r'^#include "([^"]+)"', (SOURCES / name).read_text(encoding="utf-8"), flags=re.M))


def test_no_header_includes_one_that_includes_it() -> None:
    """The headers can be put in an order in which each includes only earlier ones."""
    left = {
        str(path.relative_to(SOURCES)): included_by(str(path.relative_to(SOURCES))) for path in SOURCES.rglob("*.h")
    }
    assert len(left) > 30
    while free := [name for name, names in left.items() if not names & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def test_each_include_names_a_header() -> None:
    """Each include of a header of ours names it by its path from the folder of the kernels."""
    missing = {
        (path.name, name)
        for path in [*SOURCES.rglob("*.h"), *SOURCES.glob("*.cpp")]
        for name in included_by(str(path.relative_to(SOURCES)))
        if not (SOURCES / name).is_file()
    }
    assert not missing
