"""Take the screenshots of docs/page.md, in Chromium, from a server whose model has the adapter ``pirate``.

mlflow-llm serve -m MODEL=assistant --database sqlite:///page.db
python tests/serving/http/page/take_screenshots.py http://127.0.0.1:8000 docs/page
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playground import settled
from playwright.sync_api import Page, expect, sync_playwright

SIZE = {"width": 1200, "height": 820}
COLOURS = 128


def take(page: Page, path: Path) -> None:
    """Write what the window shows as a small PNG with a palette."""
    page.evaluate("document.activeElement.blur()")
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    image.quantize(COLOURS).save(path, optimize=True)


def playground(page: Page, out: Path) -> None:
    """Take two columns on one prompt, then the probabilities of tokens."""
    page.get_by_role("button", name="Add a column").click()
    page.get_by_label("Model", exact=True).nth(1).select_option("assistant:pirate")
    for column in range(2):
        page.get_by_text("Sampling").nth(column).click()
        page.get_by_label("Temperature").nth(column).fill("0")
        page.get_by_text("Sampling").nth(column).click()
    box = page.get_by_label("Message", exact=True)
    box.fill("What is the capital of France?")
    box.press("Enter")
    settled(page, 2)
    take(page, out / "playground.png")
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_text("System prompt and token view").click()
    page.get_by_label("Show the probabilities").check()
    page.get_by_text("System prompt and token view").click()
    page.get_by_text("Sampling").first.click()
    page.get_by_label("Max tokens").first.fill("60")
    page.get_by_text("Sampling").first.click()
    box.fill("Name a good book.")
    box.press("Enter")
    settled(page, 2)
    page.get_by_role("listbox").first.press("End")
    page.get_by_role("listitem").filter(has_text="Name a good book.").last.scroll_into_view_if_needed()
    take(page, out / "tokens.png")
    page.emulate_media(color_scheme="light")


def usage(page: Page, out: Path) -> None:
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("img", name="Tokens by day")).to_be_visible()
    take(page, out / "usage.png")


def operations(page: Page, out: Path) -> None:
    """Take the view with one key."""
    page.get_by_role("link", name="Operations").click()
    if not page.get_by_text("data science").count():
        page.get_by_label("Tenant", exact=True).fill("research")
        page.get_by_label("Name").fill("data science")
        page.get_by_role("button", name="Create key").click()
        page.get_by_role("button", name="I have kept it").click()
    page.evaluate("scrollTo(0, 0)")
    take(page, out / "operations.png")


def main(url: str, out: Path) -> None:
    expect.set_options(timeout=120_000)
    out.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.goto(url)
        expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
        for view in (playground, usage, operations):
            view(page, out)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") + "/", Path(sys.argv[2]))
