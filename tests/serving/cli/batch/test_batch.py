"""``mlflow-llm batch`` against a server of the test's own, which answers, refuses, hangs and goes away on demand."""

from __future__ import annotations

import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.batch import backends
from mlflow_llm.serving.cli.batch.journal import Journal
from mlflow_llm.serving.cli.batch.rows import Rows
from mlflow_llm.serving.interface.errors import InvalidField, RequestError

SPENT = -429  # a 429 because of a budget


class FakeServer:
    """A server that answers each prompt with itself. ``held`` prompts wait for ``release``; ``statuses`` are answered
    first, one a request.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.statuses: dict[str, list[int]] = {}
        self.held: set[str] = set()
        self.reached, self.release = threading.Event(), threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.tell(200, {"data": [{"id": "assistant"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = str(body.get("prompt"))
                fake.asked[prompt] += 1
                fake.bodies.append(body)
                if prompt in fake.held:
                    fake.reached.set()
                    fake.release.wait(240)
                status = (fake.statuses.get(prompt) or [200]).pop(0)
                self.tell(status, answer(prompt) if status == 200 else refusal(status), f"req-{prompt}")

            def tell(self, status: int, body: dict[str, Any], request_id: str = "req-get") -> None:
                data = json.dumps(body).encode()
                self.send_response(abs(status))
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-Request-Id", request_id)
                self.end_headers()
                self.wfile.write(data)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()


def answer(prompt: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return {"id": f"cmpl-{prompt}", "choices": [{"text": prompt}], "usage": usage}


def refusal(status: int) -> dict[str, Any]:
    if status == SPENT:
        return {
            "error": {"message": "spent", "type": "insufficient_quota", "param": None, "code": "insufficient_quota"}
        }
    return {"error": {"message": f"reported {status}", "type": "x", "param": None, "code": f"code_{status}"}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(backends, "FIRST_WAIT", 0.001)
    fake = FakeServer()
    yield fake
    fake.release.set()
    fake.server.shutdown()
    fake.server.server_close()
    fake.thread.join()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": str(i), "max_tokens": 3} for i in range(count)]


def run(server: FakeServer, files: tuple[Path, Path], *more: str) -> Result:
    return CliRunner().invoke(cli, ["batch", str(files[0]), "-o", str(files[1]), "--url", server.url, *more])


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def texts(file: Path) -> list[str]:
    return [line["response"]["body"]["choices"][0]["text"] for line in lines(file)]


def test_both_shapes_of_rows(server: FakeServer, files: tuple[Path, Path]) -> None:
    """Rows in OpenAI's batch form and plain bodies are both answered in OpenAI's form, in the input's order."""
    mine = {"custom_id": "mine", "method": "POST", "url": "/v1/completions", "body": {"prompt": "b", "model": "own"}}
    files[0].write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps(mine) + "\n" + json.dumps({"prompt": "c"}))
    done = run(server, files)
    assert done.exit_code == 0, done.output
    assert [line["custom_id"] for line in lines(files[1])] == ["line-1", "mine", "line-4"]
    assert texts(files[1]) == ["a", "b", "c"]
    first = lines(files[1])[0]
    assert (first["response"]["status_code"], first["response"]["request_id"], first["error"]) == (200, "cmpl-a", None)
    assert {body["prompt"]: body["model"] for body in server.bodies} == {"a": "assistant", "b": "own", "c": "assistant"}
    assert "3 of 3 rows answered, 0 failed; 6 prompt tokens (3 cached), 9 new" in done.stderr


def test_rows_that_fail(server: FakeServer, files: tuple[Path, Path]) -> None:
    """Failed rows are in the output with status and error and make the exit status 1; retried on demand, a row has one
    line.
    """
    write(files[0], {"prompt": "a"}, {"prompt": "bad"}, {"prompt": "c", "stream": True}, {"prompt": "d", "input": "x"})
    server.statuses["bad"] = [400]
    done = run(server, files)
    assert done.exit_code == 1
    reported = [(line["response"]["status_code"], (line["error"] or {}).get("code")) for line in lines(files[1])]
    assert reported == [(200, None), (400, "code_400"), (400, "invalid_value"), (400, "invalid_value")]
    assert [line["response"]["request_id"] for line in lines(files[1])[:2]] == ["cmpl-a", "req-bad"]
    assert all(line["response"]["request_id"] == line["id"] for line in lines(files[1])[2:])  # asked of no server
    assert "1 of 4 rows answered, 3 failed" in done.stderr
    assert run(server, files).exit_code == 1
    assert server.asked == {"a": 1, "bad": 1}
    assert "2 of 4 rows answered, 2 failed" in run(server, files, "--retry-failed").stderr
    assert [line["response"]["status_code"] for line in lines(files[1])] == [200, 200, 400, 400]


