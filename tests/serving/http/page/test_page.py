"""The page in a real browser: chat, columns, stop, usage, keys, hostile texts, accessibility."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gated_core import steps_more
from instant_model import write_instant_model
from serving_process import Running, running
from shown_endpoint import two_models

from mlflow_llm.serving.metering.accounts.keys import Keys
from mlflow_llm.serving.metering.store.store import Store

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from axe import hold_wcag
from playground import answers, ask, read, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

NewPage = Callable[..., "Page"]
VIEWS = (
    ("playground", "Playground"),
    ("embeddings", "Embeddings"),
    ("table", "Table"),
    ("batches", "Batches"),
    ("usage", "My usage"),
    ("operations", "Operations"),
    ("reference", "API reference"),
)
HOSTILE = [
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    '"><svg onload=window.pwned=1>',
    "'-window.pwned=1-'",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "<a href='javascript:window.pwned=1'>x</a>",
    "</textarea><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "[x](javascript:window.pwned=1) ![x](https://example.com/x.png)",
    "\u202eevil \u0000<b>bold</b>",
]


def test_a_chat_streams(new_page: NewPage, served: Running, complaints: list[str]) -> None:
    """The text is shown while the engine is held between two tokens; at the end come exact counts and times."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    with steps_more(served.model_dir, 40):
        ask(page, "Hello")
        text = answers(page).locator(".text")
        expect(text).to_have_text(re.compile(r"\S"))
        expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
    settled(page, 1)
    numbers = answers(page).locator(".numbers")
    for shown in ("256 tokens", "First token", "tokens/s"):
        expect(numbers).to_contain_text(shown)
    expect(page.get_by_role("status")).to_have_text("The answer of assistant is complete: 256 tokens.")
    expect(page.get_by_text("Cut at the limit of tokens.")).to_be_visible()
    assert complaints == []


