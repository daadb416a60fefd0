"""The commands that talk to a server, on a real one: what a user sees of chat, bench, endpoints and doctor."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from internals import connection_of
from serving_process import Running, free_port

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.http import Client, first_model
from mlflow_llm.serving.cli.http_connection import connector
from mlflow_llm.serving.cli.load_generator import Sample, closed_loop, percentile, prompt
from mlflow_llm.serving.cli.serve.command import say
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store

IN_USE = "Address already in use; choose another address with --port, --probe-port or --socket"

Command = Callable[..., Result]
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # what a terminal is reported at the start and end of a prompt


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record conversations in a directory of the test's own."""
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path / "state-of-test"))


@pytest.fixture
def command(observed: Running) -> Command:
    """Return ``command("chat", …, input=…)``, which runs a command against the server."""
    runner = CliRunner(env={"MLFLOW_LLM_URL": observed.url, "MLFLOW_LLM_KEY": None})
    return lambda *args, input=None: runner.invoke(cli, list(args), input=input)


def spoken(server: Running, *contents: str, **fields: object) -> str:
    """Return the server's reply to the last of ``contents``, which alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    body = {"model": "assistant", "messages": messages, "temperature": 0} | fields
    return Client(server.url).post("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def test_chat_prints_the_answer(command: Command, observed: Running) -> None:
    """One message gives the model's own text, and nothing else, on standard output."""
    done = command("chat", "--temperature", "0", "--max-tokens", "12", "Hello")
    assert done.exit_code == 0, done.output
    assert done.stdout == spoken(observed, "Hello", max_tokens=12) + "\n"


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["b", "b:x", "a", "a:x"], "the server has 2 endpoints (b, a); --model not given: b\n"),
        (["b", "b:x"], ""),
    ],
)
def test_the_first_of_several_endpoints_is_named(
    ids: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--model`` the first endpoint is used, and its name is printed if there are others."""
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "get", lambda path: {"data": [{"id": one} for one in ids]})
    assert first_model(client) == "b"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:80"), ("127.0.0.1", "http://127.0.0.1:80"), ("a.b", "http://a.b:80")]
)
def test_the_address_of_a_server_is_a_url(host: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's address is printed as a URL that can be copied, IPv6 addresses included."""
    say({"stage": "listening", "scheme": "http", "host": host, "port": 80})
    assert capsys.readouterr().err == f"listening on {url} (docs at /docs)\n"


@pytest.mark.parametrize(("name", "written"), [("a%41", "a%41"), ("a b", "a%20b"), ("a b", "a b")])
def test_a_socket_is_found_by_its_path_and_by_its_url(tmp_path: Path, name: str, written: str) -> None:
    """A socket is found by its plain path, as ``--socket`` takes it, and by its URL-escaped path."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / name))
        assert connector(f"unix:{tmp_path}/{written}")[1] == f"unix:{tmp_path}/{name}"


def test_chat_remembers_the_conversation(command: Command, observed: Running) -> None:
    """Each line of a pipe is a turn of one conversation; /new starts another, and empty lines are ignored."""
    done = command("chat", "--temperature", "0", "--max-tokens", "6", input="One\n\nTwo\n/new\nOne\n")
    first = spoken(observed, "One", max_tokens=6)
    second = spoken(observed, "One", first, "Two", max_tokens=6)
    assert done.stdout == f"{first}\n{second}\n{first}\n"


def test_chat_stats(command: Command) -> None:
    """--stats tells usage, time and the request's id, not mixed into the answer."""
    done = command("chat", "--stats", "--max-tokens", "5", "Hi")
    assert "5 new; first after" in done.stderr
    assert "chatcmpl-" in done.stderr
    assert "first after" not in done.stdout


def test_chat_names_its_model(command: Command, observed: Running) -> None:
    """--model reaches an adapter; an unknown one is refused in the server's words, with exit status 1."""
    adapted = command("chat", "--temperature", "0", "--max-tokens", "6", "--model", "assistant:pirate", "Hi")
    assert adapted.stdout == spoken(observed, "Hi", max_tokens=6, model="assistant:pirate") + "\n"
    unknown = command("chat", "--model", "nobody", "Hi")
    assert unknown.exit_code == 1
    assert "404: no endpoint is called 'nobody'" in unknown.stderr


def test_a_refused_turn_does_not_end_the_conversation(command: Command, observed: Running) -> None:
    """A turn that the server refuses is shown as an error and taken back; the next one is answered."""
    done = command("chat", "--temperature", "0", "--max-tokens", "6", input=f"{'long ' * 9000}\nOne\n")
    assert "400" in done.stderr
    assert done.stdout == spoken(observed, "One", max_tokens=6) + "\n"
    assert done.exit_code == 1


@pytest.mark.parametrize("arguments", [("chat", "Hi"), ("bench",), ("endpoints",)])
def test_no_server(arguments: tuple[str, ...]) -> None:
    """Without a server each command says so in one line."""
    done = CliRunner().invoke(cli, [*arguments, "--url", f"http://127.0.0.1:{free_port()}"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: no server answers at 127.0.0.1")
    assert "(Connection refused; `mlflow-llm serve` starts one, --url names another)" in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_invalid_urls_are_usage_errors(url: str) -> None:
    """A URL that cannot be one is a usage error that shows it."""
    done = CliRunner().invoke(cli, ["endpoints", "--url", url])
    assert done.exit_code == 2
    assert "is not an http(s) URL" in done.output


class Strange(http.server.BaseHTTPRequestHandler):
    """A foreign server: every GET gets an HTML page, every POST a stream that breaks off."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def strange() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strange) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_answers_that_break_off(strange: str) -> None:
    """A page that is not JSON and a stream without an end are one-line errors, and what had come is shown."""
    page = CliRunner().invoke(cli, ["endpoints", "--url", strange])
    assert (page.exit_code, "does not answer with JSON" in page.stderr) == (1, True)
    broken = CliRunner().invoke(cli, ["chat", "--url", strange, "--model", "x", "Hi"])
    assert (broken.exit_code, broken.stdout) == (1, "half\n")
    assert broken.stderr.startswith("Error: ")


def test_connections_are_kept(observed: Running) -> None:
    """A client's calls share one connection, streams included; a stream left early costs it."""
    client = Client(observed.url)
    body = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    assert list(client.stream("/v1/chat/completions", body))
    kept = connection_of(client)
    client.get("/v1/models")
    assert connection_of(client) is kept
    chunks = client.stream("/v1/chat/completions", body)
    next(chunks)
    chunks.close()
    assert connection_of(client) is None
    client.get("/v1/models")
    client.close()


def test_bench_table_and_json(command: Command) -> None:
    """bench prints a line for each concurrency, and as JSON what was asked and every percentile, all of it exact."""
    done = command("bench", "--concurrency", "1,3", "--requests", "2", "--max-tokens", "7", "--json", "-")
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [["1", "2", "0"], ["3", "6", "0"]]
    found = json.loads(done.stdout)
    assert found["request"]["model"] == "assistant"
    for row, callers in zip(found["results"], (1, 3), strict=True):
        assert (row["concurrency"], row["requests"], row["completion_tokens"]) == (callers, callers * 2, callers * 14)
        assert row["tokens_per_second"] == pytest.approx(
            row["completion_tokens"] / row["seconds"],
            rel=0.001 / row["seconds"],  # which is in whole milliseconds
        )
        for name in ("ttft", "tpot", "e2e"):
            assert 0 < row[f"{name}_p50_ms"] <= row[f"{name}_p90_ms"] <= row[f"{name}_p99_ms"]
        assert row["ttft_p50_ms"] < row["e2e_p50_ms"]


def test_bench_of_whole_replies(command: Command) -> None:
    """--no-stream measures whole replies and shows no times of single tokens."""
    done = command("bench", "--no-stream", "--concurrency", "2", "--requests", "1", "--max-tokens", "3", "--json", "-")
    (row,) = json.loads(done.stdout)["results"]
    assert (row["completion_tokens"], row["ttft_p50_ms"]) == (6, None)
    assert "–" in done.stderr


def test_bench_counts_errors(command: Command) -> None:
    """Requests that fail are counted and the first is shown; the exit status tells."""
    done = command("bench", "--concurrency", "1", "--requests", "1", "--prompt-words", "9000")
    assert done.exit_code == 1
    assert "400" in done.stderr


def test_bench_asks_other_prompts_in_each_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bench run sends new prompts, so that the prefix cache holds none of them, unless --seed is given."""
    module = importlib.import_module("mlflow_llm.serving.cli.bench")
    runs: list[list[str]] = []

    def ask(client: Client, body: dict) -> Sample:
        runs[-1].append(body["messages"][0]["content"])
        return Sample(e2e=1.0, prompt_tokens=1, tokens=1)

    def run(*more: str) -> dict:
        runs.append([])
        return json.loads(command("bench", "--concurrency", "1,2", "--requests", "2", "--json", "-", *more).stdout)

    monkeypatch.setattr(module, "streamed", ask)
    seed = run()["seed"]
    run()
    assert run("--seed", str(seed))["seed"] == seed
    first, second, repeated = map(set, runs)
    assert (len(first), len(first & second), first == repeated) == (7, 0, True)


def test_bench_opens_its_file_first(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written costs no measurement."""
    monkeypatch.setattr(importlib.import_module("mlflow_llm.serving.cli.bench"), "streamed", None)
    done = command("bench", "--json", "/nonexistent/x.json")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: Could not open file '/nonexistent/x.json'")


@pytest.mark.parametrize("numbers", ["", "0", "1,x", "-3", "1.5"])
def test_bench_refuses_numbers(command: Command, numbers: str) -> None:
    """Concurrency that is no list of positive numbers is a usage error."""
    done = command("bench", "--concurrency", numbers)
    assert (done.exit_code, "1,8,32" in done.output) == (2, True)


def test_endpoints(command: Command) -> None:
    """endpoints lists endpoints with task, context and state, and adapters below them."""
    head, endpoint, adapter = command("endpoints").stdout.splitlines()
    assert head.split()[:5] == ["NAME", "TASK", "MODEL", "VERSION", "CONTEXT"]
    (served,) = json.loads(command("endpoints", "--json").stdout)[0]["served_models"]
    assert endpoint.split()[:5] == ["assistant", "chat", "model-1", served["content_hash"][:12], "8192"]
    assert "ready" in endpoint
    assert adapter == "  assistant:pirate"
    listed, below = json.loads(command("endpoints", "--json").stdout)
    assert (listed["id"], below["id"]) == ("assistant", "assistant:pirate")
    assert (listed["task"], listed["status"]) == ("chat", "ready")
    assert all(type(listed[key]) is int for key in ("running", "waiting"))  # of the tests before this one, too
    assert "status" not in below


@pytest.fixture(scope="module")
def surveyed() -> Iterator[None]:
    """Cache doctor's survey of an engine process, which loads torch, for all tests."""
    module = importlib.import_module("mlflow_llm.serving.cli.doctor")  # its name in the package is the command's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "engine", functools.cache(module.engine))
        yield


@pytest.mark.usefixtures("surveyed")
def test_doctor() -> None:
    """doctor reports versions, CPUs, threads, memory and limits, as text and as JSON."""
    text = CliRunner().invoke(cli, ["doctor"])
    assert (text.exit_code, text.stdout.splitlines()[-1]) == (0, "no problems found")
    found = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    assert found["versions"]["mlflow"].startswith("3.")
    assert {"CPU", "cores", "threads", "memory", "accelerator"} <= set(found["machine"])
    assert found["limits"]["open files"] > 0
    assert found["problems"] == []


@pytest.mark.usefixtures("surveyed")
def test_doctor_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is a problem with exit status 1."""
    module = importlib.import_module("mlflow_llm.serving.cli.doctor")
    monkeypatch.setattr(module, "PACKAGES", ("mlflow-llm", "no-such-package"))
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1
    assert "problem: no-such-package is not installed" in done.stdout


@pytest.mark.usefixtures("surveyed")
def test_doctor_with_an_unreadable_model(tmp_path: Path) -> None:
    """A model that cannot be read is one line behind the report, not a trace; it is a problem in the JSON too."""
    command = ["doctor", "-m", str(tmp_path / "nothing")]
    done = CliRunner().invoke(cli, command)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.stdout.startswith("versions\n")
    assert done.stdout.splitlines()[-1].startswith(f"problem: {tmp_path / 'nothing'}: ")
    assert "Traceback" not in done.stderr
    done = CliRunner().invoke(cli, [*command, "--json"])
    assert (done.exit_code, "model" in json.loads(done.stdout)) == (1, False)
    assert json.loads(done.stdout)["problems"][-1].startswith(str(tmp_path))


def read_until(terminal: int, text: str, seconds: float = 240) -> str:
    """Return the terminal's output up to ``text`` and whatever arrived with it; nothing is returned twice."""
    shown, end = "", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown


@contextlib.contextmanager
def chatting(
    server: Running, *message: str, term: str = "dumb", state: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield ``chat`` in a pseudo-terminal, and the test's end of it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", "chat", "--url", server.url, "--temperature", "0"]
    environment = {**os.environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"}
    if state is not None:
        environment["MLFLOW_LLM_STATE"] = str(state)
    if term != "dumb":
        command += ["--max-tokens", "2"]
    process = subprocess.Popen([*command, *message], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_conversation_in_a_terminal(observed: Running) -> None:
    """``chat`` in a terminal shows a greeting and a prompt; Ctrl-C stops an answer but not the conversation; Ctrl-D
    ends it.
    """
    first = spoken(observed, "Hello", max_tokens=1)
    with chatting(observed) as (process, ours):
        assert "chatting with assistant" in read_until(ours, "> ")
        os.write(ours, b"Hello\n")
        read_until(ours, f"Hello\r\n{first}")
        process.send_signal(signal.SIGINT)
        read_until(ours, "[stopped]\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(240) == 0


def test_an_interrupt_at_the_prompt(observed: Running) -> None:
    """Ctrl-C drops the line that is being typed, and the conversation goes on."""
    first = spoken(observed, "Hello", max_tokens=1)
    with chatting(observed, "--max-tokens", "1") as (process, ours):
        read_until(ours, "> ")
        os.write(ours, b"Nothing of")
        read_until(ours, "Nothing of")
        while not select.select([ours], [], [], 0.5)[0]:  # one just before readline waits is seen at the next key
            process.send_signal(signal.SIGINT)
        read_until(ours, "[Ctrl-D quits]\r\n> ")
        os.write(ours, b"Hello\n")
        assert f"Hello\r\n{first}\r\n" in read_until(ours, "\n> ")
        os.write(ours, b"\x04")
        assert process.wait(240) == 0


def test_an_answer_that_is_interrupted(observed: Running) -> None:
    """Ctrl-C during the answer to a single message leaves what has come on the screen, and the exit status tells."""
    first = spoken(observed, "Hello", max_tokens=1)
    with chatting(observed, "Hello") as (process, ours):
        read_until(ours, first)
        process.send_signal(signal.SIGINT)
        read_until(ours, "[stopped]\r\n")
        assert process.wait(240) == 130


def test_closed_loop_runs_all_at_once() -> None:
    """Every body is asked once, as many at a time as there are callers, and failures do not end the loop."""
    import click

    gate = threading.Barrier(4)

    def ask(body: dict) -> Sample:
        gate.wait(240)
        if body["n"] % 4 == 0:
            raise click.ClickException("no")
        return Sample(e2e=1.0, prompt_tokens=1, tokens=body["n"])

    result = closed_loop(ask, ({"n": n} for n in range(8)), 4)
    assert sorted(sample.tokens for sample in result.samples) == [1, 2, 3, 5, 6, 7]
    assert result.errors == ("no", "no")
    assert result.summary()["ttft_p50_ms"] is None


def test_percentiles_and_prompts() -> None:
    """Percentiles are nearest-rank; prompts differ from their first word on and are the same again."""
    assert [percentile(range(1, 11), p) for p in (50, 90, 99)] == [5, 9, 10]
    assert len(prompt(7, 80).split()) == 80
    assert prompt(7, 80) == prompt(7, 80)
    assert prompt(7, 80).split()[0] != prompt(8, 80).split()[0]


def test_serve_looks_at_its_address_first() -> None:
    """A port that is taken is said before any model is read, in one line."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(cli, ["serve", "-m", "models:/nobody/1", "--port", port])
    assert (done.exit_code, done.stderr) == (1, f"Error: cannot listen on 127.0.0.1:{port}: {IN_USE}\n")


def test_serve_looks_at_its_store_first(tmp_path: Path) -> None:
    """A store that cannot be is said before any model is read, in one line."""
    options = ["serve", "-m", "models:/nobody/1", "--port", "0", "--database", f"sqlite:///{tmp_path}/no/store.db"]
    done = CliRunner(env={"MLFLOW_LLM_STATE": str(tmp_path)}).invoke(cli, options)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"there is no directory {tmp_path}/no" in done.stderr


@pytest.mark.parametrize("text", ['{"endpoints": [', '{"settings": {"port": "x"}}'])
def test_serve_refuses_an_invalid_spec(text: str, tmp_path: Path) -> None:
    """A file that is no spec is an error with its name and the reason."""
    file = tmp_path / "spec.json"
    file.write_text(text)
    done = CliRunner().invoke(cli, ["serve", "--spec", str(file)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: --spec {file}: ")


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_database_on_the_command_line_comes_before_the_environments(place: str, tmp_path: Path) -> None:
    """``--database`` on either side of the name of a command is the one that is used, not the environment's."""
    url = f"sqlite:///{tmp_path}/store.db"
    Store(url).close()
    given = ["--database", url]
    words = {"before": [*given, "fold", "40"], "behind": ["fold", *given, "40"]}[place]
    done = CliRunner(env={"MLFLOW_LLM_DATABASE": f"sqlite:///{tmp_path}/other.db"}).invoke(cli, ["usage", *words])
    assert (done.exit_code, done.stdout) == (0, "folded 0 requests\n"), done.output


@pytest.mark.parametrize("place", ["before", "behind", "environment"])
def test_where_fold_finds_its_store(place: str, tmp_path: Path) -> None:
    """``usage fold`` takes --database on either side of its name, and its --help needs none."""
    url = f"sqlite:///{tmp_path}/store.db"
    given = ["--database", url]
    arguments = {"before": [*given, "fold", "40"], "behind": ["fold", *given, "40"], "environment": ["fold", "40"]}
    Store(url).close()
    runner = CliRunner(env={"MLFLOW_LLM_DATABASE": url if place == "environment" else None})
    done = runner.invoke(cli, ["usage", *arguments[place]])
    assert (done.exit_code, done.stdout) == (0, "folded 0 requests\n")
    without = CliRunner(env={"MLFLOW_LLM_DATABASE": None})
    assert without.invoke(cli, ["usage", "fold", "--help"]).exit_code == 0
    assert "Missing option '--database'" in without.invoke(cli, ["usage", "fold", "40"]).stderr
    assert "name a database with --database, or a server with --url" in without.invoke(cli, ["usage"]).stderr


def test_the_commands_of_a_conversation(command: Command, observed: Running) -> None:
    """/set and /model change what is asked from then on, // sends a slash, an unknown word is reported, /bye ends."""
    lines = [
        "/model",
        "/set max_tokens 3",
        "/set",
        "Hello",
        "/set max_tokens",
        "/what",
        "/set max_tokens 5",
        "//x",
        "/bye",
        "no",
    ]
    done = command("chat", "--temperature", "0", input="\n".join(lines) + "\n")
    first = spoken(observed, "Hello", max_tokens=3)
    assert done.stdout == f"{first}\n{spoken(observed, 'Hello', first, '/x', max_tokens=5)}\n"
    reported = done.stderr.splitlines()
    assert reported[0] == "* assistant"
    assert {"temperature 0.0", 'model "assistant"', "max_tokens 3"} <= set(reported)
    assert "Error: /what is not a command; /help lists them, //… sends a message that begins with a slash" in reported
    assert done.exit_code == 1


def test_what_the_server_refuses_of_a_set_field_is_reported(command: Command) -> None:
    """A field that is wrong is named by the server, and /set without a value takes it back."""
    done = command("chat", "--max-tokens", "2", input="/set temperature hot\nHello\n/set temperature\nHello\n")
    assert "temperature" in done.stderr
    assert len(done.stdout.splitlines()) >= 1


def test_a_cut_answer_is_marked(command: Command) -> None:
    """An answer that max_tokens ended says so, on standard error."""
    done = command("chat", "--temperature", "0", "--max-tokens", "4", "Hello")
    assert done.stderr == "[cut off after 4 tokens: max_tokens or end of context]\n"


def test_a_pasted_text_is_one_turn(observed: Running, tmp_path: Path) -> None:
    """In a terminal with bracketed paste two lines are one message, and what was typed is kept in a private file."""
    history = tmp_path / "state" / "chat_history"
    with chatting(observed, term="xterm", state=history.parent) as (process, ours):
        read_until(ours, PASTE_ON)
        os.write(ours, b"\x1b[200~One\nTwo\x1b[201~\r")
        shown = read_until(ours, PASTE_OFF)
        while PASTE_ON not in shown.rpartition(PASTE_OFF)[2]:  # the answer, then the next prompt
            shown += read_until(ours, PASTE_ON, seconds=120)
        os.write(ours, b"\x04")
        assert process.wait(240) == 0
    assert [line for line in history.read_text().splitlines() if line.startswith("+")] == ["+One", "+Two"]
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("words", [["serve", "--help"], ["help", "settings"]])
def test_help_lists_the_engine_settings(words: list[str]) -> None:
    """Every setting that -C takes is listed, with its default and what it may be."""
    shown = CliRunner().invoke(cli, words).stdout
    for setting, default, allowed in EngineSettings.described():
        assert (f"{setting} = {json.dumps(default)}: {allowed}" in shown) == (setting != "in_process")
