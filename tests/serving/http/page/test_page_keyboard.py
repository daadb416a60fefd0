"""Every view of the page by the keyboard alone: controls are reached by Tab, and used by Enter, Space and arrows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from gated_core import steps_more
from serving_process import Running
from shown_endpoint import two_models

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from by_keyboard import opens, press, tab_to, write
from playground import answers, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

NewPage = Callable[..., "Page"]


def test_the_playground_by_keyboard(new_page: NewPage, served: Running) -> None:
    """Columns, sampling, sending, regenerating, code, editing, branching, tokens and stopping need no mouse."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    press(page, "button", "Add a column")
    tab_to(page, page.get_by_label("Model", exact=True).nth(1), back=True)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    opens(page, "Sampling")
    write(page, "Max tokens", "5")
    opens(page, "System prompt and token view")
    tab_to(page, page.get_by_label("Show the probabilities"))
    page.keyboard.press("Space")
    write(page, "Message", "By keyboard")
    page.keyboard.press("Enter")
    settled(page, 2)
    tab_to(page, page.get_by_role("listbox", name="Tokens of the answer").first, back=True)
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("listbox").first.locator("[aria-selected=true]")).to_have_attribute("id", re.compile("-1$"))
    press(page, "button", "Regenerate the answer of assistant:pirate, column 2")
    settled(page, 2)
    press(page, "button", "Get code for the answer of assistant:pirate, column 2")
    tab_to(page, page.get_by_label("Language"))
    page.keyboard.type("Python (o")
    expect(page.get_by_role("region", name="Code")).to_contain_text("import openai")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    press(page, "button", "Edit message 1", back=True)
    page.keyboard.press("End")
    page.keyboard.type(" alone")
    press(page, "button", "Ask in a new branch")
    settled(page, 2)
    expect(page.locator(".user .text")).to_have_text("By keyboard alone")
    with steps_more(served.model_dir, 3):
        write(page, "Message", "Stop")
        page.keyboard.press("Enter")
        press(page, "button", "Stop all")
        settled(page, 4)
    expect(page.get_by_text("Stopped.", exact=True).first).to_be_visible()
    press(page, "button", "Branch after message 1", back=True)
    expect(page.locator("#message")).to_be_focused()
    press(page, "button", "New conversation", back=True)
    expect(answers(page)).to_have_count(0)


def test_embeddings_and_tables_by_keyboard(new_page: NewPage) -> None:
    """Texts are compared, and a file is chosen, run and downloaded."""
    page = new_page()
    press(page, "link", "Embeddings")
    write(page, "Texts, one a line", "a cat\na dog")
    press(page, "button", "Compare")
    expect(page.get_by_role("table", name="Similarity")).to_be_visible()
    press(page, "link", "Table", back=True)
    tab_to(page, page.get_by_label("Choose or drop a CSV file"))
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files([{"name": "rows.csv", "mimeType": "text/csv", "buffer": b"name\ncat\ndog"}])
    write(page, "Max tokens", "4")
    tab_to(page, page.get_by_label("Prompt of a row"))
    page.keyboard.press("Control+A")
    page.keyboard.type("Describe {name}")
    press(page, "button", "Run")
    expect(page.get_by_text("2 of 2 rows answered")).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Download CSV"))
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename.endswith(".csv")