def test_a_busy_server_is_asked_again(server: FakeServer, files: tuple[Path, Path]) -> None:
    """A row is retried after 429, 502 and 503; when the retries are used up the batch stops and can be resumed without
    a loss.
    """
    write(files[0], *prompts(3))
    server.statuses["1"] = [429, 502, 503]
    assert run(server, files).exit_code == 0
    assert server.asked["1"] == 4
    files[1].unlink()
    server.statuses["1"] = [503, 503]
    stopped = run(server, files, "--retries", "1", "--concurrency", "1")
    assert stopped.exit_code == 2
    assert "line 2 was not answered: 503: reported 503; run the same command again" in stopped.stderr
    assert (texts(files[1]), "2 left" in stopped.stderr) == (["0"], True)
    assert run(server, files).exit_code == 0
    assert texts(files[1]) == ["0", "1", "2"]
    assert server.asked["0"] == 2  # once for each output


def test_a_refused_key_stops(server: FakeServer, files: tuple[Path, Path]) -> None:
    """A refused key stops the batch, and no row is written as failed."""
    write(files[0], *prompts(2))
    server.statuses["0"] = [401]
    stopped = run(server, files, "--concurrency", "1")
    assert (stopped.exit_code, "401: reported 401" in stopped.stderr, files[1].read_text()) == (2, True, "")


def test_a_spent_budget_stops(server: FakeServer, files: tuple[Path, Path]) -> None:
    """Nobody waits for the next month: the batch says why it stops, and goes on from there later."""
    write(files[0], *prompts(2))
    server.statuses["1"] = [SPENT]
    stopped = run(server, files, "--concurrency", "1")
    assert (stopped.exit_code, "429: spent" in stopped.stderr, texts(files[1])) == (2, True, ["0"])
    assert run(server, files).exit_code == 0
    assert (texts(files[1]), server.asked["1"]) == (["0", "1"], 2)


def test_after_kill_9(server: FakeServer, files: tuple[Path, Path]) -> None:
    """A batch that was killed resumes: rows written before are not sent again, and every row has one line."""
    write(files[0], *prompts(6))
    server.held = {"4"}
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", "batch", str(files[0]), "-o", str(files[1])]
    command += ["--url", server.url, "--concurrency", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert server.reached.wait(240)
        process.send_signal(signal.SIGKILL)
    assert texts(files[1]) == ["0", "1", "2", "3"]
    with files[1].open("ab") as torn:
        torn.write(b'{"id": "batch_req_')  # as a kill within a write leaves it
    server.held = set()
    server.release.set()
    done = run(server, files)
    assert done.exit_code == 0, done.output
    assert texts(files[1]) == ["0", "1", "2", "3", "4", "5"]
    assert server.asked == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 2, "5": 1}


def test_an_output_of_another_input(server: FakeServer, files: tuple[Path, Path]) -> None:
    """An output with a changed row, or a file that is no output, is refused before any request and left unchanged."""
    write(files[0], *prompts(2))
    run(server, files)
    before = files[1].read_bytes()
    write(files[0], {"prompt": "0", "max_tokens": 4}, *prompts(2)[1:])
    done = run(server, files)
    assert (done.exit_code, "line 1 does not answer a row of this input" in done.stderr) == (2, True)
    assert files[1].read_bytes() == before
    for other in ("notes\n", "{}\n", "[1]\n"):
        files[1].write_text(other)
        done = run(server, files)
        assert (done.exit_code, "line 1 is not an answer of a batch" in done.stderr) == (2, True)
        assert files[1].read_text() == other
    assert server.asked == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('{"prompt": "a"}\n{"prompt"', "line 2: it is not JSON"),
        ("[1]", r"line 1: [1] is not a JSON object"),
        (
            '{"custom_id": "x", "body": {}}\n{"custom_id": "x", "body": {}}',
            "line 2: custom_id 'x' is also on line 1",
        ),
        ('{"custom_id": "line-2", "body": {}}\n{"prompt": "a"}', "line 2: custom_id 'line-2' is also on line 1"),
        ('{"custom_id": "", "body": {}}', "line 1: custom_id"),
        ('{"body": [], "url": "/v1/completions"}', "line 1: body"),
        ('{"body": {}, "url": "/v1/other"}', "line 1: url: '/v1/other' is not allowed; expected one of /v1/chat"),
        ('{"body": {}, "method": "GET"}', "line 1: method"),
        ('{"body": {}, "custom": "a"}', "did you mean 'custom_id'"),
    ],
)
def test_invalid_input_is_refused(server: FakeServer, files: tuple[Path, Path], text: str, reported: str) -> None:
    """Invalid input is refused with its line number before anything is sent or written."""
    files[0].write_text("\n".join(text.split("\n")))
    done = run(server, files)
    assert (done.exit_code, reported in done.stderr) == (2, True), done.stderr
    assert not files[1].exists()


