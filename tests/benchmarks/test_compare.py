"""The comparison of engines: workloads, statistics, the protocol and the tables."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import compare
import psutil
import pytest
import transformers as tf
from comparison import contenders, drive, environments, figures, kernels, tables, texts, workloads
from comparison.adapters.http_streams import Stream
from comparison.adapters.ours import Ours
from comparison.protocol import Failed, Process
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.native import library

FAKE = Path(__file__).parent / "fake_contender.py"
BENCHMARKS = str(Path(drive.__file__).parents[1])


class Words:
    """A tokenizer with one token per word."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self._words += [word for word in text.split() if word not in self._words]
        return [self._words.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self._words[i] for i in ids)


def all_of(seed: str, quick: bool = False) -> list[workloads.Workload]:
    writer = workloads.Writer(Words(), seed)
    made = workloads.steady(quick, [1, 8], 16) + workloads.traffic(quick, 2.0)
    return [make(writer) for make in made]


def test_a_seed_decides_all() -> None:
    """The same seed gives the same prompts, lengths and arrivals, and another seed others."""
    assert all_of("1-0") == all_of("1-0")
    assert all_of("1-0") != all_of("1-1")


def test_prompts_differ_from_their_first_word_on_but_for_a_shared_one() -> None:
    """Within a workload no prompt begins as another does, except after one system prompt."""
    for workload in all_of("1-0"):
        beginnings = {request.prompt[0] for request in workload.requests}
        assert len(beginnings) == (1 if workload.name == "shared prompt" else len(workload.requests))
        assert len({request.id for request in workload.requests}) == len(workload.requests)
        assert [r.at for r in workload.requests] == sorted(r.at for r in workload.requests)


def test_lengths_are_those_asked_for() -> None:
    """Prompts of closed loops have 100 tokens, long prompts their length, and chats a wide range."""
    by_name = {workload.name: workload for workload in all_of("1-0")}
    assert {len(r.prompt) for r in by_name["8 callers"].requests} == {100}
    assert {len(r.prompt) for r in by_name["prompt of 4000"].requests} == {4000}
    lengths = [len(r.prompt) for r in by_name["chats"].requests]
    assert max(lengths) > 4 * min(lengths)
    assert {len(r.prompt) > 800 for r in by_name["shared prompt"].requests} == {True}
    assert sorted({r.at for r in by_name["bursts"].requests}) == [0.0, 4.0, 8.0]


class Ticking(drive.Engine):
    """An engine of one token a step of a second; ``maximum`` is the max number of concurrent requests."""

    def __init__(self, takes: float = 1.0) -> None:
        self.now, self.maximum, self._takes, self._left = 0.0, 0, takes, dict[str, int]()

    def add(self, request: dict[str, Any]) -> None:
        self._left[request["id"]] = request["max_tokens"]
        self.maximum = max(self.maximum, len(self._left))

    def step(self, wait: float) -> list[drive.Piece]:
        self.now += self._takes
        pieces = [drive.Piece(name, [7], "", left == 1) for name, left in self._left.items()]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return pieces

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, requests: list[dict[str, Any]], callers: int | None, limit: float = 100.0) -> dict[str, Any]:
        return drive.run(self, requests, callers, limit, lambda: self.now, self.sleep)


def asked(count: int, tokens: int = 2, apart: float = 0.0) -> list[dict[str, Any]]:
    return [{"id": str(i), "prompt": [i], "max_tokens": tokens, "at": i * apart} for i in range(count)]


def test_a_closed_loop_keeps_its_callers_busy() -> None:
    """A closed loop never runs more than ``callers`` at once, starts the next as one ends, and answers all."""
    engine = Ticking()
    answer = engine.run(asked(5), 2)
    assert engine.maximum == 2
    assert [one["asked"] for one in answer["answers"]] == [0, 0, 2, 2, 4]
    assert all(one["tokens"] == [7, 7] for one in answer["answers"])
    assert answer["cut"] == 0


def test_requests_come_at_their_times_whatever_runs() -> None:
    """In an open loop a request is due at its time, from which its time to first token counts."""
    answer = Ticking().run(asked(3, 4, 2.5), None)
    assert [one["asked"] for one in answer["answers"]] == [0, 2.5, 5.0]
    assert [one["events"][0][0] for one in answer["answers"]] == [1, 4, 6]
    assert figures.figures(answer, 6.0).ttft_p50 == 1000.0


def test_a_run_is_cut_at_its_limit() -> None:
    """A run stops at its time limit and counts the requests that were not finished."""
    answer = Ticking().run(asked(4, 10), 1, 15.0)
    assert answer["cut"] == 3
    assert len(answer["answers"]) == 2