def test_operations_by_keyboard(new_page: NewPage) -> None:
    """Traffic is moved and confirmed, a key is made and revoked, a limit is set and removed."""
    sent: list[Any] = []

    def update(route: Route, request: Request) -> None:
        if request.method == "PUT":
            sent.append(request.post_data_json)
        route.fulfill(json=two_models() if request.method == "PUT" else {"endpoints": [two_models()]})

    def prepare(page: Page) -> None:
        page.route("**/serving-endpoints", update)
        page.route("**/serving-endpoints/*/config", update)

    page = new_page("operations", prepare=prepare)
    tab_to(page, page.get_by_label("every 5 seconds"))
    page.keyboard.press("Space")
    tab_to(page, page.get_by_role("slider", name="model-2"))
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    press(page, "button", "Change the traffic")
    expect(page.get_by_role("dialog")).to_contain_text("model-1: 90 % → 87 %")
    press(page, "button", "Change it")
    expect(page.get_by_role("status")).to_have_text("The traffic of assistant is being changed.")
    assert sent[0]["traffic_config"]["routes"][1]["traffic_percentage"] == 13
    write(page, "Tenant", "by keyboard")
    tab_to(page, page.get_by_label("manage", exact=True))
    page.keyboard.press("Space")
    press(page, "button", "Create key")
    expect(page.locator(".secret code")).to_have_text(re.compile("^sk-"))
    row = page.get_by_role("row").filter(has_text="by keyboard")
    expect(row).to_contain_text("invoke, manage")
    tab_to(page, row.get_by_role("button", name="Revoke"), back=True)
    page.keyboard.press("Enter")
    expect(row.get_by_role("button", name="for ever")).to_be_focused()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("revoked")
    opens(page, "Limits")
    form = page.get_by_role("form", name="Set a limit")
    tab_to(page, form.get_by_label("Scope"))
    page.keyboard.type("tenant")
    tab_to(page, form.get_by_label("Of ("))
    page.keyboard.type("nobody")
    tab_to(page, form.get_by_label("Value"))
    page.keyboard.type("9")
    page.keyboard.press("Enter")
    removal = page.get_by_role("button", name="Remove the limit itpm of nobody")
    tab_to(page, removal, back=True)
    page.keyboard.press("Enter")
    expect(removal).to_have_count(0)


def test_prompts_by_keyboard(new_page: NewPage) -> None:
    """A prompt is written, saved, loaded, filled in and asked."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    opens(page, "Prompts of MLflow")
    tab_to(page, page.get_by_label("Template, with"))
    page.keyboard.type("Greet {{name}} by keyboard.")
    write(page, "Save as", "by-keyboard")
    press(page, "button", "Save a version")
    expect(page.get_by_role("status")).to_have_text("Version 1 of by-keyboard is saved.")
    write(page, "Name of the prompt", "by-keyboard", back=True)
    press(page, "button", "Load")
    expect(page.get_by_role("heading", name="by-keyboard, version 1")).to_be_visible()
    write(page, "name", "Ada")
    press(page, "button", "Use it in a new conversation")
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.press("Enter")
    settled(page, 1)
    expect(page.locator(".user .text")).to_have_text("Greet Ada by keyboard.")


def test_conversations_by_keyboard(new_page: NewPage) -> None:
    """A conversation is exported, imported and deleted."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    write(page, "Message", "Keep me")
    page.keyboard.press("Enter")
    settled(page, 1)
    tab_to(page, page.get_by_role("button", name="Export JSON"), back=True)
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    tab_to(page, page.get_by_label("Import JSON"), back=True)
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(download.value.path())
    expect(page.get_by_role("status")).to_have_text("The conversation is imported.")
    kept = page.get_by_role("button", name="Delete the conversation Keep me")
    expect(kept).to_have_count(2)
    for left in (1, 0):
        tab_to(page, kept.first, back=True)
        page.keyboard.press("Enter")
        expect(kept).to_have_count(left)


def test_usage_and_the_reference_by_keyboard(new_page: NewPage) -> None:
    """Usage is grouped and downloaded, and a route is found, opened and sent."""
    page = new_page("usage")
    tab_to(page, page.get_by_label("By day and"))
    page.keyboard.type("Adapter")
    tab_to(page, page.get_by_role("button", name="Download CSV"))
    with page.expect_download():
        page.keyboard.press("Enter")
    press(page, "link", "API reference", back=True)
    write(page, "Find a route", "get /api/2.0/limits")
    opens(page, "/api/2.0/limits")
    form = page.get_by_role("form", name="Try GET /api/2.0/limits")
    tab_to(page, form.get_by_role("button", name="Send"))
    page.keyboard.press("Enter")
    expect(form).to_contain_text("200 OK")