def test_options_that_do_not_go_together(server: FakeServer, files: tuple[Path, Path]) -> None:
    """Options that exclude each other are refused, and so is an output that is the input."""
    write(files[0], {"prompt": "a"})
    for more in (("-C", "threads=1"), ("-m", "x", "--model", "y"), ("-o", str(files[0]))):
        assert run(server, files, *more).exit_code == 2


def test_one_writer(files: tuple[Path, Path]) -> None:
    """A second writer is refused, and a write after the journal was closed fails and writes nothing."""
    write(files[0], *prompts(1))
    rows = Rows(files[0])
    (key,) = rows.keys
    journal = Journal(files[1], rows.keys)
    with pytest.raises(RequestError, match="another process is writing it"):
        Journal(files[1], rows.keys)
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.write({"id": key, "custom_id": "x", "response": None, "error": None})
    assert os.path.getsize(files[1]) == 0


def test_answers_are_their_owners(files: tuple[Path, Path]) -> None:
    """A new output is readable by its owner alone, even after sorting; one that its owner opened to others stays so."""
    write(files[0], *prompts(2))
    keys = list(Rows(files[0]).keys)
    for mode in (0o600, 0o640):
        journal = Journal(files[1], keys)
        files[1].chmod(mode) if mode != 0o600 else None
        for key in reversed(keys):
            journal.write({"id": key, "custom_id": None, "response": {}, "error": None})
        Path(f"{files[1]}.ordered").write_text("what a kill left")
        journal.put_in_order(keys)
        journal.close()
        assert [json.loads(line)["id"] for line in files[1].read_text().splitlines()] == keys
        assert stat.S_IMODE(files[1].stat().st_mode) == mode


def test_an_output_that_leads_elsewhere(server: FakeServer, files: tuple[Path, Path], tmp_path: Path) -> None:
    """An output that is a symbolic link is not followed, and a pipe is refused, since a restart could not read it."""
    write(files[0], *prompts(1))
    target = tmp_path / "precious"
    files[1].symlink_to(target)
    done = run(server, files)
    assert (done.exit_code, "it is a symbolic link" in done.stderr, target.exists()) == (2, True, False)
    files[1].unlink()
    os.mkfifo(files[1])
    done = run(server, files)
    assert (done.exit_code, "it is not a regular file" in done.stderr) == (2, True)
    assert not server.asked


def test_order_of_completion(files: tuple[Path, Path]) -> None:
    """On demand the output is left in the order of completion; of a row written twice the last line counts."""
    write(files[0], *prompts(3))
    rows = Rows(files[0])
    keys = list(rows.keys)
    journal = Journal(files[1], keys)
    for place in (2, 0, 1, 2):
        journal.write({"id": keys[place], "custom_id": str(place), "response": None, "error": None})
    journal.put_in_order(sorted(keys, key=lambda key: journal.done[key].place))
    journal.close()
    assert [line["custom_id"] for line in lines(files[1])] == ["0", "1", "2"]


def test_a_full_disk(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that cannot be written whole is removed completely."""
    write(files[0], *prompts(2))
    rows = Rows(files[0])
    first, second = rows.keys
    journal = Journal(files[1], rows.keys)
    journal.write({"id": first, "custom_id": "a", "response": None, "error": None})
    plain = os.pwrite

    def full(descriptor: int, data: Any, place: int) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return plain(descriptor, bytes(data)[:-10], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        journal.write({"id": second, "custom_id": "b", "response": None, "error": None})
    journal.close()
    assert [line["custom_id"] for line in lines(files[1])] == ["a"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"query": "a", "documents": ["b"]}, "/v1/rerank"),
        ({"text_1": "a", "text_2": "b"}, "/v1/score"),
        ({"input": "a"}, "/v1/embeddings"),
    ],
)
def test_rows_go_where_their_fields_say(tmp_path: Path, body: dict[str, Any], path: str) -> None:
    """A body's fields decide its path; a url that differs from it is refused by name."""
    lines = [
        body,
        {"custom_id": "x", "url": path, "body": body},
        {"custom_id": "y", "url": "/v1/completions", "body": body},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain, same, other = Rows(tmp_path / "in.jsonl").without(set())
    assert plain.asked == same.asked == (path, body)
    with pytest.raises(
        InvalidField, match=f"url: '/v1/completions' is not allowed; expected {path}, according to the body"
    ):
        _ = other.asked
