"""Open WebUI as a client, in Chromium: sign up, chat, stop, regenerate, usage.

By hand, with Open WebUI 0.12 in an environment of its own (docs/how-to/open-webui.md), Playwright and Chromium:

    python tests/open_webui.py openwebui/bin/open-webui MODEL_DIR

Starts a server that requires keys, and Open WebUI in front of it; fails where one of them counts something else than
the other. With ``--out FOLDER`` each step leaves a screenshot. ``--without-tools`` turns off the tools that Open WebUI
offers the model with each message, some 7,000 tokens, whose reading takes a minute or more on few cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

PATIENCE = 600  # seconds
MODEL = "assistant"
QUESTION = "What is the capital of France?"
LONG = "Write a long story about a lighthouse."
ANALYTICS = """async () => {
  const headers = {Authorization: "Bearer " + localStorage.token};
  return (await fetch("/api/v1/analytics/tokens", {headers})).json();
}"""
COUNTS = ("prompt_tokens", "completion_tokens")
SETTINGS = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
    "DEFAULT_MODEL_PARAMS": json.dumps({"temperature": 0}),
}


@contextlib.contextmanager
def program(log: Path, ready: str, *words: str, **environment: str) -> Iterator[None]:
    """Run a program from when ``ready``, a URL, answers until the block ends."""
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=os.environ | environment, cwd=log.parent
        )
    try:
        until = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                break
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


class Ledger:
    """The server's counts, read with a key of the scope ``manage``."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def read(self, path: str) -> Any:
        """Return the JSON that ``path`` answers."""
        head = {"Authorization": f"Bearer {self._key}"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, headers=head), timeout=60) as answer:
            return json.load(answer)

    def settled(self, count: int) -> list[Any]:
        """Return the newest ``count`` requests, the newest first, when there are as many and all have ended."""
        until = time.monotonic() + PATIENCE
        while True:
            found = self.read("/api/2.0/requests")["requests"]
            if len(found) >= count and all(row["status"] != "open" for row in found):
                assert len(found) == count, found
                return list(found)
            assert time.monotonic() < until, found
            time.sleep(0.5)


def sign_up(page: Page, url: str) -> None:
    """Make the first account, which administers Open WebUI."""
    page.goto(f"{url}/auth")
    begin = page.get_by_role("button", name="Get started", exact=False)
    form = page.locator("input[type=email]")
    expect(begin.or_(form).first).to_be_visible()
    if begin.count():
        begin.first.click()
    page.locator("input[autocomplete=name]").fill("Ada")
    form.fill("ada@example.com")
    page.locator("input[type=password]").first.fill("a-password-of-the-test")
    page.locator("button[type=submit]").click()
    expect(page.locator("#chat-input")).to_be_visible()
    close = page.get_by_role("button", name=re.compile("Okay, Let's Go", re.IGNORECASE))
    page.wait_for_timeout(3000)  # the notes of the release appear after the page
    if close.count():
        close.first.click()


def say(page: Page, text: str) -> None:
    """Type a message and send it."""
    box = page.locator("#chat-input")
    box.click()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def whole_answer(page: Page) -> str:
    """Return the newest answer, when it has ended."""
    expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
    expect(page.locator("button[id^=info-]").last).to_be_visible()
    return " ".join(page.locator(".chat-assistant").last.inner_text().split())


def shown_usage(page: Page) -> dict[str, int]:
    """Return the counts that Open WebUI shows of the newest answer."""
    page.mouse.move(0, 0)  # closes the tooltip of an earlier answer
    page.locator("button[id^=info-]").last.hover()
    tooltip = page.locator(".tippy-content, [role=tooltip]").filter(has_text="completion_tokens")
    expect(tooltip.first).to_be_visible()
    text = tooltip.first.inner_text()
    return {name: int(count) for name, count in re.findall(r"(\w+_tokens): (\d+)", text)}


def counted(row: Any) -> dict[str, int]:
    """Return the counts of a row of the ledger, by the names that a reply has."""
    return {name: row[name] for name in COUNTS}


