"""The page with MLflow's prompt registry: prompts are saved, loaded, filled in and asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow import MlflowClient
from serving_process import Running

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from playground import answers, ask, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

NewPage = Callable[..., "Page"]
HOSTILE = "<img src=x onerror=window.pwned=1>"


def opened(page: Page) -> None:
    """Open the prompts and wait until MLflow has answered."""
    page.get_by_text("Prompts of MLflow").click()
    expect(page.get_by_role("form", name="Load a prompt")).to_be_visible()


def load(page: Page, name: str, version: str = "") -> None:
    form = page.get_by_role("form", name="Load a prompt")
    form.get_by_label("Name of the prompt").fill(name)
    form.get_by_label("Version or alias").fill(version)
    form.get_by_label("Version or alias").press("Enter")


def test_a_text_prompt_is_saved_loaded_and_asked(new_page: NewPage) -> None:
    """A template is saved as a version, loaded by another page, and asked with its variable filled in."""
    page = new_page()
    opened(page)
    page.get_by_label("Template, with").fill("Greet {{ name }}. " + HOSTILE)
    form = page.get_by_role("form", name="Save a version")
    form.get_by_label("Save as").fill("not a name")
    form.get_by_role("button", name="Save a version").click()
    expect(form.locator(".error")).to_contain_text("letters, digits")
    form.get_by_label("Save as").fill("greeting")
    form.get_by_label("What is new").fill("first")
    form.get_by_label("What is new").press("Enter")
    expect(page.get_by_role("status")).to_have_text("Version 1 of greeting is saved.")
    expect(page.get_by_text(re.compile(r"^In the registry: .*greeting"))).to_be_visible()  # other tests save others
    other = new_page()
    opened(other)
    load(other, "greeting", "9")
    expect(other.get_by_role("form", name="Load a prompt").locator(".error")).to_contain_text("not found")
    load(other, "greeting")
    expect(other.get_by_role("heading", name="greeting, version 1")).to_be_visible()
    other.get_by_label("name", exact=True).fill("Ada")
    other.get_by_role("button", name="Use it").press("Enter")
    expect(other.locator("#message")).to_be_focused()
    expect(other.locator("#message")).to_have_value(f"Greet Ada. {HOSTILE}")
    other.keyboard.press("Enter")
    settled(other, 1)
    expect(other.locator(".user .text")).to_have_text(f"Greet Ada. {HOSTILE}")
    assert other.evaluate("window.pwned") is None


def test_a_version_is_loaded_by_its_alias(new_page: NewPage, served: Running) -> None:
    """An alias loads the version that it is set on; the versions that there are, and what is new in each, are shown."""
    place = f"sqlite:///{Path(served.model_dir).parents[1]}/mlflow.db"  # conftest's registry
    page = new_page()
    opened(page)
    for number, text in enumerate(("Hello {{who}}", "Good day {{who}}"), 1):
        page.get_by_label("Template, with").fill(text)
        page.get_by_label("Save as").fill("aliased")
        page.get_by_label("What is new").fill(f"text {number}")
        page.get_by_role("button", name="Save a version").click()
        expect(page.get_by_role("status")).to_have_text(f"Version {number} of aliased is saved.")
    MlflowClient(place, place).set_prompt_alias("aliased", "production", 1)
    load(page, "aliased", "production")
    expect(page.get_by_role("heading", name="aliased, version 1")).to_be_visible()
    expect(page.get_by_label("Template, with")).to_have_value("Hello {{who}}")
    expect(page.get_by_text(re.compile(r"^Versions of aliased: .*1 \(text 1\)"))).to_contain_text("2 (text 2)")


def test_a_key_that_may_not_save(new_page: NewPage) -> None:
    """The server's refusal is shown, and what was written is still there."""
    words = "the key lacks the scope 'manage'"

    def refused(route: Route) -> None:
        if route.request.method == "POST":
            route.fulfill(status=403, json={"error_code": "PERMISSION_DENIED", "message": words})
        else:
            route.continue_()

    page = new_page(prepare=lambda page: page.route("**/api/2.0/prompts*", refused))
    opened(page)
    page.get_by_label("Template, with").fill("Mine")
    form = page.get_by_role("form", name="Save a version")
    form.get_by_label("Save as").fill("mine")
    form.get_by_role("button", name="Save a version").click()
    expect(form.locator(".error")).to_have_text(words)
    expect(page.get_by_label("Template, with")).to_have_value("Mine")


def test_a_conversation_becomes_a_chat_prompt_and_comes_back(new_page: NewPage) -> None:
    """System prompt, messages, schema and sampling are saved and loaded; the last message goes into the box."""
    page = new_page()
    page.get_by_role("group", name="Column 1").get_by_text("Sampling").click()
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Max tokens").fill("5")
    page.get_by_text("System prompt and token view").click()
    page.get_by_label("System prompt", exact=True).fill("You are brief.")
    ask(page, "First")
    settled(page, 1)
    said = answers(page).locator(".text").text_content() or ""
    page.get_by_label("Message", exact=True).fill("And {{then}}?")
    opened(page)
    page.get_by_role("button", name="Take the conversation").click()
    expect(page.get_by_label("Text of message 3 of the prompt")).to_have_value(said)
    page.get_by_label("Save as").fill("chat")
    page.get_by_role("button", name="Save a version").press("Enter")
    expect(page.get_by_role("status")).to_have_text("Version 1 of chat is saved.")
    other = new_page()
    sent: list[dict[str, object]] = []

    def record(request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append(request.post_data_json)

    other.on("request", record)
    opened(other)
    load(other, "chat", "1")
    other.get_by_label("then", exact=True).fill("now")
    other.get_by_role("button", name="Use it").click()
    expect(other.locator("#message")).to_have_value("And now?")
    expect(other.get_by_label("Temperature")).to_have_value("0.2")
    other.locator("#message").press("Enter")
    settled(other, 2)
    assert sent[0]["messages"] == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
    ]
    assert (sent[0]["temperature"], sent[0]["max_tokens"]) == (0.2, 5)


def test_a_prompt_that_is_no_conversation_is_refused(new_page: NewPage) -> None:
    """Messages that do not take turns, and the blocks of a Jinja2 template, are named instead of being lost."""
    messages = [{"role": "assistant", "content": "{% if x %}Hello{% endif %}"}, {"role": "user", "content": "Hi"}]
    found = {"name": "odd", "version": 3, "template": messages, "variables": [], "commit_message": "", "versions": []}

    def given(route: Route) -> None:
        route.fulfill(json=found | {"response_format": None, "model_config": None})

    page = new_page(prepare=lambda page: page.route("**/api/2.0/prompts/odd", given))
    opened(page)
    load(page, "odd")
    form = page.get_by_role("form", name="Use the prompt")
    expect(form.locator(".error")).to_contain_text("Jinja2")
    form.get_by_role("button", name="Use it").click()
    expect(form.locator(".error").last).to_contain_text("take turns")


def test_a_registry_that_is_down_is_shown_in_its_words(new_page: NewPage) -> None:
    """The reason is shown, and the rest of the playground works."""

    def down(route: Route) -> None:
        route.fulfill(status=503, json={"error_code": "TEMPORARILY_UNAVAILABLE", "message": "no MLflow server answers"})

    page = new_page(prepare=lambda page: page.route("**/api/2.0/prompts?*", down))
    page.get_by_text("Prompts of MLflow").click()
    expect(page.locator(".prompts .error")).to_have_text("no MLflow server answers")
    ask(page, "Hello")
    settled(page, 1)
