"""``benchmarks/gpu.py`` with a tiny model on a CPU, part by part, and its script."""

from __future__ import annotations

import http.server
import json
import math
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import gpu
import pytest
import torch
from gpu_parts import families, floor, here, inputs, ours, peers, served, suite, table, wheels
from gpu_parts.callers import MANY, Callers
from gpu_parts.plan import FOLDERS, INSIDE, PARTS, SERVER, Contender, Plan, Record
from gpu_parts.processes import in_a_process
from streams import encode

from mlflow_llm.serving.interface.constraint import Grammar

SCRIPT = Path(gpu.__file__).with_suffix(".sh")
NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and the script would use it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, a tokenizer and adapters."""
    made = tmp_path_factory.mktemp("weights")
    (record,) = inputs.make(plan(made))
    assert record == {"part": "inputs", "model": "tiny"}
    return made


def plan(folder: Path, *parts: str) -> Plan:
    args = gpu.read([*parts, "--profile", "--size", "tiny", "--device", "cpu"])
    return gpu.plan_of(args, str(folder))


def finite(records: list[Record], what: str = "seconds") -> bool:
    return all(math.isfinite(record[what]) and record[what] > 0 for record in records)


def test_prompts_decoding_features_and_kernels(folder: Path) -> None:
    """One engine gives the figures of four parts: every burst and feature has a time, every profile its kernels."""
    chosen = plan(folder, "prefill", "decode", "features")
    assert "profile" in chosen.parts
    found = json.loads(json.dumps(list(ours.run(chosen))))
    of = {part: [record for record in found if record["part"] == part] for part in PARTS}
    assert [(r["count"], r["length"]) for r in of["prefill"]] == [(1, 24), (2, 60)]
    assert [r["count"] for r in of["decode"]] == [1, 3]
    assert [r["feature"] for r in of["features"]] == [*ours.FEATURES, ours.GRAMMAR, ours.MIXED]
    assert finite([*of["prefill"], *of["decode"], *of["features"]]), found
    assert [r["what"] for r in of["profile"]] == ["a prompt of 60", "a step of 1", "a step of 8"]
    for record in of["profile"]:
        sums = sum(kernel["ms"] for kernel in record["kernels"])
        assert record["device_ms"] == pytest.approx(sums)
        assert record["kernels"][0]["ms"] == max(kernel["ms"] for kernel in record["kernels"]) > 0
    text = table.Table(chosen, inputs.config_in(chosen), found).text()
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert text.count("× the floor") == 2
    assert text.count("× plain") == len(of["features"]) - 1
    assert "attention: torch; prefill: torch; graphs: none" in "\n".join(table.notes(found))
    assert "| kernel |" in table.kernels(found)


def test_weights_in_fp8(folder: Path) -> None:
    """The contender with weights in fp8 says by which products it ran."""
    chosen = plan(folder).but(by="fp8", quantization="fp8", parts=("decode",), sequences=(1,))
    engine, step = ours.run(chosen)
    assert (step["by"], step["count"]) == ("fp8", 1)
    assert "few rows are multiplied as floats" in engine["reasons"][-1]


def test_a_run_without_steps_launched_ahead_is_ours(folder: Path) -> None:
    """A run that asks for no asynchronous scheduling has the device's speeds and our figures under our name."""
    device, _, step = ours.run(plan(folder).but(async_scheduling="none", parts=("decode",), sequences=(1,)))
    assert (device["part"], step["by"]) == ("device", "ours")


