"""The page's batches: started from a file, watched, cancelled and downloaded, and their files deleted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gated_core import steps_up_to
from instant_model import write_instant_model
from server_calls import until
from serving_process import Running, running

from mlflow_llm.serving.batches.lines import ENDPOINTS
from mlflow_llm.serving.batches.objects import ENDED

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip)")
from axe import hold_wcag
from by_keyboard import press, tab_to, write
from playground import call, read
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import FilePayload, Locator, Page, Request, Route

NewPage = Callable[..., "Page"]
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
HOSTILE = "<img src=x onerror=window.pwned=1>"


@pytest.fixture(autouse=True)
def no_files(served: Running) -> Iterator[None]:
    """Wait for the end of all batches, and leave no file behind."""
    yield
    until(lambda: all(one["status"] in ENDED for one in read(served, "/v1/batches?limit=100")["data"]))
    for one in files(served):
        call(served, "DELETE", f"/v1/files/{one['id']}")


def files(served: Running) -> list[dict[str, Any]]:
    found = read(served, "/v1/files")["data"]
    assert isinstance(found, list)
    return found


def jsonl(*bodies: dict[str, Any], url: str = "/v1/chat/completions", name: str = "in.jsonl") -> list[FilePayload]:
    """Return a file of requests, as a file chooser takes it."""
    lines = [{"custom_id": f"row-{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    return [{"name": name, "mimeType": "application/jsonl", "buffer": content}]


def form_of(page: Page) -> Locator:
    return page.get_by_role("form", name="Start a batch")


def choose(page: Page, file: list[FilePayload]) -> None:
    form_of(page).get_by_label("JSONL file").set_input_files(file)


def submit(page: Page) -> str:
    """Start the batch of the form and return its id."""
    with page.expect_response(lambda one: one.url.endswith("/v1/batches") and one.request.method == "POST") as answer:
        form_of(page).get_by_role("button", name="Start the batch").click()
    found = answer.value.json()["id"]
    assert isinstance(found, str)
    return found


def row_of(page: Page, text: str, table: str = "Batches") -> Locator:
    return page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def dialog_of(page: Page, button: Locator) -> Locator:
    """Return the dialog that a button opens, once it is there."""
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog


def download(page: Page, button: Locator) -> tuple[str, str]:
    """Return the name and the text of the file that a button gives."""
    with page.expect_download() as given:
        button.click()
    return given.value.suggested_filename, Path(given.value.path()).read_text()


def test_a_batch_runs_and_is_downloaded(new_page: NewPage, served: Running, complaints: list[str]) -> None:
    """A batch is started from a file, its counts change without a reload, its end is said, both of its files have what
    the server has, and a file is deleted after a confirmation."""
    page = new_page("batches")
    expect(page.get_by_text("There are no files yet.")).to_be_visible()
    choose(page, jsonl(CHAT, CHAT, CHAT | {"temperature": 9}))
    form_of(page).get_by_label("Metadata").fill(f"team = search=1\n\nnote={HOSTILE}")
    with steps_up_to(served.model_dir, 0):
        batch_id = submit(page)
        row = row_of(page, batch_id)
        expect(row).to_contain_text("in_progress")
        expect(row).to_contain_text("0 done, 1 failed, 3 in total")
        expect(page.get_by_role("progressbar", name=f"Progress of {batch_id}")).to_have_attribute("max", "3")
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("team: search=1")
    expect(row).to_contain_text(f"note: {HOSTILE}")
    said = f"The batch {batch_id} is completed: 2 done, 1 failed, 3 in total."
    expect(page.get_by_role("status")).to_have_text(said)
    name, output = download(page, row.get_by_role("button", name="Download output"))
    assert name == f"{batch_id}_output.jsonl"
    assert [json.loads(one)["custom_id"] for one in output.splitlines()] == ["row-0", "row-1"]
    name, errors = download(page, row.get_by_role("button", name="Download errors"))
    assert name == f"{batch_id}_error.jsonl"
    assert "temperature" in errors
    table = page.get_by_role("table", name="Files")
    expect(table.get_by_role("row")).to_have_count(4)  # with the head
    _, again = download(page, table.get_by_role("button", name=f"Download {batch_id}_output.jsonl"))
    assert again == output
    delete = table.get_by_role("button", name="Delete in.jsonl")
    dialog_of(page, delete).get_by_role("button", name="Keep it").click()
    expect(delete).to_be_focused()
    assert len(files(served)) == 3
    dialog_of(page, delete).get_by_role("button", name="Delete the file").click()
    expect(delete).to_have_count(0)
    expect(page.get_by_role("heading", name="Files")).to_be_focused()
    expect(page.get_by_role("status")).to_have_text("The file in.jsonl is deleted.")
    assert {one["purpose"] for one in files(served)} == {"batch_output"}
    assert read(served, f"/v1/batches/{batch_id}")["metadata"] == {"team": "search=1", "note": HOSTILE}
    assert page.evaluate("window.pwned") is None
    assert complaints == []


def test_a_batch_is_cancelled(new_page: NewPage, served: Running) -> None:
    """Only the confirmation cancels a batch, its input cannot be deleted before, and a second tab is refused in the
    server's words."""
    page, other = new_page("batches"), new_page("batches")
    choose(page, jsonl(CHAT, CHAT))
    with steps_up_to(served.model_dir, 0):
        batch_id = submit(page)
        row = row_of(page, batch_id)
        other.get_by_role("button", name="Refresh").click()
        late = dialog_of(other, other.get_by_role("button", name=f"Cancel {batch_id}"))
        delete = dialog_of(page, page.get_by_role("button", name="Delete in.jsonl"))
        delete.get_by_role("button", name="Delete the file").click()
        expect(row_of(page, "in.jsonl", "Files").locator(".error")).to_contain_text("has not ended")
        cancel = page.get_by_role("button", name=f"Cancel {batch_id}")
        dialog_of(page, cancel)
        page.keyboard.press("Escape")
        expect(cancel).to_be_focused()
        assert read(served, f"/v1/batches/{batch_id}")["status"] != "cancelling"
        dialog_of(page, cancel).get_by_role("button", name="Cancel the batch").click()
        expect(row).to_contain_text("cancelled")
    expect(cancel).to_have_count(0)
    expect(row.get_by_role("rowheader")).to_be_focused()
    late.get_by_role("button", name="Cancel the batch").click()
    expect(row_of(other, batch_id).locator(".error")).to_contain_text("it cannot be cancelled any more")


