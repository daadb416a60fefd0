"""A browser for tests of what people see; without Playwright or Chromium they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = 240_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