def test_a_feature_that_fails_is_said_and_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature that the engine refuses is a record with the reason, and the next is measured."""
    wrong = {"grammar": Grammar(source="no grammar", field="response_format")}
    monkeypatch.setattr(ours, "FEATURES", {"plain": {}, "wrong": wrong, "min_p": {"min_p": 0.1}})
    found = list(ours.run(plan(folder).but(parts=("features",))))
    of = {record["feature"]: record for record in found if record["part"] == "features"}
    assert "response_format" in of["wrong"]["error"]
    assert finite([of["plain"], of["min_p"], of[ours.GRAMMAR]])


def test_http_beside_the_same_in_process(folder: Path) -> None:
    """A server streams to all callers, and each number of them stands beside the engine in this process."""
    chosen = plan(folder)
    found = list(served.run(chosen))
    rates = {(r["by"], r["count"]): r["rate"] for r in found if "rate" in r}
    assert set(rates) == {(by, count) for by in (INSIDE, SERVER) for count in (1, 3)}
    assert all(rate > 0 for rate in rates.values())
    assert table.Table(chosen, inputs.config_in(chosen), found).text().count("of in process") == 2


class Streamed(http.server.BaseHTTPRequestHandler):
    """A stream of one event for each request, whose connections are counted."""

    protocol_version = "HTTP/1.1"
    peers: ClassVar[set[tuple[str, int]]] = set()

    def do_POST(self) -> None:
        self.peers.add(self.client_address)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"8\r\ndata: x\n\r\n0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


def test_many_callers_in_several_processes() -> None:
    """Each request has a connection of its own, whichever process sends it."""
    requests = [encode("/", {"number": number}) for number in range(MANY)]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streamed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Callers(server.server_port, processes=2) as callers:
                assert callers.rate(requests, 1) > 0
            assert len(Streamed.peers) == MANY
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("peer", "name"), [(peers.static, peers.STATIC), (peers.compiled, peers.COMPILED), (peers.batched, peers.BATCHED)]
)
def test_transformers_decodes_beside_ours(folder: Path, peer: Contender, name: str) -> None:
    """A peer's steps are measured for each number of sequences, and the table says how ours compares."""
    chosen = plan(folder)
    found = list(peer(chosen))
    assert [(record["by"], record["count"]) for record in found] == [(name, 1), (name, 3)]
    assert all(("seconds" in record) != ("error" in record) for record in found)
    own: list[Record] = [{"part": "decode", "by": "ours", "count": n, "seconds": 0.5} for n in (1, 3)]
    theirs = [peers.record(record["by"], record["count"], 1.0) for record in found]
    assert table.Table(chosen, inputs.config_in(chosen), own + theirs).text().count("ours is 2.00 × as fast") == 2


def test_a_step_as_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a run beside its tokens does not count, nor does one run that took longer by chance."""
    clock, chance = [0.0], iter([50.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0])

    def run(tokens: int) -> None:
        clock[0] += 3 + 0.25 * tokens + next(chance)

    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock[0])
    assert peers.difference(run, 8) == 0.25
    assert "chance" in peers.record(peers.STATIC, 1, -0.1)["error"]


def test_the_pace_of_texts_that_grow_together() -> None:
    """Only gaps in which every text grows count."""
    assert peers.pace([[0.0, 9.0, 10.0, 12.0, 20.0], [9.0, 10.0, 12.0]]) == 1.5
    with pytest.raises(RuntimeError, match="no step in which all"):
        peers.pace([[0.0, 1.0], [2.0, 3.0]])


def test_architectures_equal_generate(tmp_path: Path) -> None:
    """Each process takes its share of the families; one that fails is named with its error."""
    chosen = plan(tmp_path).but(families=("llama", "gpt2", "wide llama", "no such"))
    first, third = families.run(chosen.but(share=(0, 2)))
    assert (first["family"], first["equal"], third["family"], third["equal"]) == ("llama", True, "wide llama", True)
    second, fourth = families.run(chosen.but(share=(1, 2)))
    assert (second["equal"], fourth["equal"], fourth["error"]) == (True, False, "KeyError: 'no such'")
    rows = table.Table(chosen, inputs.config_of("tiny"), [first, second, third, fourth]).rows()
    assert rows == [("families", "3 of 4 equal generate()", "", "", "not: no such")]
    assert gpu.failed(fourth)
    assert not gpu.failed(first)


def test_pytest_is_run_and_counted(tmp_path: Path) -> None:
    """Tests run in a process of their own, and those that fail are named."""
    (tmp_path / "test_some.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    (record,) = suite.run(plan(tmp_path).but(tests=(str(tmp_path),)))
    assert (record["counts"], record["status"]) == ({"failed": 1, "passed": 1}, 1)
    assert [name.rpartition("::")[2] for name in record["failed"]] == ["test_wrong"]
    assert gpu.failed(record)


def test_tests_that_take_too_long_are_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its limit pytest says what it found so far, and that is no failure."""
    ready, ended = tmp_path / "ready", suite.ended
    lines = ("import pathlib, threading", "def test_right(): pass", "def test_endless():")
    waits = (f"    pathlib.Path({str(ready)!r}).touch()", "    threading.Event().wait()")
    (tmp_path / "test_some.py").write_text("\n".join((*lines, *waits)))

    def until_ready(process: Any, seconds: float) -> bool:
        while not ready.exists():
            assert not ended(process, 0.05)
        monkeypatch.setattr(suite, "ended", ended)
        return False

    monkeypatch.setattr(suite, "ended", until_ready)
    monkeypatch.setattr(suite, "SUMMARY", 600.0)
    (record,) = suite.run(plan(tmp_path).but(tests=(str(tmp_path),)))
    assert record["counts"] == {"passed": 1}
    assert "not done in" in record["cut"]
    assert not gpu.failed(record)


def test_the_folders_of_tests_exist() -> None:
    """Every folder of tests that the script runs has tests."""
    assert all(list((suite.ROOT / folder).glob("test_*.py")) for folder in FOLDERS)