def test_refusals_are_at_their_fields(new_page: NewPage, served: Running) -> None:
    """A refusal is at the field that the server names, which gets the focus; a file is uploaded once for all attempts,
    and an upload that is refused is said of the file."""
    page = new_page("batches")
    form = form_of(page)
    choose(page, jsonl(CHAT))
    cases = (
        ("Completion window", "1d", "24h", "completion_window"),
        ("Completion window", "999h", "24h", "1h to 336h"),
        ("Metadata", "no value", "", 'it has no "="'),
        ("Metadata", "a=1\na=2", "", "another line has the same name"),
        ("Metadata", f"a={'x' * 600}", "", "metadata.a"),
        ("Metadata", f"={HOSTILE}", "", "labels whose names"),
    )
    for label, wrong, right, words in cases:
        field = form.get_by_label(label)
        field.fill(wrong)
        form.get_by_role("button", name="Start the batch").click()
        expect(form.locator(".error")).to_contain_text(words)
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_accessible_description(re.compile(re.escape(words)))
        field.fill(right)
    assert len(files(served)) == 1
    submit(page)
    expect(form.locator(".error")).to_have_count(0)
    expect(form.get_by_label("Completion window")).to_have_value("24h")
    assert len([one for one in files(served) if one["purpose"] == "batch"]) == 1
    choose(page, jsonl(CHAT, name="x" * 250 + "é.jsonl"))
    form.get_by_role("button", name="Start the batch").click()
    expect(form.locator(".error")).to_contain_text("a file name of 1 to 256 characters")
    expect(form.get_by_label("JSONL file")).to_be_focused()
    choose(page, [{"name": "big.jsonl", "mimeType": "text/plain", "buffer": b" " * (16 * 2**20 + 1)}])
    form.get_by_role("button", name="Start the batch").click()
    expect(form.locator(".error")).to_contain_text("16777216")
    assert page.evaluate("window.pwned") is None