def loaded_by(takes: float, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the chats sent to an engine with steps of ``takes`` seconds at 0.8 of its capacity."""
    ran = []

    class Idle:
        def cpu_seconds(self) -> float:
            return 0.0

    def run(name: str, workload: workloads.Workload) -> dict[str, Any]:
        requests = [asdict(request) for request in workload.requests]
        ran.append(requests)
        return Ticking(takes).run(requests, workload.callers, 1e9)

    args = argparse.Namespace(contenders=["ours int8"], seed=1)
    comparison = compare.Comparison(args, None, None, Words())  # type: ignore[arg-type]
    comparison.processes["ours int8"] = Idle()  # type: ignore[assignment]
    monkeypatch.setattr(comparison, "run", run)
    comparison.under_load(0, 0.8)
    return ran[1]


def test_load_is_a_share_of_what_an_engine_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine four times as slow gets the same chats four times as far apart."""
    fast, slow = loaded_by(1.0, monkeypatch), loaded_by(4.0, monkeypatch)
    assert [one["prompt"] for one in slow] == [one["prompt"] for one in fast]
    assert [one["at"] for one in slow] == pytest.approx([4 * one["at"] for one in fast])
    assert fast[-1]["at"] > 0


def test_figures_of_known_times() -> None:
    """Figures are right for known times: tokens a second to the last token, TTFT from the due time, mean TPOT and
    gaps."""
    events = [(0.5, 1), (0.6, 1), (0.9, 2)]
    answer = {"seconds": 9.0, "cut": 0, "answers": [{"asked": 0.25, "events": events}, {"asked": 0.5, "events": []}]}
    found = figures.figures(answer, 2.0)
    assert found.tokens_per_second == pytest.approx(4 / 0.9)
    assert found.tokens_per_cpu_second == 2.0
    assert found.ttft_p50 == pytest.approx(250)
    assert found.tpot_p50 == pytest.approx(400 / 3)
    assert (found.gap_p99, found.gap_max) == (pytest.approx(300), pytest.approx(300))
    whole = figures.figures(answer, 2.0, streams=False)
    assert (whole.ttft_p50, whole.tpot_p50, whole.gap_p99, whole.gap_max) == (None,) * 4
    nothing = figures.figures({"seconds": 1.0, "cut": 1, "answers": []}, 0.0)
    assert (nothing.tokens_per_second, nothing.tokens_per_cpu_second) == (None, None)


def rated(*rates: float | None) -> list[figures.Figures]:
    empty = dict.fromkeys(figures.Figures.__dataclass_fields__)
    return [
        figures.Figures(**{**empty, "requests": 1, "cut": 0, "seconds": 1.0, "tokens_per_second": rate})
        for rate in rates
    ]


def test_ratios_are_within_a_round() -> None:
    """Ratios are medians of the ratios within a round, so that a slow moment of the machine affects both."""
    assert figures.ratio(rated(100, 10, 50), rated(50, 5, 100)) == 0.5
    assert figures.ratio(rated(100, None), rated(None, 5)) is None
    assert figures.medians(rated(1.0, 3.0, None))["tokens_per_second"] == 2.0


def test_texts_are_judged_by_the_reference() -> None:
    """A different text of equal likelihood is only not the same, and an unlikely one is nonsense."""
    reference = {"a": [1, 2, 3], "b": [4, 5]}
    own = {"a": 0.5, "b": 0.5}
    other = texts.compared(reference, {"a": [1, 2, 9], "b": [8, 8]}, own | {"their a": 0.7, "their b": 0.9})
    assert (other["same"], other["of"], other["each"], other["nonsense"]) == (2, 5, [2, 0], False)
    wrong = texts.compared(reference, {"a": [9], "b": [9]}, own | {"their a": 8.0, "their b": 7.0})
    assert wrong["nonsense"]
    assert texts.compared(reference, {}, own)["nonsense"]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Process]:
    process = Process([sys.executable, str(FAKE)], tmp_path / "log", {"PYTHONPATH": BENCHMARKS})
    yield process
    process.close()


