"""The screenshots of docs/page.md: each view is taken anew, and each one that is taken is shown there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from take_screenshots import SIZE, take_all

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).parents[4] / "docs"


def test_each_view_has_a_screenshot(new_page: Callable[..., Page], tmp_path: Path) -> None:
    """The steps to each screenshot of docs/page.md still work, and the page shows exactly those that they take, in the
    size in which they are taken."""
    page = new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
    take_all(page, tmp_path)
    taken = {path.name for path in tmp_path.glob("*.png")}
    shown = re.findall(r"!\[[^\]]+\]\(page/([^)]+)\)", (DOCS / "page.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(taken) == sorted(path.name for path in (DOCS / "page").glob("*.png"))
    for name in taken:
        for place in (tmp_path, DOCS / "page"):
            with Image.open(place / name) as image:
                assert image.size == (SIZE["width"], SIZE["height"]), place / name
