"""Long transcripts in a real browser: how many elements the document has, and how many appear in one frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from server_calls import until

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOKENS = 100_000
TURNS = 150
MAX_IN_A_FRAME = 400  # the budget of windowed.tsx, and the last block that goes beyond it
MAX_ELEMENTS = 6000  # of the document, wherever the window is
# scrolls a third of the window each frame for a while, then jumps to places far away; counts the elements that are
# added between two frames, and all that there are
SCROLL = """async () => {
  let added = 0;
  const count = (node) => node instanceof Element ? 1 + node.querySelectorAll("*").length : 0;
  new MutationObserver((changes) => {
    for (const change of changes) for (const node of change.addedNodes) added += count(node);
  }).observe(document.body, { childList: true, subtree: true });
  const frames = [], sizes = [];
  const frame = async () => {
    await new Promise(requestAnimationFrame);
    frames.push(added);
    sizes.push(document.querySelectorAll("*").length);
    added = 0;
  };
  scrollTo(0, 0);
  for (let n = 0; n < 60; n++) { scrollBy(0, innerHeight / 3); await frame(); }
  for (const part of [0.9, 0.1, 0.5, 1]) {
    scrollTo(0, part * document.body.scrollHeight);
    for (let n = 0; n < 30; n++) await frame();
  }
  return { most: Math.max(...frames), total: frames.reduce((sum, one) => sum + one), size: Math.max(...sizes) };
}"""
SEEN = """() => {
  const shown = [...document.querySelectorAll(".token")].map((one) => one.getBoundingClientRect());
  return shown.filter((one) => one.bottom > 0 && one.top < innerHeight).length;
}"""


def with_probabilities() -> list[dict[str, Any]]:
    """Return one turn whose answer has the probabilities of ``TOKENS`` tokens."""
    views = [{"text": "word ", "logprob": -(place % 40) / 10, "top": []} for place in range(TOKENS)]
    return turns([{"text": "word " * TOKENS, "tokens": views}])


def many_turns() -> list[dict[str, Any]]:
    return turns([{"text": "Measure what you claim. " * 40} for _ in range(TURNS)])


def turns(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answer = {"model": "assistant", "state": "done"}
    return [{"user": f"Question {n}", "answers": [[answer | {"choices": [one]}]]} for n, one in enumerate(choices)]


@pytest.mark.parametrize("conversation", [with_probabilities, many_turns])
def test_scrolling_builds_little_in_each_frame(
    new_page: Callable[..., Page], conversation: Callable[[], list[dict[str, Any]]]
) -> None:
    """Wherever a transcript is scrolled to, a frame adds few elements and the document stays small, and what is in the
    window is there after some frames."""
    page = new_page()
    shown = conversation()
    file = json.dumps({"columns": [{"model": "assistant"}], "turns": shown}).encode()
    page.get_by_label("Import JSON").set_input_files([{"name": "c.json", "mimeType": "", "buffer": file}])
    expect(page.locator(".turn")).to_have_count(len(shown))
    found = page.evaluate(SCROLL)
    assert found["total"] > 0
    assert found["most"] <= MAX_IN_A_FRAME, found
    assert found["size"] <= MAX_ELEMENTS, found
    if conversation is with_probabilities:
        page.evaluate("scrollTo(0, 0.3 * document.body.scrollHeight)")
        until(lambda: page.evaluate(SEEN) > 100)  # the page's policy forbids what Playwright's own waiting evaluates
