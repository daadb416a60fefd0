"""The page in a real browser, flow by flow: what the playground, the table, the operator and the reference can do."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from server_calls import until
from serving_process import Running
from shown_endpoint import two_models

from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.interface.payload_log import PayloadLog

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from axe import hold_wcag
from gated_core import steps_more
from playground import answers, ask, call, settled
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

NewPage = Callable[..., "Page"]
LANGUAGES = ("curl", "openai", "anthropic", "databricks", "mlflow")


def bodies_of(page: Page, path: str) -> list[dict[str, Any]]:
    """Return a list to which the bodies posted to ``path`` are added."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda one: one.method == "POST" and one.url.endswith(path) and found.append(one.post_data_json))
    return found


def sampling(page: Page, **values: str) -> None:
    """Set fields of the first column by their labels."""
    column = page.get_by_role("group", name="Column 1")
    column.get_by_text("Sampling").click()
    for label, value in values.items():
        column.get_by_label(label.replace("_", " "), exact=False).fill(value)


def stream_of(*deltas: dict[str, Any], finish: str = "stop") -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_completions_go_on_a_text(new_page: NewPage) -> None:
    """The task "Text completion" posts the prompt alone, without the turns before it, and shows the text."""
    page = new_page()
    page.get_by_label("Text completion").check()
    sampling(page, Max_tokens="5")
    sent = bodies_of(page, "/v1/completions")
    for count, text in enumerate(("Once upon", "A time"), 1):
        ask(page, text, "Prompt")
        settled(page, count)
    assert [body["prompt"] for body in sent] == ["Once upon", "A time"]
    expect(answers(page).nth(1).locator(".numbers")).to_contain_text("5 tokens")
    assert len(answers(page).nth(1).locator(".text").text_content() or "") == 5


def test_several_answers_and_the_one_to_go_on_with(new_page: NewPage) -> None:
    """With n = 3 an answer has three texts; the next request has the chosen one as the assistant's message."""
    sent: list[dict[str, Any]] = []

    def chat(route: Route, request: Request) -> None:  # an endpoint that is paid by the token has no n
        sent.append(request.post_data_json)
        pieces = [
            {"index": n, "delta": {"content": f"text {n + 1}"}} for n in range(request.post_data_json.get("n", 1))
        ]
        body = "".join(f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces)
        route.fulfill(body=f"{body}data: [DONE]\n\n", content_type="text/event-stream")

    page = new_page(prepare=lambda page: page.route("**/v1/chat/completions", chat))
    sampling(page, Answers="3")
    ask(page, "Which?")
    settled(page, 1)
    assert answers(page).locator(".choice .text").all_text_contents() == ["text 1", "text 2", "text 3"]
    page.get_by_label("Go on with answer 2").check()
    ask(page, "And then?")
    settled(page, 2)
    assert sent[0]["n"] == 3
    assert sent[1]["messages"][1] == {"role": "assistant", "content": "text 2"}


def test_regenerate_with_the_same_or_another_seed(new_page: NewPage) -> None:
    """Regenerating repeats the seed that was drawn and gives the same text; with another seed it gives another one."""
    page = new_page()
    sampling(page, Max_tokens="20", Temperature="1")
    sent = bodies_of(page, "/v1/chat/completions")
    ask(page, "Draw")
    settled(page, 1)
    text = answers(page).locator(".text")
    first = text.text_content()
    page.get_by_role("button", name="Regenerate the answer").click()
    expect(page.get_by_role("status")).to_contain_text("complete")
    settled(page, 1)
    assert text.text_content() == first
    page.get_by_role("button", name="Regenerate with another seed").click()
    expect(text).not_to_have_text(str(first))
    settled(page, 1)
    seeds = [body["seed"] for body in sent]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_branch_keeps_the_conversation(new_page: NewPage) -> None:
    """A branch has the turns until there; the whole conversation stays in the list."""
    page = new_page()
    sampling(page, Max_tokens="4")
    for count, text in enumerate(("One", "Two"), 1):
        ask(page, text)
        settled(page, count)
    page.get_by_role("button", name="Branch after message 1").click()
    settled(page, 1)
    ask(page, "Three")
    settled(page, 2)
    kept = page.get_by_role("complementary", name="Conversations")
    expect(kept.get_by_role("button", name="One", exact=True)).to_have_count(2)