def test_a_contender_is_asked_by_lines(fake: Process) -> None:
    """A contender loads, runs and goes on after an error; output of libraries is no answer, and its death is
    reported."""
    with pytest.raises(Failed, match="ValueError: no room"):
        fake.ask({"do": "load", "model": "m", "options": {"fails": "no room"}}, 60)
    told = fake.ask({"do": "load", "model": "m", "options": {}}, 60)
    assert (told["versions"]["model"], told["servers"]) == ("m", False)
    answer = fake.ask({"do": "run", "requests": asked(3), "callers": 2, "limit": 60}, 60)
    assert [one["tokens"] for one in answer["answers"]] == [[1, 0]] * 3
    assert fake.cpu_seconds() > 0
    dies = [{"id": "x", "prompt": [666], "max_tokens": 1, "at": 0}]
    with pytest.raises(Failed, match="its process ended"):
        fake.ask({"do": "run", "requests": dies, "callers": 1, "limit": 60}, 60)


def test_nothing_of_a_contender_is_left(fake: Process) -> None:
    """Closing a contender ends its threads and any server that it left running."""
    told = fake.ask({"do": "load", "model": "m", "options": {}}, 60)
    server = psutil.Process(int(told["versions"]["server"]))
    fake.close()
    psutil.wait_procs([server], 60)
    assert not server.is_running()


def test_a_contender_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """A contender without an answer in time, or with an invalid one, fails with that reason."""
    silent = Process([sys.executable, "-c", "import sys; print('oh', flush=True); sys.stdin.read()"], tmp_path / "log")
    with pytest.raises(Failed, match="no JSON"):
        silent.ask({"do": "load"}, 60)
    with pytest.raises(Failed, match="in time"):
        silent.ask({"do": "load"}, 0.01)
    silent.close()


def result(**more: Any) -> dict[str, Any]:
    found = {"tokens_per_second": 123.4, "ratio": 1.0, "ttft_p50": 56.7, "tokens_per_cpu_second": 61.0}
    ours = {"contender": "ours int8", "workloads": {"1 callers": found, "bursts": found}, "texts": None, "error": None}
    out = {"contender": "vLLM", "workloads": {}, "texts": None, "error": "vllm could not be made: no disk"}
    names = [{"name": "1 callers", "kind": "steady"}, {"name": "bursts", "kind": "traffic"}]
    machine = {"cpu": "Some CPU", "flags": ["amx_int8"], "cores": 2}
    base = {
        "machine": machine,
        "load_average": [0.1, 2.0],
        "load": "greedy",
        "rounds": 2,
        "workloads": names,
        "rows": [ours, out],
    }
    return base | more


def test_tables_say_what_was_measured_and_who_is_missing() -> None:
    """A table names the CPU with its instructions, has a row for each contender, and a reason for each missing one."""
    shown = tables.markdown(result())
    assert "Some CPU (amx_int8), 2 cores; greedy; medians of 2 rounds; load average 0.1 before and 2.0 after." in shown
    assert "| ours int8 | 123 " in shown
    assert "- vLLM: vllm could not be made: no disk" in shown
    assert tables.texts({"same": 1, "of": 9, "loss": 7.5, "loss_of_reference": 0.5, "nonsense": True}) == (
        "**nonsense** (1 of 9; 7.5, 0.5)"
    )


def test_tables_of_a_load_say_what_each_can_do() -> None:
    """A table of a load has each contender's chats a second beside its figures at a share of them, without cut
    chats."""
    names = [{"name": "chats at once", "kind": "loaded"}, {"name": "chats at 80%", "kind": "loaded"}]
    able = {"requests": 64, "cut": 4, "seconds": 10.0}
    row = {"contender": "ours int8", "workloads": {"chats at once": able, "chats at 80%": {"ttft_p50": 56.7}}}
    shown = tables.markdown(result(workloads=names, rows=[row]))
    assert "chats at 80%:" in shown
    assert "| ours int8 | 6.00 " in shown


