"""Asserts rewritten before pytest starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rewrite_asserts import rewrite


def test_pytest_uses_the_rewritten_files(tmp_path: Path) -> None:
    """pytest does not rewrite the asserts again, and explains a failing one as usual."""
    file = tmp_path / "test_it.py"
    file.write_text("def test_it():\n    one, two = 1, 2\n    assert one == two\n")
    rewrite(file)
    (compiled,) = tmp_path.glob("**/*.pyc")
    written = compiled.stat()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", "/dev/null"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "assert 1 == 2" in done.stdout
    assert (compiled.stat().st_ino, compiled.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
