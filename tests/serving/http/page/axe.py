"""Checks of a page by axe-core, and of its width."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUN = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"
WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("main *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth && !one.closest(".scroll, pre"))
  .map((one) => one.outerHTML.slice(0, 100))"""


def hold_wcag(page: Page) -> None:
    """Assert that a page keeps WCAG 2.2 AA as far as axe-core can tell, and that it does not scroll sideways."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (pip)")
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text())
    found = page.evaluate(RUN)
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == []
    assert page.evaluate(WIDE) == []