def test_columns_answer_one_prompt(new_page: NewPage) -> None:
    """The base and its adapter answer the same prompt side by side, each with its own history and settings."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    page.get_by_role("button", name="Add a column").click()
    expect(page.get_by_label("Model", exact=True).nth(1)).to_have_value("assistant:pirate")
    second = page.get_by_role("group", name="Column 2")
    second.get_by_text("Sampling").click()
    second.get_by_label("Max tokens").fill("7")
    second.get_by_label("Temperature").fill("0")
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda one: one.method == "POST" and bodies.append(one.post_data_json))
    ask(page, "First")
    settled(page, 2)
    ask(page, "Second")
    settled(page, 4)
    expect(answers(page).nth(3).locator(".numbers")).to_contain_text("7 tokens")
    sent = {body["model"]: body for body in bodies[2:]}
    assert sent["assistant:pirate"].items() >= {"max_tokens": 7, "temperature": 0, "stream": True}.items()
    assert sent["assistant"]["temperature"] == 0.7  # as mlflow-llm chat asks a model without sampling values
    for model, place in (("assistant", 0), ("assistant:pirate", 1)):
        said = answers(page).nth(place).locator(".text").text_content()
        first, reply, last = sent[model]["messages"]
        assert (first["content"], reply["content"], last["content"]) == ("First", said, "Second")


def test_the_only_served_model_is_not_named(new_page: NewPage) -> None:
    """An answer's heading is the model that was asked, also where the only served model has the endpoint's name."""

    def same_name(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, headers=answer.headers | {"served-model-name": "assistant"})

    page = new_page(prepare=lambda page: page.route("**/v1/chat/completions", same_name))
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    page.get_by_label("Model", exact=True).select_option("assistant:pirate")
    ask(page, "Hello")
    settled(page, 1)
    expect(answers(page).get_by_role("heading")).to_have_text("assistant:pirate")


def test_an_answer_is_stopped(new_page: NewPage, served: Running) -> None:
    """Stopping ends the request at the server, keeps the text so far, and the conversation goes on."""
    page = new_page()
    with steps_more(served.model_dir, 40):
        ask(page, "Tell me everything")
        expect(answers(page).locator(".text")).to_have_text(re.compile(r"\S"))
        page.get_by_role("button", name="Stop the answer").click()
        settled(page, 1)
        expect(page.get_by_text("Stopped.", exact=True)).to_be_visible()
        while read(served, "/api/2.0/usage?status=aborted")["usage"] == []:  # while the engine is still held
            time.sleep(0.05)
    kept = answers(page).locator(".text").text_content() or ""
    assert 0 < len(kept) < 256
    page.get_by_role("button", name="Regenerate the answer").click()
    settled(page, 1)
    expect(answers(page).locator(".numbers")).to_contain_text("256 tokens")


def test_an_edit_makes_a_branch_and_both_are_kept(new_page: NewPage) -> None:
    """After an edit the old conversation is still in the list, also when the page is loaded again, and is exported."""
    page = new_page()
    ask(page, "Old question")
    settled(page, 1)
    page.get_by_role("button", name="Edit message 1").click()
    page.get_by_label("Edit message 1").fill("New question")
    page.get_by_role("button", name="Ask in a new branch").click()
    settled(page, 1)
    page.reload()
    kept = page.get_by_role("complementary", name="Conversations")
    for title in ("New question", "Old question"):
        kept.get_by_role("button", name=title, exact=True).click()
        expect(page.locator(".user .text")).to_have_text(title)
        settled(page, 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["turns"][0]["user"] == "Old question"
    assert exported["turns"][0]["answers"][0][0]["completionTokens"] == 256
    kept.get_by_role("button", name="Delete the conversation Old question").click()
    expect(kept.get_by_role("button", name="Old question", exact=True)).to_have_count(0)


def test_tokens_are_read_with_the_keyboard(new_page: NewPage) -> None:
    """The heat map has each token with its probability, and the arrow keys go through them."""
    page = new_page()
    page.get_by_text("System prompt and token view").click()
    page.get_by_label("Show the probabilities").check()
    ask(page, "Tokens, please")
    settled(page, 1)
    tokens = page.get_by_role("option").and_(page.locator(".token"))
    expect(tokens).to_have_count(256)
    page.get_by_role("listbox", name="Tokens of the answer").press("ArrowRight")
    expect(tokens.nth(1)).to_have_attribute("aria-selected", "true")
    expect(page.locator(".token-facts div").first).to_contain_text("36.8 %")  # a logprob of -1


def test_the_code_is_the_request(new_page: NewPage) -> None:
    """The code has the request's fields, quoted for its language, and never the key."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    page.get_by_label("API key").fill("sk-secret-of-mine")
    page.get_by_role("button", name="Use key").click()
    ask(page, 'It\'s "so" true')
    settled(page, 1)
    page.get_by_role("button", name="Get code").click()
    code = page.get_by_role("region", name="Code")
    expect(code).to_contain_text("It'\\''s \\\"so\\\" true")
    expect(code).to_contain_text("$MLFLOW_LLM_KEY")
    page.get_by_label("Language").select_option("openai")
    expect(code).to_contain_text('api_key=os.environ["MLFLOW_LLM_KEY"]')
    source = code.text_content() or ""
    compile(source, "code", "exec")
    assert "sk-secret" not in source
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_usage_is_what_the_ledger_has(new_page: NewPage, served: Running) -> None:
    """The table's total is the sum of ``/api/2.0/usage``; the CSV file has the rows."""
    page = new_page()
    ask(page, "Count me")
    settled(page, 1)
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("img", name="Tokens by day")).to_be_visible()
    total = page.get_by_role("row", name="Total").get_by_role("cell")

    def summed() -> list[str]:
        rows = read(served, "/api/2.0/usage?by=day,endpoint")["usage"]
        names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        return [f"{sum(row[name] for row in rows):,}" for name in names]

    expect(total).to_have_count(6)
    while (expected := summed()) != total.all_text_contents()[1:5]:  # a row is settled soon after its answer's end
        page.get_by_role("button", name="Refresh").click()
    assert expected[0] != "0"
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert "completion_tokens" in Path(download.value.path()).read_text().splitlines()[0]


def test_a_key_is_made_and_revoked(new_page: NewPage) -> None:
    """Its secret is shown once; names of tenants are inert; a revoked key says so; a bad value shows the reason."""
    page = new_page("operations")
    expect(page.get_by_role("row", name="assistant READY")).to_contain_text("model-1: 100 %")
    form = page.get_by_role("form", name="Create a key")
    form.get_by_label("Tenant").fill(HOSTILE[0])
    form.get_by_label("Name").fill(HOSTILE[1])
    form.get_by_label("Until").fill("never ever")
    form.get_by_role("button", name="Create key").click()
    expect(form.locator(".error")).to_contain_text("expires")
    form.get_by_label("Until").fill("90d")
    form.get_by_role("button", name="Create key").click()
    expect(page.locator(".secret code")).to_have_text(re.compile("^sk-"))
    row = page.get_by_role("row").filter(has_text=HOSTILE[0])
    row.get_by_role("button", name="Revoke").click()
    row.get_by_role("button", name="for ever").click()
    expect(row).to_contain_text("revoked")
    page.get_by_role("button", name="I have kept it").click()
    expect(page.locator(".secret")).to_have_count(0)
    assert page.evaluate("window.pwned") is None


