"""Frames of the page while long transcripts scroll, and the time of its first paint, in Chromium.

A server is started and gets no request before the page's first one; then conversations of ``--tokens`` tokens are
imported: as one answer, as turns of 250 tokens, and as one answer with the probabilities of its tokens. Each is
scrolled from its beginning to its end, a third of the window each frame. A frame lasts from one animation frame to the
next; a task is what the page's main thread does at a stretch, and its CPU time does not depend on what else runs on the
machine. Needs Playwright and Debian's chromium.

    python benchmarks/page.py MODEL_DIR --tokens 100000
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from load import free_port
from measured import say_kernels
from playwright.sync_api import Browser, FilePayload, Page, expect, sync_playwright
from report import publish

SIZE: Any = {"width": 1440, "height": 900}
PATIENCE_MS = 600_000
FRAME_MS = 50
WORDS = "Measure what you claim, and say on which processor it was measured. "
WORDS_TOKENS = 13
TURN_TOKENS = 250
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
SCROLL = """async () => {
  scrollTo(0, 0);
  await new Promise((done) => setTimeout(done, 2000));
  const frames = [];
  let last = await new Promise(requestAnimationFrame);
  let rest = 30; // frames at the end, where the window does not move
  while (rest > 0) {
    const before = scrollY;
    scrollBy(0, innerHeight / 3);
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
    if (scrollY === before) rest--;
  }
  return frames;
}"""


def conversations(tokens: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the users' messages and the answers of each conversation, by its name."""
    views = [{"text": "word ", "logprob": -(place % 40) / 10, "top": []} for place in range(tokens)]
    piece = {"text": WORDS * (TURN_TOKENS // WORDS_TOKENS)}
    return {
        "one answer": [("All of it", {"text": WORDS * (tokens // WORDS_TOKENS)})],
        f"turns of {TURN_TOKENS} tokens": [(f"Question {n}", piece) for n in range(tokens // TURN_TOKENS)],
        "one answer with probabilities": [("All of it", {"text": "word " * tokens, "tokens": views})],
    }


def scrolled(page: Page, turns: list[tuple[str, dict[str, Any]]]) -> tuple[list[float], list[float]]:
    """Import a conversation, scroll through it, and return the times of frames and the CPU times of tasks, in ms."""
    answer = {"model": "assistant", "state": "done"}
    shown = [{"user": user, "answers": [[answer | {"choices": [choice]}]]} for user, choice in turns]
    file = json.dumps({"columns": [{"model": "assistant"}], "turns": shown}).encode()
    page.get_by_label("Import JSON").set_input_files([FilePayload(name="c.json", mimeType="", buffer=file)])
    expect(page.locator(".turn")).to_have_count(len(turns), timeout=PATIENCE_MS)
    page.wait_for_timeout(2000)
    browser = page.context.browser
    assert browser is not None
    browser.start_tracing(page=page, categories=["toplevel"])
    frames: list[float] = page.evaluate(SCROLL)
    return sorted(frames), tasks(json.loads(browser.stop_tracing())["traceEvents"])


def tasks(events: list[dict[str, Any]]) -> list[float]:
    """Return the CPU times of the tasks of the renderer's main thread, in ms."""
    names = [one for one in events if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"]
    threads = {(one["pid"], one["tid"]) for one in names}
    found = [one for one in events if one["name"].endswith("RunTask") and (one["pid"], one["tid"]) in threads]
    return [one["tdur"] / 1000 for one in found if "tdur" in one]


def row(name: str, frames: list[float], spent: list[float]) -> dict[str, Any]:
    return {
        "conversation": name,
        "frames": len(frames),
        "median, ms": statistics.median(frames),
        "99 %, ms": frames[int(len(frames) * 0.99)],
        "longest frame, ms": frames[-1],
        f"over {FRAME_MS} ms": sum(frame > FRAME_MS for frame in frames),
        "longest task, ms of CPU": max(spent),
    }


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Start a server and yield its URL; it has had no request yet."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="mll-") as place:
        log = Path(place, "log")
        with open(log, "wb") as sink:
            words = ["serve", "-m", f"{model}=assistant", "--port", str(port), "--workers", "1"]
            command = [sys.executable, "-m", "mlflow_llm.serving.cli", *words]
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            while '"event": "serving"' not in log.read_text():  # the worker has started
                if process.poll() is not None:
                    raise SystemExit(log.read_text()[-2000:])
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()
            process.wait(60)


def opened(browser: Browser, url: str) -> tuple[Page, float]:
    """Return the page in a fresh context, without anything cached, and the time of its first paint in ms."""
    page = browser.new_context(viewport=SIZE).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    while (first := page.evaluate(FIRST_PAINT)) is None:
        page.wait_for_timeout(20)
    return page, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    args = parser.parse_args()
    say_kernels()
    with sync_playwright() as playwright, server(args.model) as url:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        browser.new_page().close()  # the browser's own start is not measured
        page, cold = opened(browser, url)
        _, warm = opened(browser, url)
        rows = [row(name, *scrolled(page, turns)) for name, turns in conversations(args.tokens).items()]
        paints: dict[str, Any] = {"browser": browser.version, "first_paint_cold_ms": cold, "first_paint_warm_ms": warm}
        browser.close()
    print(json.dumps(paints))
    publish("page", rows, **paints)


if __name__ == "__main__":
    main()
