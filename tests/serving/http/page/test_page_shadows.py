"""The page's labels of shadows: served models that get copies of requests, and what the ledger counts of the copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serving_process import Running
from shown_endpoint import with_shadow

from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.interface.shadow import Shadow
from mlflow_llm.serving.metering import Ledger, Reservation, Store

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from axe import hold_wcag
from by_keyboard import press, tab_to
from playground import ask, read, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

NewPage = Callable[..., "Page"]
HOSTILE = "<img src=x onerror=window.pwned=1>"


def shown_with(sent: list[dict[str, Any]], name: str = "candidate") -> Callable[[Page], None]:
    """Return a preparation of a page whose endpoint has a shadow and a canary; updates are added to ``sent``."""

    def endpoints(route: Route, request: Request) -> None:
        if request.method == "PUT":
            sent.append(request.post_data_json)
        shown = with_shadow(name)
        route.fulfill(json=shown if request.method == "PUT" else {"endpoints": [shown]})

    def health(route: Route) -> None:
        engine = {"status": "ready", "steps": 1, "running": 0, "waiting": 0, "kernels": "native"}
        shadows = {name: engine | {"status": "starting", "waiting": 7}}
        found = engine | {"entities": dict.fromkeys(("model-1", "model-2"), engine), "shadows": shadows}
        route.fulfill(json={"status": "OK", "endpoints": {"assistant": found}})

    def prepare(page: Page) -> None:
        page.route("**/serving-endpoints", endpoints)
        page.route("**/serving-endpoints/*/config", endpoints)
        page.route("**/health", health)

    return prepare


def test_a_shadow_is_labelled_and_has_no_traffic(new_page: NewPage) -> None:
    """A shadow says what it gets, its engine is marked, and traffic is split among the others alone; the running canary
    gives its share back, which the confirmation says."""
    sent: list[dict[str, Any]] = []
    page = new_page("operations", prepare=shown_with(sent))
    row = page.get_by_role("table", name="Endpoints").get_by_role("row").nth(1)
    expect(row).to_contain_text("candidate: shadow, gets copies of 25 % of the requests (assistant 3)")
    expect(row).to_contain_text("model-1~3-00ff: 5 %, canary of model-1")
    engine = page.get_by_role("table", name="Engines").get_by_role("row").filter(has_text="(shadow)")
    expect(engine).to_contain_text("candidate (shadow)starting")
    assert page.get_by_role("slider").evaluate_all("all => all.map(one => one.labels[0].textContent)") == [
        "model-1",
        "model-2",
    ]
    expect(page.get_by_label("Percent of model-1")).to_have_value("90")
    page.get_by_label("Percent of model-2").fill("40")
    page.get_by_label("Percent of model-2").press("Tab")
    page.get_by_role("button", name="Change the traffic").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("ends the canary model-1~3-00ff: its traffic goes back to model-1")
    expect(dialog).not_to_contain_text("candidate")
    page.get_by_role("button", name="Change it").click()
    expect(dialog).to_have_count(0)
    config = config_body(sent[0], "")
    shares = [(route.served_model_name, route.traffic_percentage) for route in config.routes]
    assert shares == [("model-1", 60), ("model-2", 40)]
    assert {one.name: one.shadow for one in config.served_entities} == {
        "model-1": None,
        "model-2": None,
        "candidate": Shadow(sample=0.25),
    }


def test_an_update_by_keyboard_keeps_the_shadow(new_page: NewPage) -> None:
    """The payload log is turned on by keyboard; the shadow stays as it is."""
    sent: list[dict[str, Any]] = []
    page = new_page("operations", prepare=shown_with(sent))
    tab_to(page, page.get_by_label("every 5 seconds"))
    page.keyboard.press("Space")
    press(page, "button", "Turn the payload log of assistant on")
    expect(page.get_by_role("dialog")).to_contain_text("ends the canary")
    press(page, "button", "Turn it on")
    expect(page.get_by_role("dialog")).to_have_count(0)
    config = config_body(sent[0], "")
    assert config.payload_log is not None
    assert [one.shadow for one in config.served_entities if one.name == "candidate"] == [Shadow(sample=0.25)]


def test_copies_in_the_ledger_are_labelled(new_page: NewPage, served: Running, tmp_path: Path) -> None:
    """Copies are named among the requests and in usage, where a note says how many there are; sums are the server's."""
    store = Store(f"sqlite:///{Path(served.model_dir).parents[1]}/page.db")
    ledger = Ledger(store, state_dir=tmp_path)
    copy = {"key_id": "shadow", "tenant": "shadow", "mode": "shadow", "pays_tokens": False}
    reservation = Reservation(
        request_id="copied",
        endpoint="assistant",
        entity=HOSTILE,
        adapter=None,
        task="chat",
        input_tokens=10,
        max_output_tokens=20,
        **copy,
    )
    ledger.reserve(reservation).settle(completion=7, finish_reason="stop")
    ledger.close()
    store.close()
    page = new_page()
    ask(page, "Beside a copy")
    settled(page, 1)
    page.get_by_role("link", name="My usage").click()
    note = page.get_by_text("Among these are 1 copies of requests for shadows, with 10 prompt and 7 answer tokens.")
    expect(note).to_be_visible()
    page.get_by_label("By day and").select_option("tenant")
    table = page.get_by_role("table", name="Usage by day")
    expect(table).to_contain_text("shadow (copies of requests)")
    total = table.get_by_role("row", name="Total").get_by_role("cell")

    def summed() -> list[str]:
        rows = read(served, "/api/2.0/usage?by=day,tenant")["usage"]
        return [f"{sum(row[name] for row in rows):,}" for name in ("requests", "prompt_tokens", "completion_tokens")]

    while [total.all_text_contents()[place] for place in (1, 2, 4)] != summed():
        page.get_by_role("button", name="Refresh").click()
    hold_wcag(page)
    page.get_by_role("link", name="Operations").click()
    request = page.get_by_role("table", name="Recent requests").get_by_role("row").filter(has_text="copied")
    expect(request).to_contain_text(f"assistant (a copy, for the shadow {HOSTILE})")
    page.get_by_role("heading", name="Usage").click()
    expect(note).to_be_visible()
    page.get_by_label("Only tenant").fill("default")
    page.get_by_label("Only tenant").press("Tab")
    expect(note).to_have_count(0)
    assert page.evaluate("window.pwned") is None