def test_an_input_that_cannot_run_says_why(new_page: NewPage) -> None:
    """The endpoint follows the file's first request; with another one the batch fails, and says of which line."""
    page = new_page("batches")
    choice = form_of(page).get_by_label("Endpoint")
    expect(choice.get_by_role("option")).to_have_text(list(ENDPOINTS))
    choose(page, jsonl({"model": "assistant", "prompt": "Hi"}, url="/v1/completions"))
    expect(choice).to_have_value("/v1/completions")
    choose(page, [{"name": "no.jsonl", "mimeType": "text/plain", "buffer": b"null\n{"}])
    expect(form_of(page).get_by_label("JSONL file")).to_have_value(re.compile("no.jsonl"))
    choice.select_option("/v1/embeddings")
    row = row_of(page, submit(page))
    expect(row.get_by_role("cell").first).to_contain_text("failed")
    row.get_by_text("2 reasons").click()
    expect(row.get_by_role("listitem").nth(1)).to_contain_text("line 2: ")


def test_batches_by_keyboard(new_page: NewPage, served: Running) -> None:
    """A batch is started, cancelled, and its file downloaded and deleted, without a mouse."""
    page = new_page()
    press(page, "link", "Batches")
    tab_to(page, form_of(page).get_by_label("JSONL file"))
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(jsonl(CHAT, CHAT, name="keyboard.jsonl"))
    write(page, "Completion window, in hours such as 24h", "2h")
    write(page, "Metadata: name=value, one a line", "by=keyboard")
    with steps_up_to(served.model_dir, 0):
        press(page, "button", "Start the batch")
        row = row_of(page, "by: keyboard")
        tab_to(page, row.get_by_role("button", name="Cancel"), back=True)
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("What was answered stays")
        press(page, "button", "Cancel the batch")
        expect(row).to_contain_text("cancelled")
    tab_to(page, page.get_by_role("button", name="Download keyboard.jsonl"))
    with page.expect_download() as given:
        page.keyboard.press("Enter")
    assert given.value.suggested_filename == "keyboard.jsonl"
    tab_to(page, page.get_by_role("button", name="Delete keyboard.jsonl"))
    page.keyboard.press("Enter")
    press(page, "button", "Delete the file")
    expect(page.get_by_role("button", name="Delete keyboard.jsonl")).to_have_count(0)
    choose(page, [{"name": "empty.jsonl", "mimeType": "text/plain", "buffer": b"\n"}])
    press(page, "button", "Start the batch", back=True)
    reasons = page.locator("details").filter(has_text="the input file has no requests").first
    tab_to(page, reasons.locator("summary"))
    page.keyboard.press("Enter")
    expect(reasons.get_by_role("listitem")).to_be_visible()


def batch(number: int, **more: Any) -> dict[str, Any]:
    """Return a batch as a server lists it."""
    times = dict.fromkeys(("created_at", "expires_at"), 1_700_000_000)
    counts = {"total": 2, "completed": 1, "failed": 0}
    shown = {"id": f"batch_{number}", "endpoint": ENDPOINTS[0], "errors": None, "metadata": None, "status": "completed"}
    return shown | times | {"output_file_id": None, "error_file_id": None, "request_counts": counts} | more


