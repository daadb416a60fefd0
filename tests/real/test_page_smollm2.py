"""The page with a real model: forced tool calls, answers after a JSON schema, several answers, sampling values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from browsers import PATIENCE_MS

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CITIES = ["Oslo", "Paris"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now",
        "parameters": {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "rain"]}, "wind": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sky", "wind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def page(url: str, browser: Browser) -> Page:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    return page


def begin(page: Page, url: str, **fields: str) -> list[dict[str, Any]]:
    """Open a fresh playground, fill in the fields of the column and return the list of the bodies that will be sent."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: one.url.endswith("/v1/chat/completions") and sent.append(one.post_data_json))
    page.goto("about:blank")
    page.goto(url)
    playwright.expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    column = page.get_by_role("group", name="Column 1")
    column.get_by_text("Sampling").click()
    for label, value in fields.items():
        column.get_by_label(label.replace("_", " ")).fill(value)
    return sent


def ask(page: Page, text: str, count: int = 1) -> None:
    """Ask, and wait until ``count`` answers are shown and over."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
    over(page, count)


def over(page: Page, count: int) -> None:
    playwright.expect(page.get_by_role("article")).to_have_count(count)
    playwright.expect(page.locator("[aria-busy=true]")).to_have_count(0)


def test_a_forced_tool_call_and_the_answer_to_its_result(page: Page, url: str) -> None:
    """A model that has to call a tool does, with arguments after its schema; with the result it answers in words."""
    sent = begin(page, url, Max_tokens="40")
    page.get_by_text("Tools and JSON schema").click()
    page.locator("#tools").fill(json.dumps([TOOL]))
    page.locator("#tools").blur()
    page.get_by_label("Of these tools, the model").select_option("required")
    ask(page, "How is the weather?")
    arguments = page.get_by_role("region", name="Arguments of call 1").text_content() or ""
    assert json.loads(arguments)["city"] in CITIES
    page.get_by_label("Result of get_weather").fill('{"sky": "rain"}')
    page.get_by_role("button", name="Send results").click()
    over(page, 2)
    assert [body.get("tool_choice") for body in sent] == ["required", None]
    assert sent[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": sent[1]["messages"][-2]["tool_calls"][0]["id"],
        "content": '{"sky": "rain"}',
    }
    playwright.expect(page.get_by_role("article").last.locator(".error")).to_have_count(0)
    playwright.expect(page.get_by_role("article").last.locator(".numbers")).to_contain_text("tokens")


def test_an_answer_after_a_json_schema(page: Page, url: str) -> None:
    """The answer is JSON that the schema allows, whatever the model would have said."""
    begin(page, url, Max_tokens="100")
    page.get_by_text("Tools and JSON schema").click()
    page.locator("#schema").fill(json.dumps(SCHEMA))
    page.locator("#schema").blur()
    ask(page, "How is the weather?")
    found = json.loads(page.get_by_role("article").locator(".text").text_content() or "")
    assert found["sky"] in ("clear", "rain")
    assert found["wind"] in range(10)


def test_several_answers_of_one_request(page: Page, url: str) -> None:
    """With n = 2 the engine's two texts are shown, and the conversation goes on with the chosen one."""
    sent = begin(page, url, Answers="2", Max_tokens="12", Temperature="1.5")
    ask(page, "Name a colour.")
    texts = page.get_by_role("article").locator(".choice .text")
    playwright.expect(texts).to_have_count(2)
    second = texts.nth(1).text_content()
    page.get_by_label("Go on with answer 2").check()
    ask(page, "Another one.", 2)
    assert sent[0]["n"] == 2
    assert sent[1]["messages"][1] == {"role": "assistant", "content": second}


def test_an_empty_temperature_is_the_clis(page: Page, url: str) -> None:
    """SmolLM2 has no sampling values of its own: the page asks at 0.7, and says so."""
    sent = begin(page, url, Max_tokens="12", Seed="1")
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.7"
    playwright.expect(page.get_by_text("An empty temperature is 0.7")).to_be_visible()
    ask(page, "What is the capital of France?")
    assert sent[0]["temperature"] == 0.7
    playwright.expect(page.get_by_role("article").locator(".numbers")).to_contain_text("tokens")