def test_who_waits_names_copies(new_page: NewPage) -> None:
    """Copies under way have a row of their own in the queue by tenant."""
    row = {"request_id": "r", "key_id": "shadow", "tenant": "shadow", "endpoint": "assistant", "entity": "candidate"}
    row |= {"adapter": None, "task": "chat", "status": "open", "finish_reason": None, "ended_ms": None}
    row |= {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 0, "started_ms": 1, "has_payload": False}

    def requests(route: Route) -> None:
        route.fulfill(json={"now_ms": 3, "requests": [row]})

    page = new_page("operations", prepare=lambda page: page.route(re.compile("/api/2.0/requests"), requests))
    expect(page.get_by_role("table", name="Queue by tenant")).to_contain_text("shadow (copies of requests)")


def test_texts_of_a_copy_are_beside_those_of_its_request(new_page: NewPage, served: Running) -> None:
    """The dialog of a request has its own answer first, then the shadow's, also where the shadow was faster."""
    page = new_page()
    ask(page, "Logged")
    settled(page, 1)
    text = {"request": '{"question": 1}', "codes": [], "status_code": 200}
    own = text | {"shadow": False, "entity": "model-1", "response": '{"answer": "own"}'}
    copy = text | {"shadow": True, "entity": "candidate", "request": None, "response": '{"answer": "copy"}'}

    def payloads(route: Route) -> None:
        route.fulfill(json={"payloads": [copy, own], "next_cursor": None})

    page.route(re.compile(r"/payloads\?"), payloads)
    page.get_by_role("link", name="Operations").click()
    button = page.get_by_role("table", name="Recent requests").get_by_role("button", name="Text of request").first
    while not button.count():
        page.get_by_role("button", name="Refresh").click()
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("region", name="Answer", exact=True)).to_contain_text('"answer": "own"')
    copied = dialog.get_by_role("region", name="Answer of the shadow candidate to a copy, status 200")
    expect(copied).to_contain_text('"answer": "copy"')
    assert dialog.get_by_role("heading", level=3).all_text_contents()[:2] == ["Request", "Answer"]
    hold_wcag(page)


@pytest.mark.parametrize("width", [320, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shadows_keep_wcag(new_page: NewPage, scheme: str, width: int) -> None:
    """The labels have no violation in axe-core, and a hostile name is text."""
    page = new_page(
        "operations",
        prepare=shown_with([], HOSTILE),
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
    )
    expect(page.get_by_role("table", name="Endpoints")).to_contain_text(f"{HOSTILE}: shadow")
    expect(page.get_by_role("table", name="Engines")).to_contain_text(f"{HOSTILE} (shadow)")
    hold_wcag(page)
    assert page.evaluate("window.pwned") is None