def test_the_floor() -> None:
    """The floor of a one-sequence step is the time to read every multiplied weight of Llama 3.2 1B and its keys and
    values; a prompt has two operations a weight and token."""
    config = inputs.config_of("1b")
    seconds = floor.floor_seconds
    assert seconds(config, 2, 1, 0, 1.0) == pytest.approx(2 * 1.2358e9, rel=0.01)
    more = seconds(config, 2, 8, 100, 1.0) - seconds(config, 2, 8, 0, 1.0)
    saved = seconds(config, 2, 1, 0, 1.0) - seconds(config, 2, 1, 0, 1.0, 1)
    assert saved == pytest.approx(1.2358e9 - config.hidden_size * config.vocab_size, rel=0.01)
    assert more == 8 * 100 * 2 * 512 * 16 * 2
    assert floor.prefill_operations(config, 2, 1024) == pytest.approx(2 * 1024 * 2 * 0.973e9, rel=0.1)


def test_a_run_cut_by_time(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A contender that is ended keeps its records, the parts after it have no time, and the table says so."""

    def run(name: str, plan: Plan, seconds: float) -> list[Record]:
        return [{"part": "decode", "by": "ours", "count": 1, "seconds": 0.5}, {"part": name, "cut": "not done in 0 s"}]

    file = tmp_path / "found.json"
    asked = ["decode", "http", "--size", "tiny", "--device", "cpu", "--weights", str(folder), "--json", str(file)]
    assert gpu.main(asked, run) == 0
    told = capsys.readouterr().out
    assert "| decode | 1 | 2 | 500.0 |" in told
    assert "- ours: cut: not done in 0 s" in told
    assert gpu.main([*asked, "--seconds", "0"], run) == 0
    assert [record["cut"] for record in json.loads(file.read_text())["records"]] == ["no time was left"] * 4


def test_records_are_written_and_shown_as_they_come(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a contender runs, the file, the log of tests and the output have what it said so far."""
    file = tmp_path / "found.json"

    def run(name: str, plan: Plan, seconds: float) -> Iterator[Record]:
        if name == "ours":
            yield {"part": "decode", "by": "ours", "count": 1, "seconds": 0.5}
            assert json.loads(file.read_text())["records"][-1]["seconds"] == 0.5
            assert "| decode | 1 | 2 | 500.0 |" in capsys.readouterr().out
            yield {"part": "tests", "counts": {"passed": 7}, "log": "seven dots"}
            assert file.with_suffix(".tests.txt").read_text() == "seven dots"
            assert "| tests | 7 passed |" in capsys.readouterr().out
            yield {"part": "features", "feature": "min_p", "count": 1, "error": "no memory"}
            assert capsys.readouterr().out == "- features, min_p: no memory\n"

    asked = ["decode", "--size", "tiny", "--device", "cpu", "--weights", str(folder), "--json", str(file)]
    assert gpu.main(asked, run) == 1
    assert capsys.readouterr().out.count("| decode | 1 | 2 | 500.0 |") == 1
    assert not list(tmp_path.glob("*.new"))


def test_a_signal_ends_the_script_with_what_there_is(folder: Path, tmp_path: Path) -> None:
    """SIGTERM to the script ends the parts that run: the table and the JSON have what was found until then."""
    ready, out = tmp_path / "ready", tmp_path / "out"
    os.mkfifo(ready)
    lines = ("import threading", "def test_right(): pass", "def test_endless():")
    waits = (f"    open({str(ready)!r}, 'w').close()", "    threading.Event().wait()")
    (tmp_path / "test_some.py").write_text("\n".join((*lines, *waits)))
    command = ["bash", str(SCRIPT), "tests", "http", "--size", "tiny", "--device", "cpu", "--weights", str(folder)]
    command += ["--tests", str(tmp_path / "test_some.py")]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    with out.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        ready.read_text()  # until the endless test runs
        process.terminate()
        assert process.wait(600) == 128 + signal.SIGTERM, out.read_text()
    assert "- tests: cut: ended by SIGTERM" in out.read_text()
    assert "- http: cut: ended by SIGTERM" in out.read_text()
    found = json.loads((tmp_path / "gpu-tiny.json").read_text())
    (counted,) = [record for record in found["records"] if "counts" in record]
    assert counted["counts"] == {"passed": 1}
    assert "KeyboardInterrupt" in (tmp_path / "gpu-tiny.tests.txt").read_text()


@pytest.mark.parametrize("cpus", [2, 64])
def test_weights_are_made_beside_the_checks_if_there_are_cpus(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    """With few CPUs weights are made before the tests and families, otherwise meanwhile; both have ``--checks``."""
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: cpus)
    tests, made, limits = threading.Event(), threading.Event(), []

    def run(name: str, plan: Plan, seconds: float) -> list[Record]:
        if name == "inputs":
            assert cpus == 2 or tests.wait(60)
            made.set()
        if name == "tests":
            assert cpus == 64 or made.is_set()
            limits.append((plan.limit, seconds))
            tests.set()
        if name == "fp8":
            assert plan.parts == ("decode",)  # and no prompts, which were not named
        return [{"part": name}]

    file = tmp_path / "found.json"
    asked = ["tests", "families", "decode", "--size", "tiny", "--device", "cpu", "--weights", str(folder)]
    assert gpu.main([*asked, "--json", str(file), "--checks", "50"], run) == 0
    assert limits == [(30, 50)]
    parts = {record["part"] for record in json.loads(file.read_text())["records"]}
    assert parts == {"inputs", "tests", "families", "ours", "fp8"}


def test_weights_alone(tmp_path: Path) -> None:
    """A checkpoint is made without a run."""
    assert gpu.main(["--run", "weights", "--size", "tiny", "--device", "cpu", "--model", str(tmp_path)]) == 0
    assert (tmp_path / "model.safetensors").is_file()


def test_a_run_of_named_parts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part that is named is in the table, with weights in fp8 beside those of the model."""

    def run(name: str, plan: Plan, seconds: float) -> list[Record]:
        return list(gpu.contender(name)(plan))

    file = tmp_path / "found.json"
    asked = ["prefill", "decode", "--size", "tiny", "--device", "cpu", "--weights", str(folder), "--json", str(file)]
    assert gpu.main([*asked, "--sequences", "1"], run) == 0
    told = capsys.readouterr().out
    assert [f"| {what} |" in told for what in ("prefill | 2 × 60", "decode | 1", "decode | 1, fp8")] == [True] * 3
    found = json.loads(file.read_text())
    assert str(folder) not in json.dumps(found)
    assert {record["by"] for record in found["records"] if record["part"] == "decode"} == {"ours", "fp8"}


def test_records_of_a_process_that_fails(tmp_path: Path) -> None:
    """A contender's error is its last line."""
    (record,) = in_a_process("http", plan(tmp_path / "nothing"), 300)
    assert record["part"] == "http"
    assert "error" in record
    assert gpu.failed(record)


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A part that does not exist is named, with those that do."""
    with pytest.raises(SystemExit):
        gpu.read(["decode", "prefil"])
    assert "part prefil; expected some of tests, families, prefill" in capsys.readouterr().err


@NO_DEVICE
def test_the_script_says_what_is_missing() -> None:
    """Without a device the script lists the machine's parts and ends with status 2."""
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "torch finds no CUDA device" in done.stdout
    assert f"torch {version('torch')}" in done.stdout


def wheel(folder: Path, name: str, release: str) -> None:
    """Write a wheel of one module."""
    with zipfile.ZipFile(folder / f"{name}-{release}-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}.py", f"RELEASE = {release!r}\n")
        info = f"{name}-{release}.dist-info"
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")


def test_the_script_with_wheels(tmp_path: Path) -> None:
    """The script installs what only the folder of wheels has for one run, runs the parts it is asked for, and writes
    JSON without the machine's folders."""
    own = tmp_path / "wheels"
    own.mkdir()
    for release in ("1.0", "2.0"):
        wheel(own, "not_installed_anywhere", release)
    wheel(own, "msgspec", version("msgspec"))
    lines = ("import not_installed_anywhere as found", "def test_newest(): assert found.RELEASE == '2.0'")
    (tmp_path / "test_some.py").write_text("\n".join(lines))
    command = ["bash", str(SCRIPT), "tests", "--wheels", str(own), "--size", "tiny", "--device", "cpu"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command += ["--tests", str(tmp_path / "test_some.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"of {own}: not-installed-anywhere\n" in done.stdout
    assert "| tests | 1 passed |" in done.stdout
    found = json.loads((tmp_path / "gpu-tiny.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    assert found["command"].startswith("bash benchmarks/gpu.sh")
    assert (tmp_path / "gpu-tiny.tests.txt").read_text()


def test_wheels_that_are_lacking(tmp_path: Path) -> None:
    """A wheel is lacking unless one of its versions in the folder is installed."""
    for name, release in (("msgspec", version("msgspec")), ("torch", "0.1"), ("absent", "1"), ("absent", "2")):
        wheel(tmp_path, name, release)
    assert wheels.lacking(tmp_path) == ["absent", "torch"]


@NO_DEVICE
def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A transformers that refuses the version of another library ends the run with its words."""

    def refuse(name: str) -> None:
        if name == "transformers":
            raise ImportError("huggingface-hub>=9 is required")

    monkeypatch.setattr(here, "import_module", refuse)
    assert here.main("cpu") == 2
    assert "transformers cannot be imported, so nothing can be run: huggingface-hub>=9 is required" in (
        capsys.readouterr().out
    )


def test_words_differ() -> None:
    """No two tokens of the tokenizer have the same text."""
    assert len({inputs.word(number) for number in range(5000)}) == 5000
