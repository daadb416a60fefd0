"""Steps in the page's playground that its tests and its screenshots share."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

from browsers import PATIENCE_MS
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page
    from serving_process import Running

expect.set_options(timeout=PATIENCE_MS)


def ask(page: Page, text: str, label: str = "Message") -> None:
    """Send ``text`` in the playground with the keyboard."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    box = page.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article")


def settled(page: Page, count: int) -> None:
    """Wait until the playground shows ``count`` answers and all are over."""
    expect(answers(page)).to_have_count(count)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def read(served: Running, path: str) -> Any:
    """Return what the server answers to a GET."""
    return call(served, "GET", path)


def call(served: Running, method: str, path: str, body: Any = None) -> Any:
    """Return what the server answers to a request with a JSON body."""
    request = urllib.request.Request(f"{served.url}{path}", method=method)
    request.data = None if body is None else json.dumps(body).encode()
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)