WITHOUT_AMX = """
import sys
from comparison.without_amx import refuse_amx

refuse_amx()
import subprocess

tells = "from mlflow_llm.serving.engine.native import library; print(library.instruction_set())"
print(subprocess.run([sys.executable, "-c", tells], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only CPUs of x86-64 have AMX")
def test_amx_can_be_refused_to_all() -> None:
    """A process without AMX permission passes that on to its children, and our kernels use other instructions."""
    environment = {**os.environ, "PYTHONPATH": BENCHMARKS}
    command = [sys.executable, "-c", WITHOUT_AMX]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == library.instruction_set().removesuffix("+amx")


def test_a_table_without_amx_says_so() -> None:
    """A table of a run without AMX says that no contender was allowed to use it, and does not list it."""
    shown = tables.markdown({**result(), "without_amx": True})
    assert "amx_int8" not in shown
    assert "The CPU has AMX, which no contender was allowed to use" in shown
    assert "amx_int8" in tables.markdown(result())


def test_tables_without_anyone() -> None:
    """A run in which no contender could take part still gives the reasons."""
    assert "no disk" in tables.markdown(result(rows=[result()["rows"][1]]))


def test_tables_go_between_their_marks() -> None:
    """Tables replace the text between their marks and keep the text around; a document without marks is refused."""
    document = f"a\n{tables.BEGIN}\nold\n{tables.END}\nz"
    assert tables.insert(document, "new") == f"a\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nz"
    with pytest.raises(ValueError, match="comparison"):
        tables.insert("a", "new")


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed environment gives the installer's last line as reason, and a finished one is not made again."""
    made = environments.Environments(tmp_path)
    with pytest.raises(Failed, match="openvino could not be made: no such package"):
        made.run("openvino", [sys.executable, "-c", "raise SystemExit('no such package')"])
    runs: list[list[str]] = []
    monkeypatch.setattr(made, "run", lambda name, command: runs.append(command))
    made.python("openvino")
    assert len(runs) == 2
    made.python("openvino")
    assert len(runs) == 2


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streams_are_read_in_any_pieces(size: int) -> None:
    """Events, chunk sizes and the end of a stream are recognised however the bytes are split."""
    events = [b'data: {"text": "a"}\n\n', b'data: {"text": "b"}\n\n', b"data: [DONE]\n\n"]
    data = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
    stream = Stream({"id": "r"})
    found = [event["text"] for i in range(0, len(data), size) for event in stream.take(data[i : i + size])]
    assert found == ["a", "b"]
    assert stream.over


def test_a_refusal_is_shown() -> None:
    """A status other than 200 is an error with its body, and so is a connection closed without an answer."""
    with pytest.raises(RuntimeError, match=r"400.*no such field"):
        Stream({}).take(b"HTTP/1.1 400 Bad Request\r\n\r\nno such field")
    with pytest.raises(RuntimeError, match="closed"):
        Stream({}).take(b"")


def test_a_model_that_cannot_be_converted_is_a_reason(tmp_path: Path) -> None:
    """Any error while a contender's model is made leaves that contender out, by the error's name."""

    def broken(*_: object) -> dict[str, Any]:
        raise KeyError("general.architecture")

    made = environments.Environments(tmp_path)
    with pytest.raises(Failed, match="could not be made: KeyError"):
        contenders.made(
            contenders.Contender(adapter="ours", made=broken), made, environments.Models(made, tmp_path, None)
        )


def test_every_contender_can_be_started() -> None:
    """Each has an adapter and, unless it is ours, a recipe for its environment."""
    adapters = Path(drive.__file__).parent / "adapters"
    for contender in [*contenders.CONTENDERS.values(), contenders.REFERENCE]:
        assert (adapters / f"{contender.adapter}.py").is_file()
        assert contender.environment is None or contender.environment in environments.RECIPES


def test_the_command_lists_the_contenders() -> None:
    """``compare.py --list`` works where no contender is installed."""
    command = [sys.executable, f"{BENCHMARKS}/compare.py", "--list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == list(contenders.CONTENDERS)


def bundle_of_ours(directory: Path) -> str:
    return save_bundle(make_model(tf.LlamaConfig(**COMMON | {"hidden_size": 64})), directory).model_dir


@pytest.mark.skipif(library.library() is None, reason="no compiler, or a CPU without AVX2")
def test_each_of_our_tokens_is_an_event_of_its_own(tmp_path: Path) -> None:
    """Our tokens arrive one a step, so that the time to first token is not that of several."""
    answer = drive.run(Ours(bundle_of_ours(tmp_path), {}), asked(2, 4), 1, 60)
    assert [count for one in answer["answers"] for _, count in one["events"]] == [1] * 8


def test_our_contender_needs_the_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library, or one of another version, is an error instead of a measurement of torch."""
    monkeypatch.setattr(library, "loaded", lambda: "they are not compiled")
    with pytest.raises(RuntimeError, match="torch's run: they are not compiled"):
        Ours(bundle_of_ours(tmp_path), {})


def test_a_server_is_asked_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's health decides whether the endpoint runs natively."""
    state = {"kernels": "native"}
    monkeypatch.setattr(kernels, "urlopen", lambda url: io.StringIO(json.dumps({"endpoints": {"compare": state}})))
    kernels.require_served_natively("http://there", "compare")
    state |= {"kernels": "torch", "kernels_reason": "another version"}
    with pytest.raises(RuntimeError, match="torch's run: another version"):
        kernels.require_served_natively("http://there", "compare")