def listed(found: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    return {"object": "list", "data": found, "last_id": found[-1]["id"] if found else None, "has_more": has_more}


def test_hostile_names_and_texts_are_inert(new_page: NewPage, complaints: list[str]) -> None:
    """Ids, metadata, reasons, names of files and errors are text, and are sent to no other path."""
    error = {"code": HOSTILE, "line": 1, "message": HOSTILE, "param": HOSTILE}
    one = batch(1, id=f"../{HOSTILE}", metadata={HOSTILE: HOSTILE, "__proto__": HOSTILE}, status="in_progress")
    one |= {"errors": {"data": [error]}, "endpoint": HOSTILE, "output_file_id": f"../../{HOSTILE}?x=#"}
    file = {"id": f"../{HOSTILE}", "filename": f"../{HOSTILE}\u202e.jsonl", "purpose": "batch", "bytes": 3}
    file |= {"created_at": 1, "expires_at": None}
    asked: list[str] = []

    def given(route: Route, request: Request) -> None:
        path = request.url.partition("/v1/")[2]
        asked.append(path)
        if path.startswith("batches?"):
            route.fulfill(json=listed([one]))
        elif path.startswith("files?"):
            route.fulfill(json=listed([file]))
        else:
            route.fulfill(status=400, json={"error": {"message": HOSTILE, "param": "__proto__"}})

    page = new_page("batches", prepare=lambda page: page.route(re.compile("/v1/(batches|files)"), given))
    page.get_by_text("1 reason").click()
    row = page.get_by_role("table", name="Batches").get_by_role("row").nth(1)
    expect(row.get_by_role("listitem")).to_have_text(f"line 1: {HOSTILE}")
    row.get_by_role("button", name="Download output").click()
    expect(row.locator(".error")).to_have_text(HOSTILE)
    dialog_of(page, row.get_by_role("button", name="Cancel")).get_by_role("button", name="Cancel the batch").click()
    delete = dialog_of(page, page.get_by_role("button", name="Delete"))
    expect(delete).to_contain_text(HOSTILE)
    delete.get_by_role("button", name="Delete the file").click()
    expect(page.get_by_role("table", name="Files").locator(".error")).to_have_text(HOSTILE)
    choose(page, jsonl(CHAT, name=HOSTILE))
    form_of(page).get_by_role("button", name="Start the batch").click()
    expect(form_of(page).locator(".error")).to_have_text(HOSTILE)
    assert page.evaluate("window.pwned") is None
    assert page.locator("#app :is(img, iframe, script, b)").count() == 0
    assert {path.count("/") for path in asked if path.startswith("files/")} == {1, 2}  # with and without /content
    assert all(path.startswith(("files", "batches")) and "/../" not in path for path in asked)
    assert [one for one in complaints if "400" not in one] == []


def test_lists_have_pages_and_outlive_a_failure(new_page: NewPage) -> None:
    """Older entries are read on demand and stay when the list is read again; a server that is away for a moment leaves
    the list and what is written in the form."""
    away = False

    def given(route: Route, request: Request) -> None:
        if away:
            return route.fulfill(status=503, body="gone")
        after = re.search(r"after=batch_(\d+)", request.url)
        first = int(after.group(1)) + 1 if after else 0
        found = [batch(number, status="in_progress") for number in range(first, min(first + 20, 50))]
        return route.fulfill(json=listed(found, has_more=first + 20 < 50))

    page = new_page("batches", prepare=lambda page: page.route("**/v1/batches?*", given))
    rows = page.get_by_role("table", name="Batches").get_by_role("row")
    for count in (20, 40, 50):
        expect(rows).to_have_count(count + 1)
        if count < 50:
            page.get_by_role("button", name="Earlier batches").click()
    expect(page.get_by_role("button", name="Earlier batches")).to_have_count(0)
    form_of(page).get_by_label("Metadata").fill("kept=1")
    away = True
    expect(page.get_by_text("The server answered with status 503.")).to_be_visible()  # it is read again by itself
    expect(rows).to_have_count(51)
    away = False
    expect(page.get_by_text("The server answered with status 503.")).to_have_count(0)
    expect(form_of(page).get_by_label("Metadata")).to_have_value("kept=1")


def test_it_works_behind_a_path_prefix(new_page: NewPage, served: Running) -> None:
    """Lists, uploads, downloads and deletions stay below a prefix that a proxy adds."""
    paths: set[str] = set()

    def proxy(route: Route, request: Request) -> None:
        path = re.sub(r"^\w+://[^/]*", "", request.url)
        paths.add(path)
        route.continue_(url=f"{served.url}{path.removeprefix('/team/llm')}")

    page = new_page("batches", at=f"{served.url}/team/llm", prepare=lambda page: page.route("**/*", proxy))
    choose(page, jsonl(CHAT))
    row = row_of(page, submit(page))
    expect(row).to_contain_text("completed")
    _, output = download(page, row.get_by_role("button", name="Download output"))
    assert json.loads(output)["custom_id"] == "row-0"
    delete = dialog_of(page, page.get_by_role("button", name="Delete in.jsonl"))
    delete.get_by_role("button", name="Delete the file").click()
    expect(page.get_by_role("button", name="Delete in.jsonl")).to_have_count(0)
    assert {"/team/llm/v1/batches", "/team/llm/v1/files", "/team/llm/v1/files?limit=20"} <= paths
    assert all(path.startswith("/team/llm/") for path in paths)


def test_a_server_without_batches_says_so(new_page: NewPage, tmp_path: Path) -> None:
    """Without a database the view says what the server needs and offers nothing; with one whose servers run no batches
    it says that after a minute."""
    bundle = write_instant_model(tmp_path / "model", vocab_size=94)
    with running(bundle) as server:
        page = new_page("batches", at=server.url)
        expect(page.locator(".error")).to_have_text("this server keeps no files and batches; start it with --database")
        expect(page.get_by_role("heading", name="Batches")).to_be_visible()
        expect(form_of(page)).to_have_count(0)
    with running(bundle, database=f"sqlite:///{tmp_path}/page.db", batch_concurrency=0) as server:
        page = new_page("batches", at=server.url)
        choose(page, jsonl(CHAT))
        row = row_of(page, submit(page))
        expect(row).to_contain_text("validating")
        expect(row).not_to_contain_text("batch_concurrency")
        later = new_page("batches", at=server.url, prepare=lambda page: page.clock.set_fixed_time(time.time() + 120))
        expect(later.get_by_text("No server has begun it.")).to_contain_text("batch_concurrency")


@pytest.mark.parametrize("width", [320, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(new_page: NewPage, served: Running, scheme: str, width: int) -> None:
    """The empty view, lists with long names, refusals and dialogs keep WCAG 2.2 AA, and none scrolls sideways."""
    window = {"width": width, "height": 900}
    page = new_page("batches", color_scheme=scheme, viewport=window, reduced_motion="reduce")
    expect(page.get_by_text("There are no files yet.")).to_be_visible()
    hold_wcag(page)
    choose(page, jsonl(CHAT, CHAT | {"temperature": 9}, name="x" * 200 + ".jsonl"))
    form_of(page).get_by_label("Metadata").fill("team=" + "y" * 200)
    form_of(page).get_by_label("Completion window").fill("1d")
    form_of(page).get_by_role("button", name="Start the batch").click()
    expect(form_of(page).locator(".error")).to_be_visible()
    hold_wcag(page)
    form_of(page).get_by_label("Completion window").fill("1h")
    with steps_up_to(served.model_dir, 0):
        batch_id = submit(page)
        expect(page.get_by_role("progressbar")).to_be_visible()
        hold_wcag(page)
        dialog_of(page, page.get_by_role("button", name=f"Cancel {batch_id}"))
        hold_wcag(page)
        page.keyboard.press("Escape")
    expect(page.get_by_role("button", name=f"Download errors of {batch_id}")).to_be_visible()
    dialog_of(page, page.get_by_role("button", name="Delete x"))
    hold_wcag(page)
    page.keyboard.press("Escape")
    choose(page, [{"name": "no.jsonl", "mimeType": "text/plain", "buffer": b"{"}])
    failed = row_of(page, submit(page))
    failed.get_by_text("1 reason").click()
    hold_wcag(page)