def try_out(page: Page, url: str, ledger: Ledger, out: Path | None) -> None:
    """Do what a user does, and compare what Open WebUI shows with what the server has counted."""

    def seen(what: str) -> None:
        print(what, flush=True)
        if out is not None:
            page.screenshot(path=out / f"{re.sub(r'[^a-z]+', '-', what.partition(':')[0].lower())}.png")

    sign_up(page, url)
    seen("sign up: the first account is made")

    page.goto(f"{url}/?models={MODEL}")
    say(page, QUESTION)
    text = whole_answer(page)
    assert "Paris" in text, text
    (first,) = ledger.settled(1)
    assert first["status"] == "ok", first
    shown = shown_usage(page)
    assert counted(first).items() <= shown.items(), (first, shown)
    seen(f"chat: {text!r}, {shown}")

    page.get_by_role("button", name="Regenerate", exact=True).last.click()
    page.get_by_role("button", name="Try Again").click()
    again, *_ = ledger.settled(2)
    expect(page.get_by_text("2/2")).to_be_visible()
    text = whole_answer(page)
    assert again["status"] == "ok", again
    assert again["prompt_tokens"] == first["prompt_tokens"], (first, again)
    shown = shown_usage(page)
    assert counted(again).items() <= shown.items(), (again, shown)
    seen(f"regenerate: the second of two answers, {text!r}, {shown}")

    say(page, LONG)
    stop = page.get_by_role("button", name="Stop", exact=True)
    newest = page.locator(".chat-assistant").last
    expect(page.locator(".chat-assistant")).to_have_count(2)
    expect(newest).to_have_text(re.compile(r"\w"))
    begun = newest.inner_text()
    expect(newest).not_to_have_text(begun)
    expect(stop).to_be_visible()
    seen(f"streaming: {len(begun)} characters, then {len(newest.inner_text())}, of an answer that has not ended")
    stop.click()
    stopped, *_ = ledger.settled(3)
    assert stopped["status"] == "aborted", stopped
    assert stopped["completion_tokens"] > 0, stopped
    expect(stop).to_have_count(0)
    text = newest.inner_text()
    seen(f"stop: the request ended at the server, {counted(stopped)}; {len(text)} characters are kept")

    say(page, QUESTION)
    expect(page.locator(".chat-assistant")).to_have_count(3)
    last, *_ = ledger.settled(4)
    text = whole_answer(page)
    assert last["status"] == "ok", last
    shown = shown_usage(page)
    assert counted(last).items() <= shown.items(), (last, shown)
    seen(f"after a stop: {text!r}, {shown}")

    (total,) = ledger.read("/api/2.0/usage?by=endpoint")["usage"]
    rows = ledger.settled(4)
    assert total["requests"] == len(rows), total
    for name in COUNTS:
        assert total[name] == sum(row[name] for row in rows), (total, rows)
    shown = page.evaluate(ANALYTICS)
    ended = [row for row in rows if row["status"] == "ok"]  # of a stopped answer no usage reaches Open WebUI
    assert shown["total_input_tokens"] == sum(row["prompt_tokens"] for row in ended), (shown, rows)
    assert shown["total_output_tokens"] == sum(row["completion_tokens"] for row in ended), (shown, rows)
    page.goto(f"{url}/admin/analytics")
    expect(page.get_by_text(MODEL).first).to_be_visible()
    seen(f"analytics: {shown}")
    print("ledger:", total)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", type=Path, help="open-webui of its environment")
    parser.add_argument("model", type=Path, help="a model's directory, such as SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, help="a folder for screenshots")
    parser.add_argument("--without-tools", action="store_true", help="turn off the tools that Open WebUI offers")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the programs end, too
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE * 1000)
    command = [sys.executable, "-m", "mlflow_llm.serving.cli"]
    with tempfile.TemporaryDirectory(prefix="open-webui-") as folder, contextlib.ExitStack() as held:
        root = Path(folder)
        server, client, database = free_port(), free_port(), f"sqlite:///{root}/serving.db"
        keys = [*command, "keys", "create", "--tenant", "open-webui", "--database", database, "--scope"]
        invoke, manage = (
            subprocess.run([*keys, scope], check=True, capture_output=True, text=True).stdout.split()[0]
            for scope in ("invoke", "manage")
        )
        serve = ["serve", "-m", f"{given.model.resolve()}={MODEL}", "--port", str(server), "-C", "max_model_len=8192"]
        serve += ["--database", database, "--require-keys"]
        url = f"http://127.0.0.1:{server}"
        held.enter_context(program(root / "server.log", f"{url}/ready", *command, *serve))
        capabilities = {"usage": True} | ({"builtin_tools": False} if given.without_tools else {})
        environment = SETTINGS | {
            "OPENAI_API_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": invoke,
            "DATA_DIR": str(root / "data"),
            "WEBUI_SECRET_KEY": "of the test",
            "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": capabilities}),
        }
        there = f"http://127.0.0.1:{client}"
        listen = ["serve", "--host", "127.0.0.1", "--port", str(client)]
        held.enter_context(
            program(root / "client.log", f"{there}/health", str(given.program.resolve()), *listen, **environment)
        )
        started = held.enter_context(sync_playwright())
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(PATIENCE * 1000)
        try:
            try_out(page, there, Ledger(url, manage), given.out)
        except BaseException:
            print((root / "server.log").read_text()[-3000:], (root / "client.log").read_text()[-3000:], page.url)
            if given.out is not None:
                page.screenshot(path=given.out / "failed.png")
            raise
        finally:
            browser.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main(sys.argv[1:])
