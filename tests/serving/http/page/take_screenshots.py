"""Take the screenshots of docs/page.md, in Chromium, from a server whose model has the adapter ``pirate``, beside a
model of embeddings.

Prices, a prompt of MLflow's registry and a shadow are shown if the server has them. With a third argument, ``all``,
each view is also taken in light and dark at 320, 768 and 1440 pixels. ``test_page_screenshots.py`` takes them all from
a server of the tests, so that this script and docs/page.md stay together.

MLFLOW_TRACKING_URI=sqlite:///mlflow.db mlflow-llm serve -m MODEL=assistant -m EMBEDDER=embedder --database sqlite:///page.db
python tests/serving/http/page/take_screenshots.py http://127.0.0.1:8000 docs/page
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import sys
from pathlib import Path

from PIL import Image
from playground import settled
from playwright.sync_api import Page, expect, sync_playwright

SIZE = {"width": 1200, "height": 900}
COLOURS = 128
WIDTHS = (320, 768, 1440)


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
        sampling = page.get_by_role("group", name=f"Column {column + 1}").get_by_text("Sampling")
        sampling.click()
        page.get_by_label("Temperature").nth(column).fill("0")
        page.get_by_label("Max tokens").nth(column).fill("60")
        sampling.click()
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
    box.fill("Name a good book.")
    box.press("Enter")
    settled(page, 2)
    page.get_by_role("listbox").first.press("End")
    page.get_by_role("listitem").filter(has_text="Name a good book.").last.scroll_into_view_if_needed()
    take(page, out / "tokens.png")
    page.emulate_media(color_scheme="light")


def prompts(page: Page, out: Path) -> None:
    """Take a prompt with two variables, before it is saved."""
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("button", name="New conversation").click()
    if page.get_by_role("button", name="Remove column 2").count():
        page.get_by_role("button", name="Remove column 2").click()
    page.get_by_text("Prompts of MLflow").click()
    expect(page.get_by_role("form", name="Load a prompt")).to_be_visible()
    page.get_by_label("Template, with").fill("Explain {{topic}} to {{listener}} in one sentence.")
    page.get_by_label("topic", exact=True).fill("photosynthesis")
    page.get_by_label("listener", exact=True).fill("a child")
    page.get_by_label("Save as").fill("explain")
    page.get_by_text("Prompts of MLflow").scroll_into_view_if_needed()
    page.evaluate("scrollBy(0, 200)")
    take(page, out / "prompts.png")


def embeddings(page: Page, out: Path) -> None:
    page.get_by_role("link", name="Embeddings").click()
    texts = ("The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose.", "Banks lend money.")
    page.get_by_label("Texts, one a line").fill("\n".join(texts))
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("table", name="Similarity")).to_be_visible()
    take(page, out / "embeddings.png")


def table(page: Page, out: Path) -> None:
    page.get_by_role("link", name="Table").click()
    rows = b"country\nFrance\nNorway\nJapan\nPeru"
    page.get_by_label("Choose or drop a CSV file").set_input_files(
        [{"name": "countries.csv", "mimeType": "text/csv", "buffer": rows}]
    )
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Prompt of a row").fill("What is the capital of {country}?")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("4 of 4 rows answered")).to_be_visible()
    take(page, out / "table.png")


def batches(page: Page, out: Path) -> None:
    """Take a batch that is done, with its files."""
    page.get_by_role("link", name="Batches").click()
    form = page.get_by_role("form", name="Start a batch")
    head = {"method": "POST", "url": "/v1/chat/completions"}
    countries = ("France", "Norway", "Japan", "Peru")
    asked = ([{"role": "user", "content": f"What is the capital of {country}?"}] for country in countries)
    bodies = ({"model": "assistant", "messages": messages, "max_tokens": 12} for messages in asked)
    lines = [head | {"custom_id": f"row-{number}", "body": body} for number, body in enumerate(bodies, 1)]
    content = "\n".join(map(json.dumps, lines)).encode()
    form.get_by_label("JSONL file").set_input_files(
        [{"name": "countries.jsonl", "mimeType": "application/jsonl", "buffer": content}]
    )
    form.get_by_label("Metadata").fill("team=research")
    form.get_by_role("button", name="Start the batch").click()
    expect(page.get_by_role("row").filter(has_text="4 done")).to_contain_text("completed")
    expect(page.get_by_role("row").filter(has_text="_output.jsonl")).to_be_visible()
    take(page, out / "batches.png")


def reference(page: Page, out: Path) -> None:
    page.get_by_role("link", name="API reference").click()
    page.get_by_label("Find a route").fill("get /v1/models openai")
    page.locator(".route summary").first.click()
    page.get_by_role("button", name="Send").first.click()
    expect(page.get_by_role("region", name="Answer", exact=True)).to_be_visible()
    take(page, out / "reference.png")


def usage(page: Page, out: Path) -> None:
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("img", name="Tokens by day")).to_be_visible()
    take(page, out / "usage.png")


def limits(page: Page, out: Path) -> None:
    """Set a soft limit and one that refuses, and take them with the form."""
    page.get_by_role("link", name="Operations").click()
    page.get_by_role("heading", name="Limits").click()
    form = page.get_by_role("form", name="Set a limit")
    values = (
        ("budget_month", "25.00", "only counted (soft)", "0.5, 0.8"),
        ("otpm", "20000", "refused", "0.9"),
    )
    for kind, value, beyond, shares in values:
        form.get_by_label("Scope").select_option("tenant")
        form.get_by_label("Of (").fill("research")
        form.get_by_label("Kind").select_option(kind)
        form.get_by_label("Value").fill(value)
        form.get_by_label("Requests beyond it").select_option(beyond)
        form.get_by_label("Tell webhooks").fill(shares)
        form.get_by_role("button").click()
        expect(page.get_by_role("button", name=f"Change the limit {kind} of research")).to_be_visible()
    page.get_by_role("button", name="Change the limit budget_month of research").click()
    page.get_by_role("heading", name="Limits").scroll_into_view_if_needed()
    page.evaluate("scrollBy(0, 300)")
    take(page, out / "limits.png")


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


VIEWS = (playground, prompts, embeddings, table, batches, usage, operations, limits, reference)


def take_all(page: Page, out: Path, *, every: bool = False) -> None:
    """Take each view of a page of the size ``SIZE``; with ``every``, also at all widths in light and dark."""
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    for view in VIEWS:
        view(page, out)
        for scheme, width in itertools.product(("light", "dark"), WIDTHS if every else ()):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": SIZE["height"]})
            page.screenshot(path=out / f"{view.__name__}-{scheme}-{width}.png", full_page=True)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(SIZE)


def main(url: str, out: Path, *, every: bool) -> None:
    expect.set_options(timeout=600_000)
    out.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.set_default_timeout(600_000)
        page.goto(url)
        take_all(page, out, every=every)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") + "/", Path(sys.argv[2]), every="all" in sys.argv[3:])