def test_hostile_texts_are_inert(new_page: NewPage, served: Running, complaints: list[str]) -> None:
    """Names of models, adapters and served models, prompts, answers, tokens and errors are text, whatever they hold."""
    hosts: set[str] = set()

    def models(route: Route) -> None:
        cards = [{"id": name} for name in HOSTILE] + [{"id": f"{name}:{name}", "parent": name} for name in HOSTILE]
        route.fulfill(json={"data": cards})

    def endpoints(route: Route) -> None:
        route.fulfill(json={"endpoints": [{"name": name, "endpoint_type": "llm/v1/chat"} for name in HOSTILE]})

    def chat(route: Route, request: Request) -> None:
        entries = [{"token": text, "logprob": -1.0, "top_logprobs": []} for text in HOSTILE]
        logprobs = {"content": entries if request.post_data_json.get("logprobs") else []}
        delta = {"content": "\n".join(HOSTILE), "reasoning_content": "\n".join(HOSTILE)}
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": None}]}]
        chunks.append({"error": {"message": " ".join(HOSTILE)}})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(body=body, content_type="text/event-stream")

    def prepare(page: Page) -> None:
        page.on("request", lambda one: hosts.add(re.sub(r"^(\w+://[^/]*).*", r"\1", one.url)))
        page.route("**/v1/models", models)
        page.route("**/api/2.0/endpoints/", endpoints)
        page.route("**/v1/chat/completions", chat)

    page = new_page(prepare=prepare)
    page.get_by_text("System prompt and token view").click()
    for turn, logprobs in enumerate((False, True)):
        page.get_by_label("Show the probabilities").set_checked(logprobs)
        for text in HOSTILE[:2]:
            ask(page, text)
            expect(page.locator(".answer .error").last).to_contain_text(HOSTILE[0])
            settled(page, 1 + turn * 2 + HOSTILE.index(text))
    expect(page.locator(".user .text").first).to_have_text(HOSTILE[0])
    expect(page.locator(".answer h3").first).to_have_text(HOSTILE[0])
    expect(page.locator(".token").nth(1)).to_have_text(HOSTILE[1])
    page.get_by_text("Reasoning").first.click()
    page.get_by_role("button", name="Get code").first.click()
    expect(page.get_by_role("region", name="Code")).to_contain_text(HOSTILE[0])
    assert page.evaluate("window.pwned") is None
    assert page.locator("#app :is(img, svg, iframe, script, b)").count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0
    assert hosts == {served.url}
    assert complaints == []


def test_hostile_texts_are_inert_in_every_view(new_page: NewPage, complaints: list[str]) -> None:
    """Names, messages, logs, cells of a table and the OpenAPI document are text in the other views too."""
    text = "\n".join(HOSTILE)
    shown = two_models(config_update="UPDATE_FAILED", message=text)
    shown["name"] = HOSTILE[0]
    for entity, name in zip(shown["config"]["served_entities"], HOSTILE, strict=False):
        entity |= {"name": name, "entity_name": text}
    row = dict.fromkeys(("request_id", "key_id", "tenant", "endpoint", "entity", "adapter", "task", "status"), text)
    row |= {"prompt_tokens": 1, "completion_tokens": 1, "started_ms": 1, "ended_ms": 2, "finish_reason": text}
    change = {"id": 1, "at_ms": 1, "actor": text, "via": text, "action": text, "target": text, "before": text}
    operation = {"operationId": "x", "summary": text, "tags": [text], "parameters": [], "responses": {"200": {}}}
    answers_of = {
        "serving-endpoints": {"endpoints": [shown]},
        "requests?limit=30": {"now_ms": 3, "requests": [row]},
        "requests?status=open&limit=200": {"now_ms": 3, "requests": [row]},
        "audit?limit=50": {"audit": [change], "next_cursor": None},
        "openapi.json": {"paths": {HOSTILE[1]: {"get": operation}}, "components": {"schemas": {}}},
    }

    def given(route: Route) -> None:
        route.fulfill(json=next(body for path, body in answers_of.items() if route.request.url.endswith(path)))

    def prepare(page: Page) -> None:
        page.route(lambda url: url.endswith(tuple(answers_of)), given)

    page = new_page("operations", prepare=prepare)
    expect(page.get_by_role("table", name="Endpoints")).to_contain_text(HOSTILE[0])
    for name in ("Recent requests", "Queue by tenant"):
        expect(page.get_by_role("table", name=name)).to_contain_text(HOSTILE[0])
    page.get_by_role("heading", name="Audit log").click()
    expect(page.get_by_role("table", name="Audit log")).to_contain_text(HOSTILE[0])
    page.get_by_role("slider").first.press("ArrowRight")
    page.get_by_role("button", name="Change the traffic").click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[1])
    page.keyboard.press("Escape")
    inert(page)
    page.get_by_role("link", name="API reference").click()
    page.locator(".route summary").first.click()
    expect(page.get_by_role("form", name="Try GET")).to_be_visible()
    inert(page)
    page.get_by_role("link", name="Table").click()
    cells = ",".join('"' + one.replace('"', '""') + '"' for one in HOSTILE)
    page.get_by_label("Choose or drop a CSV file").set_input_files(
        [{"name": HOSTILE[0], "mimeType": "text/csv", "buffer": f"{cells}\n{cells}".encode()}]
    )
    expect(page.get_by_role("cell", name=HOSTILE[1], exact=True)).to_be_visible()
    inert(page)
    assert complaints == []


