"""The page by the keyboard alone: controls are reached by Tab, and used by Enter, Space, arrows and typing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

MAX_TABS = 250
IS_FOCUSED = "one => one === document.activeElement"


def tab_to(page: Page, wanted: Locator, *, back: bool = False) -> None:
    """Press Tab until ``wanted`` has the focus."""
    expect(wanted).to_be_visible()
    for _ in range(MAX_TABS):
        if wanted.evaluate(IS_FOCUSED):
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"{wanted} is not reached by {MAX_TABS} tabs")


def press(page: Page, role: Any, name: str | re.Pattern[str], key: str = "Enter", *, back: bool = False) -> None:
    """Go to a control by its role and name, and press a key."""
    tab_to(page, page.get_by_role(role, name=name, exact=True).first, back=back)
    page.keyboard.press(key)


def write(page: Page, label: str, text: str, *, back: bool = False) -> None:
    """Go to a field by its label, and replace what it has."""
    tab_to(page, page.get_by_label(label, exact=True).first, back=back)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def opens(page: Page, summary: str) -> None:
    """Open a section by its summary."""
    tab_to(page, page.locator("summary").filter(has_text=summary).first)
    page.keyboard.press("Enter")