def test_images_are_sent_as_data_and_refused_in_words(new_page: NewPage, complaints: list[str]) -> None:
    """A chosen image becomes a data URL in the message; a text model's refusal is shown in the server's words."""
    page = new_page()
    made = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(made, "PNG")
    sent = bodies_of(page, "/v1/chat/completions")
    chooser = page.get_by_label("Add images")
    chooser.set_input_files([{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no"}])
    expect(page.locator(".composer .error")).to_have_text("notes.txt is not an image.")
    chooser.set_input_files([{"name": "red.png", "mimeType": "image/png", "buffer": made.getvalue()}])
    expect(page.get_by_role("img", name="Image 1", exact=True)).to_be_visible()
    drop = """(box) => { const data = new DataTransfer();
      data.items.add(new File([new Uint8Array([71])], 'b.gif', {type: 'image/gif'}));
      box.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); }"""
    page.locator("#message").evaluate(drop)
    page.get_by_role("button", name="Remove image 2").click()
    ask(page, "What colour?")
    settled(page, 1)
    image, text = sent[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What colour?"}
    expect(answers(page).locator(".error")).to_contain_text("image")
    assert [one for one in complaints if "400" not in one] == []


def test_tools_by_hand(new_page: NewPage) -> None:
    """A call and its arguments are shown, its result is entered, and the conversation goes on with both."""
    calls = [{"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":'}}]
    rest = [{"index": 0, "function": {"arguments": ' "Paris"}'}}]
    streams = [
        stream_of({"tool_calls": calls}, {"tool_calls": rest}, finish="tool_calls"),
        stream_of({"content": "It rains."}),
    ]
    sent: list[dict[str, Any]] = []

    def chat(route: Route, request: Request) -> None:
        sent.append(request.post_data_json)
        route.fulfill(body=streams[len(sent) - 1], content_type="text/event-stream")

    page = new_page(prepare=lambda page: page.route("**/v1/chat/completions", chat))
    page.get_by_text("Tools and JSON schema").click()
    page.locator("#tools").fill("[not json")
    page.locator("#tools").blur()
    expect(page.locator("#tools-error")).to_contain_text("not JSON")
    page.locator("#tools").fill("")
    page.locator("#tools").blur()
    page.get_by_role("button", name="Example: Tools").click()
    ask(page, "The weather?")
    expect(page.get_by_role("region", name="Arguments of call 1")).to_have_text('{\n  "city": "Paris"\n}')
    page.get_by_label("Result of get_weather").fill('{"sky": "rain"}')
    page.get_by_role("button", name="Send results").press("Enter")
    settled(page, 2)
    expect(answers(page).nth(1).locator(".text")).to_have_text("It rains.")
    assert sent[0]["tools"][0]["function"]["name"] == "get_weather"
    called, result = sent[1]["messages"][-2:]
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "rain"}'}
    page.get_by_role("button", name="Get code").last.click()
    page.get_by_label("Language").select_option("anthropic")
    expect(page.get_by_role("region", name="Code")).to_contain_text('"tool_use_id": "call_1"')


def test_a_json_schema_is_sent(new_page: NewPage) -> None:
    """The schema is the request's ``response_format``; where an engine has no grammars, its words are shown."""
    page = new_page()
    sent = bodies_of(page, "/v1/chat/completions")
    page.get_by_text("Tools and JSON schema").click()
    page.get_by_role("button", name="Example: JSON schema").click()
    ask(page, "A city")
    settled(page, 1)
    schema = sent[0]["response_format"]["json_schema"]
    assert (schema["strict"], schema["schema"]["required"]) == (True, ["city", "population"])
    expect(answers(page).locator(".error")).to_contain_text("response_format")


def test_the_cost_is_the_ledgers(new_page: NewPage, served: Running) -> None:
    """The cost beside an answer grows with it, is what the ledger books, and the conversation shows the sum."""
    call(served, "PUT", "/api/2.0/prices", {"entity": "*", "input": "2", "output": "300"})
    try:
        # the worker remembers prices for a moment
        until(lambda: call(served, "GET", "/api/2.0/account")["prices"][0]["output"] == "300.00")
        page = new_page()
        sampling(page, Max_tokens="50")
        cost = answers(page).last.locator(".numbers div").filter(has_text="Cost").locator("dd")
        with steps_more(served.model_dir, 20):
            ask(page, "Dear")
            expect(cost).to_be_visible()
            expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
            so_far = float(cost.text_content() or "")
        settled(page, 1)
        assert 0 < so_far < float(cost.text_content() or "")
        ask(page, "Dearer")
        settled(page, 2)
        shown = cost.text_content()
        total = page.locator(".total-cost strong")
        while (row := call(served, "GET", "/api/2.0/requests?limit=1")["requests"][0])["status"] == "open":
            page.wait_for_timeout(50)
        booked = call(served, "GET", "/api/2.0/usage?limit=10000")["usage"]
        costs = {one["request_id"]: one["cost"] for one in booked}
        assert float(str(shown)) == float(costs[row["request_id"]]) > 0
        expect(total).not_to_have_text(str(shown))
    finally:
        call(served, "DELETE", "/api/2.0/prices?entity=*")


def test_each_snippet_runs(new_page: NewPage, served: Running, tmp_path: Path) -> None:
    """The code for every client is run as it is shown, and prints the answer of the server."""
    pytest.importorskip("anthropic")
    page = new_page()
    sampling(page, Max_tokens="7", Stop="~~~~")
    ask(page, 'It\'s "so" true')
    settled(page, 1)
    text = answers(page).locator(".text").text_content() or ""
    page.get_by_role("button", name="Get code").click()
    code = {}
    for language in LANGUAGES:
        page.get_by_label("Language").select_option(language)
        code[language] = page.get_by_role("region", name="Code").text_content() or ""
    run = subprocess.run(["bash", "-c", code["curl"]], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == text
    for language in LANGUAGES[1:]:
        (tmp_path / f"{language}.py").write_text(code[language])
    driver = (
        "import sys, pathlib\nfor name in sys.argv[1:]:\n exec(pathlib.Path(name).read_text(), {}); print('\\n--8<--')"
    )
    words = [sys.executable, "-c", driver, *(str(tmp_path / f"{one}.py") for one in LANGUAGES[1:])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = dict(zip(LANGUAGES[1:], done.stdout.split("\n--8<--\n"), strict=False))
    assert printed["openai"] == text
    assert len(printed["anthropic"]) == 7  # the API has no seed: another text of the same length
    for language in ("databricks", "mlflow"):
        assert repr(text) in printed[language]


def test_conversations_are_imported(new_page: NewPage, tmp_path: Path) -> None:
    """An exported conversation is opened again as one of its own; what is none is refused in words."""
    page = new_page()
    sampling(page, Max_tokens="4")
    ask(page, "Keep me")
    settled(page, 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON").click()
    exported = Path(download.value.path())
    other = new_page()
    for name, content, words in (("a.json", b"{", "not JSON"), ("b.json", b"[1]", "no conversation")):
        other.get_by_label("Import JSON").set_input_files([{"name": name, "mimeType": "", "buffer": content}])
        expect(other.locator(".conversations .error")).to_contain_text(words)
    other.get_by_label("Import JSON").set_input_files(
        [{"name": "c.json", "mimeType": "", "buffer": exported.read_bytes()}]
    )
    expect(other.locator(".user .text")).to_have_text("Keep me")
    settled(other, 1)
    ask(other, "Go on")
    settled(other, 2)


def test_a_long_transcript_has_a_bounded_document(new_page: NewPage) -> None:
    """Only what is near the window has nodes, of 400 turns and of 100,000 tokens with their probabilities."""
    tokens = [{"text": "word ", "logprob": -1.0, "top": []}] * 100_000
    answer = {"model": "assistant", "state": "done", "choices": [{"text": "A few words of an answer. " * 8}]}
    long = {**answer, "choices": [{"text": "word " * 100_000, "tokens": tokens}]}
    turns = [{"user": f"Question {n}", "answers": [[answer]]} for n in range(400)]
    turns.append({"user": "All of it", "answers": [[long]]})
    conversation = json.dumps({"turns": turns, "columns": [{"model": "assistant"}]}).encode()
    page = new_page()
    page.get_by_label("Import JSON").set_input_files([{"name": "long.json", "mimeType": "", "buffer": conversation}])
    expect(page.locator(".turn")).to_have_count(401)
    count = "document.querySelectorAll('*').length"
    expect(page.get_by_role("heading", name="Message 401")).to_have_count(1)
    assert page.evaluate(count) < 8000
    page.locator(".turn").nth(200).scroll_into_view_if_needed()
    expect(page.get_by_role("heading", name="Message 201")).to_have_count(1)
    assert page.evaluate(count) < 8000
    page.get_by_role("listbox").press("End")  # the last token is in the document for who reads it by keyboard
    expect(page.locator("[role=option][aria-selected=true]")).to_have_count(1)
    assert page.evaluate(count) < 8000


def test_right_to_left_text(new_page: NewPage) -> None:
    """A message in Arabic runs from right to left inside a page that does not."""
    page = new_page()
    sampling(page, Max_tokens="3")
    ask(page, "مرحبا بالعالم")
    settled(page, 1)
    assert page.locator(".user .text").evaluate("one => getComputedStyle(one).direction") == "rtl"
    assert page.evaluate("getComputedStyle(document.body).direction") == "ltr"


def test_the_similarity_map(new_page: NewPage) -> None:
    """Each pair of texts has its cosine; a text and its copy have 1."""
    page = new_page("embeddings")
    page.get_by_label("Texts, one a line").fill("a cat")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".error")).to_contain_text("two texts or more")
    page.get_by_label("Texts, one a line").fill("a cat\na dog\na cat")
    page.get_by_role("button", name="Compare").press("Enter")
    cells = page.get_by_role("table", name="Similarity").get_by_role("cell")
    expect(cells).to_have_count(9)
    values = cells.all_text_contents()
    assert [values[place] for place in (0, 2, 4, 8)] == ["1.000"] * 4
    assert values[1] == values[3] != "1.000"


def test_a_table_run_stops_and_goes_on(new_page: NewPage) -> None:
    """Rows become prompts; a stopped run keeps its answers and goes on with the others; the file has each row."""
    page = new_page("table")
    held: list[Route] = []
    names = [f'n{number}, "q"' for number in range(12)]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    lines = "name,size\r\n" + "".join(f"{name},{place}\r\n" for place, name in enumerate(quoted))
    page.get_by_label("Choose or drop a CSV file").set_input_files(
        [{"name": "rows.csv", "mimeType": "text/csv", "buffer": lines.encode()}]
    )
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Prompt of a row").fill("{nothing}")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".error")).to_contain_text("no such column; it has name, size")
    page.get_by_label("Prompt of a row").fill("Describe {name} of size {size}")
    sent = bodies_of(page, "/v1/chat/completions")

    def hold(route: Route, request: Request) -> None:
        if request.post_data_json["messages"][0]["content"].endswith("size 5"):
            held.append(route)  # this row never ends
        else:
            route.continue_()

    page.route("**/v1/chat/completions", hold)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("11 of 12 rows answered")).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("status")).to_have_text("The run is stopped.")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Go on").press("Enter")
    expect(page.get_by_text("12 of 12 rows answered")).to_be_visible()
    assert len(sent) == 13
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == names
    assert all(row["completion_tokens"] == "4" and row["answer"] for row in rows)


def test_traffic_is_changed_after_a_confirmation(new_page: NewPage) -> None:
    """Arrow keys, a number and dragging set the shares; the update changes nothing else, and the API accepts it."""
    sent: list[dict[str, Any]] = []

    def update(route: Route, request: Request) -> None:
        if request.method == "PUT":
            sent.append(request.post_data_json)
        route.fulfill(json=two_models() if request.method == "PUT" else {"endpoints": [two_models()]})

    page = new_page("operations", prepare=lambda page: page.route("**/serving-endpoints*", update))
    page.route("**/serving-endpoints/*/config", update)
    slider = page.get_by_role("slider", name="model-2")
    change = page.get_by_role("button", name="Change the traffic")
    expect(change).to_be_disabled()
    slider.press("ArrowRight")
    expect(page.get_by_label("Percent of model-1")).to_have_value("89")
    page.get_by_label("Percent of model-2").fill("35")
    page.get_by_label("Percent of model-2").press("Tab")
    expect(slider).to_have_value("35")
    change.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("model-1: 90 % → 65 %")
    page.keyboard.press("Escape")
    assert sent == []
    box = slider.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.35, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] + 20, y)
    page.mouse.up()
    expect(page.get_by_label("Percent of model-1")).to_have_value("0")
    change.click()
    page.get_by_role("button", name="Change it").click()
    expect(page.get_by_role("status")).to_have_text("The traffic of assistant is being changed.")
    config = config_body(sent[0], "")
    assert [(route.served_model_name, route.traffic_percentage) for route in config.routes] == [
        ("model-1", 0),
        ("model-2", 100),
    ]
    assert config.sticky


def test_a_rollout_shows_its_progress_and_why_it_failed(new_page: NewPage) -> None:
    """A pending version is shown with the time it has taken, a failed one with the reason and the engine's log."""
    failed = two_models(config_update="UPDATE_FAILED", message="<b>model-2</b>: no such file")
    rolling = {**two_models(config_update="IN_PROGRESS"), "name": "other"}
    rolling["pending_config"] = rolling["config"] | {"config_version": 4, "start_time": 1}

    def shown(route: Route) -> None:
        if route.request.url.endswith("build-logs"):
            route.fulfill(json={"logs": "<i>killed</i> at layer 3"})
        else:
            route.fulfill(json={"endpoints": [failed, rolling]})

    page = new_page("operations", prepare=lambda page: page.route("**/serving-endpoints*", shown))
    page.route("**/build-logs", shown)
    expect(page.get_by_role("row", name="assistant READY").locator(".error")).to_have_text(
        "<b>model-2</b>: no such file"
    )
    expect(page.get_by_role("row", name="other READY")).to_contain_text("Loading version 4, for ")
    page.get_by_role("row", name="assistant READY").get_by_role("button", name="start of model-2").click()
    expect(page.get_by_role("region", name="Log")).to_have_text("<i>killed</i> at layer 3")


def test_operations_show_engines_requests_and_changes(new_page: NewPage) -> None:
    """Replicas and KV use come from the metrics, the newest request from the ledger, changes from the audit log."""
    page = new_page()
    sampling(page, Max_tokens="9")
    page.get_by_label("Model", exact=True).select_option("assistant:pirate")
    ask(page, "Count me")
    settled(page, 1)
    page.get_by_role("link", name="Operations").click()
    engine = page.get_by_role("table", name="Engines").get_by_role("row").nth(1).get_by_role("cell")
    expect(engine.nth(0)).to_have_text("model-1")
    expect(engine.nth(2)).to_have_text("1")
    request = page.get_by_role("table", name="Recent requests").get_by_role("row").nth(1)
    expect(request).to_contain_text("assistant:pirate")
    while "ok" not in (request.text_content() or ""):
        page.get_by_role("button", name="Refresh", exact=True).click()
    expect(request.get_by_role("cell").nth(6)).to_have_text("9")
    page.get_by_role("heading", name="Limits").click()
    form = page.get_by_role("form", name="Set a limit")
    form.get_by_label("Scope").select_option("tenant")
    form.get_by_label("Of (").fill("default")
    form.get_by_label("Kind").select_option("otpm")
    form.get_by_label("Value").fill("-1")
    form.get_by_role("button").click()
    expect(form.locator(".error")).to_contain_text("otpm")
    form.get_by_label("Value").fill("1000000")
    form.get_by_label("Value").press("Enter")
    expect(page.get_by_role("table", name="Limits")).to_contain_text("1000000")
    page.get_by_role("heading", name="Usage").click()
    page.get_by_label("By day and").select_option("adapter")
    expect(page.get_by_role("table", name="Usage by day")).to_contain_text("pirate")
    page.get_by_role("heading", name="Prices").click()
    price = page.get_by_role("form", name="Set a price")
    for label, value in (("Served model", "none"), ("Prompt tokens", "1.5"), ("Answer tokens", "2")):
        price.get_by_label(label).fill(value)
    price.get_by_role("button").click()
    expect(price.locator(".note")).to_contain_text("no endpoint serves 'none'")
    page.get_by_role("heading", name="Audit log").click()
    expect(page.get_by_role("table", name="Audit log")).to_contain_text("limit.set")
    page.get_by_role("link", name="My usage").click()
    left = page.get_by_role("table", name="What is left").get_by_role("row").filter(has_text="output tokens a minute")
    expect(left).to_contain_text("the tenant")
    page.get_by_role("link", name="Operations").click()
    page.get_by_role("heading", name="Limits").click()
    page.get_by_role("button", name="Remove the limit otpm of default").click()
    expect(page.get_by_text("No limits are set.")).to_be_visible()


def test_operations_are_live(new_page: NewPage, served: Running) -> None:
    """A request that another client makes appears by itself, and so does its end."""
    page = new_page("operations")
    newest = page.get_by_role("table", name="Recent requests").get_by_role("row").nth(1)
    body = {"model": "assistant:pirate", "messages": [{"role": "user", "content": "Elsewhere"}], "max_tokens": 23}
    call(served, "POST", "/v1/chat/completions", body)
    expect(newest).to_contain_text("assistant:pirate")
    expect(newest.get_by_role("cell").nth(6)).to_have_text("23")
    expect(newest).to_contain_text("ok (length)")


def test_a_route_of_the_reference_is_tried(new_page: NewPage) -> None:
    """A route is found by a word, its example has a served model, and its answer is shown; a change is confirmed."""
    page = new_page("reference")
    page.get_by_label("Find a route").fill("post v1 chat openai")
    page.get_by_text("/v1/chat/completions", exact=False).first.click()
    form = page.get_by_role("form", name="Try POST /v1/chat/completions")
    expect(form.get_by_label("Body")).to_have_value(re.compile('"model": "assistant"'))
    form.get_by_role("button", name="Send").press("Enter")
    expect(form.get_by_role("region", name="Answer")).to_contain_text('"finish_reason"')
    expect(form).to_contain_text("200 OK")
    page.get_by_label("Find a route").fill("delete keys")
    page.get_by_text("/api/2.0/keys/{name}").click()
    form = page.get_by_role("form", name="Try DELETE /api/2.0/keys/{name}")
    form.get_by_label("name").fill("key_none")
    form.get_by_role("button", name="Send").click()
    form.get_by_role("button", name="Send and change the server").click()
    expect(form).to_contain_text("404")


def test_every_route_of_the_reference_can_be_tried(new_page: NewPage, served: Running, complaints: list[str]) -> None:
    """Each route of the OpenAPI document has its fields and a form, and all of them together keep WCAG."""
    paths = call(served, "GET", "/openapi.json")["paths"]
    count = sum(len(operations) for operations in paths.values())
    page = new_page("reference")
    routes = page.locator(".route > summary")
    expect(routes).to_have_count(count)
    for place in range(count):
        routes.nth(place).click()
    expect(page.get_by_role("form", name=re.compile("^Try "))).to_have_count(count)
    hold_wcag(page)
    assert complaints == []


def test_three_clicks_answer_what_an_adapter_does(new_page: NewPage, served: Running) -> None:
    """From ``/``, three clicks show what an adapter says differently, how fast, and what it cost."""
    call(served, "PUT", "/api/2.0/prices", {"entity": "*", "input": "2", "output": "300"})
    try:
        # the worker remembers prices for a moment
        until(lambda: call(served, "GET", "/api/2.0/account")["prices"][0]["output"] == "300.00")
        page = new_page("")
        page.evaluate("window.clicks = 0; addEventListener('click', () => window.clicks++, true)")
        page.get_by_role("button", name="Add a column").click()
        page.get_by_label("Message", exact=True).click()
        page.keyboard.type("Who are you?")
        page.get_by_role("button", name="Send", exact=True).click()
        settled(page, 2)
        assert page.evaluate("window.clicks") == 3
        assert answers(page).get_by_role("heading").all_text_contents() == ["assistant", "assistant:pirate"]
        base, adapter = answers(page).locator(".text").all_text_contents()
        assert base != adapter
        for number in range(2):
            numbers = answers(page).nth(number).locator(".numbers")
            for name in ("First token", "Speed", "Cost"):
                expect(numbers.locator("div").filter(has_text=name)).to_be_visible()
    finally:
        call(served, "DELETE", "/api/2.0/prices?entity=*")


def test_who_waits_is_shown_by_tenant(new_page: NewPage, served: Running) -> None:
    """While the engine is held, a request without a token stands in its tenant's row; afterwards the queue is empty."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    with steps_more(served.model_dir, 0):
        ask(page, "Wait")
        page.get_by_role("link", name="Operations").click()
        row = page.get_by_role("table", name="Queue by tenant").get_by_role("row").nth(1).get_by_role("cell")
        expect(row.nth(0)).to_have_text("1")
        expect(row.nth(1)).to_have_text("1")
    expect(page.get_by_text("No request is under way.")).to_be_visible()


def test_reduced_motion_is_honoured(new_page: NewPage, served: Running) -> None:
    """The cursor of an answer under way blinks, except where the user asks for less motion."""
    page = new_page()
    expect(page.get_by_label("Model", exact=True)).to_have_value("assistant")
    with steps_more(served.model_dir, 0):
        ask(page, "Wait")
        cursor = page.locator(".cursor")
        expect(cursor).to_have_css("animation-name", "blink")
        page.emulate_media(reduced_motion="reduce")
        expect(cursor).to_have_css("animation-name", "none")
    settled(page, 1)


def test_recent_requests_show_logged_texts(new_page: NewPage, served: Running) -> None:
    """With the payload log on, a request's button shows what was asked and answered, as text; the texts of one that
    was deleted have no button any more."""
    body = {"model": "assistant", "messages": [{"role": "user", "content": "Kept <b>with</b> care"}], "max_tokens": 5}
    call(served, "POST", "/v1/chat/completions", body)
    page = new_page("operations")
    newest = page.get_by_role("region", name="Recent requests").get_by_role("row").nth(1)
    button = newest.get_by_role("button", name=re.compile("^Text of request"))
    refresh = page.get_by_role("button", name="Refresh")
    until(lambda: refresh.click() or button.count() == 1)
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("region", name="Request")).to_contain_text("Kept <b>with</b> care")
    expect(dialog.get_by_role("region", name="Answer")).to_contain_text('"finish_reason": "length"')
    dialog.get_by_role("button", name="Close").click()
    assert call(served, "DELETE", "/api/2.0/serving-endpoints/assistant/payloads")["deleted"] >= 1
    until(lambda: refresh.click() or button.count() == 0)


def test_the_payload_log_is_switched_with_a_confirmation(new_page: NewPage) -> None:
    """The button sends the config with the log's settings, or without them, and nothing before the confirmation."""
    sent: list[dict[str, Any]] = []
    shown = two_models()

    def answer(route: Route, request: Request) -> None:
        if request.method == "PUT":
            sent.append(request.post_data_json)
        route.fulfill(json=shown if request.method == "PUT" else {"endpoints": [shown]})

    page = new_page("operations", prepare=lambda page: page.route("**/serving-endpoints*", answer))
    page.route("**/serving-endpoints/*/config", answer)
    row = page.get_by_role("region", name="Endpoints").get_by_role("row").nth(1)
    page.get_by_role("button", name="Turn the payload log of assistant on").press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("of every tenant")
    page.keyboard.press("Escape")
    assert sent == []
    page.get_by_role("button", name="Turn the payload log of assistant on").click()
    page.get_by_role("button", name="Turn it on").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert config_body(sent[0], "").payload_log == PayloadLog()
    shown["config"]["payload_log"] = {"sample": 0.25, "max_rows": 5, "max_bytes": 2**20, "max_age": 60, "redact": []}
    page.get_by_role("button", name="Refresh").click()
    expect(row).to_contain_text("on, 25 % of the requests")
    page.get_by_role("button", name="Turn the payload log of assistant off").click()
    page.get_by_role("button", name="Turn it off").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert config_body(sent[1], "").payload_log is None
