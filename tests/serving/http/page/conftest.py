"""A browser and a server for the tests of the page; without Playwright or Chromium they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsers import PATIENCE_MS
from instant_model import write_instant_model
from serving_process import GATED_CORE, Running, running
from stores import empty_store

from mlflow_llm.serving.interface.payload_log import PayloadLog

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# MLflow's registry is asked in the worker, since a process for each question takes seconds to import MLflow
PROMPTS = """
import os
from mlflow_llm.serving.control.mlflow_processes import prompt_process, prompt_registry
os.environ["MLFLOW_TRACKING_URI"] = {store!r}
os.environ.pop("MLFLOW_REGISTRY_URI", None)
prompt_registry._ask = lambda question, timeout: prompt_process.answer(question)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a server with a database, a payload log and a prompt registry, whose replies are printable ASCII that
    never end early, and whose steps can be held."""
    root: Path = tmp_path_factory.mktemp("page")
    bundle = write_instant_model(root / "model", vocab_size=94)
    prompts = PROMPTS.format(store=empty_store(root))
    place, log = f"sqlite:///{root}/page.db", PayloadLog()
    with running(bundle, core=GATED_CORE, database=place, in_worker=prompts, payload_log=log) as server:
        yield server


class Complaints(list[str]):
    """Errors that pages wrote to the console: exceptions, and what their Content-Security-Policy blocked."""


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def new_page(browser: Browser, served: Running, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Return ``new_page(view, **options)``: a page of a fresh browser context at a view of the server (or of another
    URL); ``prepare`` gets it before it is loaded."""
    contexts: list[BrowserContext] = []

    def make(
        view: str = "playground", *, at: str = "", prepare: Callable[[Page], None] | None = None, **options: Any
    ) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        if prepare is not None:
            prepare(page)
        page.goto(f"{at or served.url}/#/{view}")
        return page

    yield make
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # handlers whose requests the page wants no more
        context.close()
