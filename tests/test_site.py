"""The built documentation in a browser: on the narrowest screen, without other hosts, in light and in dark.

``MLFLOW_LLM_SITE`` names the folder that ``mkdocs build --site-dir`` wrote; tests/run.sh sets it.
"""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsers import PATIENCE_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SITE = os.environ.get("MLFLOW_LLM_SITE", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="MLFLOW_LLM_SITE does not name a built site"),
    pytest.mark.timeout(900),
]
# What is cut off on the right, but for what scrolls in a box of its own.
CUT = """() => [...document.querySelectorAll("article *")]
  .filter((one) => one.getClientRects().length && one.getBoundingClientRect().right > innerWidth + 1
    && !one.closest(".md-typeset__scrollwrap, pre"))
  .map((one) => one.outerHTML.slice(0, 100))"""
WIDTH = "document.documentElement.scrollWidth"
CODE_AND_TEXT = ("tutorial.html", "server.html", "how-to/containers.html", "reference/cli.html")


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the URL under which the site is served."""
    files = functools.partial(_Files, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_page_fits_and_asks_no_other_host(browser: Browser, address: str) -> None:
    """At 320 px no page scrolls sideways or loses text, and every request is answered by the site itself."""
    with browser.new_context(viewport={"width": 320, "height": 640}, color_scheme="dark") as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        wrong: list[Any] = []
        page.on("request", lambda one: None if one.url.startswith((address, "data:")) else wrong.append(one.url))
        page.on("response", lambda one: wrong.append((one.status, one.url)) if one.status >= 400 else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        names = sorted(str(path.relative_to(SITE)) for path in Path(SITE).rglob("*.html"))
        assert len(names) > 50
        for name in names:
            page.goto(f"{address}/{name}")
            wide, cut = page.evaluate(WIDTH), page.evaluate(CUT)
            if wide > 320 or cut:
                wrong.append((name, wide, cut[:3]))
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(browser: Browser, address: str, scheme: Any) -> None:
    """Texts, code and links keep the contrast of WCAG AA, and links are told apart by more than their colour."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (pip)")
    script = Path(axe.__file__).with_name("axe.min.js").read_text()
    rules = "{runOnly: {type: 'rule', values: ['color-contrast', 'link-in-text-block']}}"
    with browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        for name in CODE_AND_TEXT:
            page.goto(f"{address}/{name}")
            assert page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default"}.get(
                scheme, "slate"
            )
            page.evaluate(script)
            found = page.evaluate(f"axe.run(document, {rules})")
            shown = [(one["id"], [node["html"][:100] for node in one["nodes"][:5]]) for one in found["violations"]]
            assert shown == [], name