def inert(page: Page) -> None:
    assert page.evaluate("window.pwned") is None
    assert page.locator("#app :is(img, iframe, script, b)").count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0


@pytest.mark.parametrize("width", [320, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(new_page: NewPage, scheme: str, width: int) -> None:
    """Every view and dialog keeps WCAG 2.2 AA as far as axe-core can tell, and none scrolls sideways."""
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce")
    page.get_by_role("button", name="Add a column").click()
    page.get_by_text("Sampling").first.click()
    page.get_by_text("System prompt and token view").click()
    page.get_by_text("Tools and JSON schema").click()
    page.get_by_label("Show the probabilities").check()
    page.get_by_text("Prompts of MLflow").click()
    page.get_by_label("Chat prompt").check()
    page.get_by_label("Text of message 1 of the prompt").fill("Greet {{name}}.")
    expect(page.get_by_label("name", exact=True)).to_be_visible()
    ask(page, "What does each of you say?")
    settled(page, 2)
    hold_wcag(page)
    page.get_by_role("button", name="Get code").first.click()
    hold_wcag(page)
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Embeddings").click()
    page.get_by_label("Texts, one a line").fill("a cat\na dog\na house")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("table", name="Similarity")).to_be_visible()
    hold_wcag(page)
    page.get_by_role("link", name="Table").click()
    page.get_by_label("Choose or drop a CSV file").set_input_files(
        [{"name": "rows.csv", "mimeType": "text/csv", "buffer": b"name,size\ncat,small\ndog,large"}]
    )
    page.get_by_label("Max tokens").fill("20")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("2 of 2 rows answered")).to_be_visible()
    hold_wcag(page)
    page.get_by_role("link", name="Batches").click()
    expect(page.get_by_role("form", name="Start a batch")).to_be_visible()
    hold_wcag(page)
    page.get_by_role("link", name="My usage").click()
    expect(page.get_by_role("img", name="Tokens by day")).to_be_visible()
    hold_wcag(page)
    page.get_by_role("link", name="API reference").click()
    page.get_by_label("Find a route").fill("get /api/2.0/limits")
    page.locator(".route summary").first.click()
    page.get_by_role("button", name="Send").first.click()
    expect(page.get_by_role("region", name="Answer", exact=True)).to_be_visible()
    hold_wcag(page)
    page.route("**/api/2.0/serving-endpoints", lambda route: route.fulfill(json={"endpoints": [two_models()]}))
    page.get_by_role("link", name="Operations").click()
    for title in ("Limits", "Usage", "Prices", "Audit log"):
        page.get_by_role("heading", name=title).click()
    expect(page.get_by_role("slider")).to_have_count(2)
    page.get_by_label("Tenant", exact=True).fill("research")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator(".secret")).to_be_visible()
    hold_wcag(page)


