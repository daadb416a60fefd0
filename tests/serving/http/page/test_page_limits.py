"""The page's limits: soft ones and their alerts are shown, set, changed and exceeded."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from serving_process import Running

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from axe import hold_wcag
from by_keyboard import opens, press, tab_to, write
from playground import ask, call, read, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NewPage = Callable[..., "Page"]
HOSTILE = "<img src=x onerror=window.pwned=1>"


@pytest.fixture(autouse=True)
def no_limits(served: Running) -> Iterator[None]:
    """Leave no limit behind."""
    yield
    for one in limits(served):
        query = urllib.parse.urlencode({name: one[name] for name in ("scope", "subject", "kind")})
        call(served, "DELETE", f"/api/2.0/limits?{query}")


def limits(served: Running) -> list[dict[str, Any]]:
    found = read(served, "/api/2.0/limits")["limits"]
    assert isinstance(found, list)
    return found


def opened(page: Page) -> Locator:
    """Open the limits; return the form that sets one."""
    page.locator("summary").filter(has_text="Limits").press("Enter")  # a click may come while the page grows
    return page.get_by_role("form", name="Set a limit")


def fill(form: Locator, kind: str, value: str, beyond: str, shares: str, subject: str = "default") -> None:
    form.get_by_label("Scope").select_option("tenant")
    form.get_by_label("Of (").fill(subject)
    form.get_by_label("Kind").select_option(kind)
    form.get_by_label("Value").fill(value)
    form.get_by_label("Requests beyond it").select_option(beyond)
    form.get_by_label("Tell webhooks").fill(shares)
    form.get_by_role("button").click()


def test_a_soft_limit_is_set_and_changed(new_page: NewPage, served: Running) -> None:
    """Softness and shares of a limit are set, refused in the server's words, shown, and changed in the form."""
    page = new_page("operations")
    form = opened(page)
    refused = (("otpm", "half", "alert_at"), ("otpm", "0.5,99", "alert_at"), ("in_flight", "", "soft"))
    for kind, shares, words in refused:
        fill(form, kind, "5", "only counted (soft)", shares)
        expect(form.locator(".error")).to_contain_text(words)
    fill(form, "otpm", "many", "refused", "")
    expect(form.locator(".error")).to_contain_text("otpm")
    assert limits(served) == []
    fill(form, "budget_day", "2.50", "only counted (soft)", "0.5, 0.8")
    row = page.get_by_role("table", name="Limits").get_by_role("row").filter(has_text="default")
    for text in ("2.50", "only counted (soft)", "50 %, 80 %, 100 % of it"):
        expect(row).to_contain_text(text)
    (kept,) = limits(served)
    assert (kept["value"], kept["soft"], kept["alert_at"]) == ("2.50", True, [0.5, 0.8])
    row.get_by_role("button", name="Change the limit budget_day of default").click()
    expect(form.get_by_label("Value")).to_be_focused()
    expect(form.get_by_label("Tell webhooks")).to_have_value("0.5, 0.8")
    form.get_by_label("Requests beyond it").select_option("refused")
    form.get_by_label("Tell webhooks").fill("none")
    form.get_by_role("button").click()
    expect(row).to_contain_text("refused")
    expect(row).not_to_contain_text("%")
    (kept,) = limits(served)
    assert (kept["value"], kept["soft"], kept["alert_at"]) == ("2.50", False, [])
    row.get_by_role("button", name="Change").click()
    expect(form.get_by_label("Tell webhooks")).to_have_value("none")
    form.get_by_label("Tell webhooks").fill("")
    form.get_by_role("button").click()
    expect(row).to_contain_text("the server's shares")
    (kept,) = limits(served)
    assert (kept["soft"], kept["alert_at"]) == (False, None)


def test_a_soft_limit_is_exceeded(new_page: NewPage) -> None:
    """A request beyond a soft limit is answered, and the key's holder sees that it is exceeded and what it means."""
    page = new_page("operations")
    fill(opened(page), "otpm", "5", "only counted (soft)", "")
    expect(page.get_by_role("table", name="Limits")).to_contain_text("100 % of it")
    page.get_by_role("link", name="Playground").click()
    ask(page, "Go beyond")
    settled(page, 1)
    page.get_by_role("link", name="My usage").click()
    cells = page.get_by_role("table", name="What is left").get_by_role("row").nth(1).get_by_role("cell")
    while not (cells.nth(3).text_content() or "").endswith("exceeded"):
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("link", name="My usage").click()
        expect(cells).to_have_count(7)
    assert cells.all_text_contents()[:4] == ["output tokens a minute", "5", "256", "0: exceeded"]
    expect(cells.nth(4)).to_have_text("only counted (soft)")
    expect(cells.nth(5)).to_have_text("none")  # the server has no webhooks


def test_limits_by_keyboard(new_page: NewPage, served: Running) -> None:
    """A soft limit with alerts is set, changed and removed without a mouse."""
    page = new_page("operations")
    tab_to(page, page.get_by_label("every 5 seconds"))
    page.keyboard.press("Space")
    opens(page, "Limits")
    form = page.get_by_role("form", name="Set a limit")
    tab_to(page, form.get_by_label("Scope"))
    page.keyboard.type("tenant")
    tab_to(page, form.get_by_label("Of ("))
    page.keyboard.type("nobody")
    tab_to(page, form.get_by_label("Value"))
    page.keyboard.type("9")
    tab_to(page, form.get_by_label("Requests beyond it"))
    page.keyboard.type("only")
    tab_to(page, form.get_by_label("Tell webhooks"))
    page.keyboard.type("0.25")
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Limits")).to_contain_text("25 %, 100 % of it")
    press(page, "button", "Change the limit itpm of nobody", back=True)
    expect(form.get_by_label("Value")).to_be_focused()
    write(page, "Value", "7")
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Limits").get_by_role("cell", name="7", exact=True)).to_be_visible()
    (kept,) = limits(served)
    assert (kept["value"], kept["soft"], kept["alert_at"]) == (7, True, [0.25])
    press(page, "button", "Remove the limit itpm of nobody", back=True)
    expect(page.get_by_text("No limits are set.")).to_be_visible()


@pytest.mark.parametrize("width", [320, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_limits_keep_wcag(new_page: NewPage, scheme: str, width: int) -> None:
    """The tables of limits have no violation in axe-core, and names of subjects are text."""
    window = {"width": width, "height": 900}
    page = new_page("operations", color_scheme=scheme, viewport=window, reduced_motion="reduce")
    form = opened(page)
    rows = page.get_by_role("table", name="Limits").get_by_role("row")
    fill(form, "otpm", "5", "only counted (soft)", "0.5")
    expect(rows).to_have_count(2)  # the form is empty by then
    fill(form, "qpm", "500000", "refused", "", HOSTILE)
    expect(rows).to_have_count(3)
    hold_wcag(page)
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("table", name="What is left")).to_contain_text("only counted (soft)")
    hold_wcag(page)
    assert page.evaluate("window.pwned") is None