def test_the_keyboard_alone_is_enough(new_page: NewPage) -> None:
    """Tab reaches every control in the order of the page with a visible focus, and nothing traps it."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
        if reached and page.evaluate("document.activeElement === document.body"):
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", name
        reached.append(name)
    wanted = ["Skip to the content", *(title for _, title in VIEWS), "api-key", "Use key"]
    assert reached[: len(wanted)] == wanted
    assert [one for one in reached if one in ("model-0", "Add a column", "message")] == [
        "model-0",
        "Add a column",
        "message",
    ]
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("By keyboard")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("alone")
    page.keyboard.press("Enter")
    settled(page, 1)
    expect(page.locator(".user .text")).to_have_text("By keyboard\nalone", use_inner_text=True)


def test_live_regions_do_not_speak_each_token(new_page: NewPage) -> None:
    """The status changes at the beginning and the end of an answer, and no live region contains its text."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    page.evaluate(
        """() => {
          window.said = [];
          const region = document.querySelector('[role=status]');
          new MutationObserver(() => said.push(region.textContent)).observe(
            region, {subtree: true, childList: true, characterData: true});
        }"""
    )
    ask(page, "Hello")
    settled(page, 1)
    complete = "The answer of assistant is complete: 256 tokens."
    expect(page.get_by_role("status")).to_have_text(complete)
    assert page.evaluate("said") == ["The answer has begun.", complete]
    assert page.locator("[aria-live], [role=log], [role=alert]").count() == 0


def test_a_server_with_keys_asks_for_one(new_page: NewPage, tmp_path: Path) -> None:
    """Without a key the page says so; with one it chats, and a key without ``manage`` sees its usage but no keys; the
    key is in no storage that outlives the tab."""
    bundle = write_instant_model(tmp_path / "model", vocab_size=94)
    url = f"sqlite:///{tmp_path}/page.db"
    store = Store(url, make=True)
    secret, _ = Keys(store).create("research", scopes=("invoke",))
    store.close()
    nowhere = "import os; [os.environ.pop(f'MLFLOW_{kind}_URI', None) for kind in ('TRACKING', 'REGISTRY')]"
    with running(bundle, database=url, require_keys=True, in_worker=nowhere) as server:
        page = new_page(at=server.url)
        expect(page.get_by_text("This server asks for a key.")).to_be_visible()
        page.get_by_label("API key").fill("sk-wrong")
        page.get_by_role("button", name="Use key").click()
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        page.get_by_label("API key").fill(secret)
        page.get_by_role("button", name="Use key").click()
        ask(page, "Hello")
        settled(page, 1)
        page.get_by_text("Prompts of MLflow").click()
        expect(page.locator(".prompts .error")).to_contain_text("no prompt registry")
        page.get_by_role("link", name="Batches").click()
        expect(page.get_by_text("There are no batches yet.")).to_be_visible()
        page.get_by_role("link", name="My usage").click()
        expect(page.get_by_role("heading", name="My usage")).to_be_visible()
        expect(page.locator(".error")).to_have_count(0)
        page.get_by_role("link", name="Operations").click()
        expect(page.locator(".error").first).to_contain_text("manage")
        page.get_by_role("link", name="API reference").click()
        page.get_by_label("Find a route").fill("get /v1/models openai")
        page.locator(".route summary").first.click()
        page.get_by_role("button", name="Send").first.click()
        expect(page.get_by_role("form", name="Try GET /v1/models")).to_contain_text("200 OK")  # with the tab's key
        assert secret not in page.evaluate("JSON.stringify({...localStorage})")
        page.get_by_role("button", name="Forget key").click()
        assert secret not in page.evaluate("JSON.stringify({...sessionStorage})")


def test_it_works_behind_a_path_prefix(new_page: NewPage, served: Running) -> None:
    """A proxy that adds a prefix needs no setting: the page's requests stay below the prefix."""
    paths: set[str] = set()

    def proxy(route: Route, request: Request) -> None:
        path = re.sub(r"^\w+://[^/]*", "", request.url)
        paths.add(path)
        answer = route.fetch(url=f"{served.url}{path.removeprefix('/team/llm')}")
        route.fulfill(response=answer)

    page = new_page(at=f"{served.url}/team/llm", prepare=lambda page: page.route("**/*", proxy))
    ask(page, "Hello")
    settled(page, 1)
    expect(answers(page).locator(".numbers")).to_contain_text("256 tokens")
    assert {"/team/llm/", "/team/llm/page/app.js", "/team/llm/v1/models"} <= paths
    assert all(path.startswith("/team/llm/") for path in paths)
