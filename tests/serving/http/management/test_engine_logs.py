"""Engine logs as Databricks' SDK requests them from a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import NotFound
from instant_model import write_instant_model
from serving_process import Running, running

from mlflow_llm.serving.control.plan import PlanDirectory
from mlflow_llm.serving.http.management.engine_logs import MAX_LINE, cleaned
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory, tail


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("logs")
    with running(write_instant_model(root), database=f"sqlite:///{root / 'serving.db'}") as found:
        yield found


def test_logs_by_databricks_sdk(server: Running) -> None:
    """The unmodified client reads both; the load's log ends where the engine is ready. A prompt is in neither."""
    endpoints = WorkspaceClient(host=server.url, token="token").serving_endpoints
    (endpoint,) = endpoints.list()
    found = endpoints.get(endpoint.name)
    (entity,) = found.config.served_entities
    endpoints.query(endpoint.name, prompt="a prompt that nobody else may read", max_tokens=2)
    load = endpoints.build_logs(endpoint.name, entity.name).logs
    assert load.splitlines()[0].rpartition(" INFO ")[2].startswith("mlflow_llm.engine: loading ")
    assert "ready, pid " in load.splitlines()[-1]
    parts = r"imports [\d.]+ s \([\d.]+ s of CPU time\), weights [\d.]+ s .*, in all [\d.]+ s"
    assert re.search(f"start: {parts}", load.splitlines()[-2])
    reported = endpoints.logs(endpoint.name, entity.name).logs
    assert load in reported
    assert "nobody else may read" not in reported
    with pytest.raises(NotFound, match="no served model 'other'"):
        endpoints.logs(endpoint.name, "other")
    with pytest.raises(NotFound, match="no endpoint 'other'"):
        endpoints.build_logs("other", entity.name)


def test_a_load_that_failed_is_remembered(tmp_path: Path) -> None:
    """The log of a failed load is kept by endpoint and served entity until the load succeeds."""
    plan_directory = PlanDirectory(tmp_path)
    assert plan_directory.failed_log("1", "models:/a/1") == ""
    plan_directory.save_failed_log("1", "models:/a/1", "out of memory")
    assert (plan_directory.failed_log("1", "models:/a/1"), plan_directory.failed_log("2", "models:/a/1")) == (
        "out of memory",
        "",
    )
    plan_directory.save_failed_log("1", "models:/a/1", "")
    assert plan_directory.failed_log("1", "models:/a/1") == ""


def test_a_log_of_any_size_is_read_at_its_end(tmp_path: Path) -> None:
    """The tail of a log has at most so many bytes, none from before the load, and none if there is no file."""
    state = StateDirectory(str(tmp_path), "key")
    Path(state.path).mkdir()
    log = Path(state.file("engine.log"))
    log.write_text("before\n" + "word " * 40_000 + "end")
    assert state.log_tail(7) == "end"
    state.keep_load_log(log.stat().st_size - 3)
    assert tail(state.file("load.log"), 100) == "end"
    state.keep_load_log(7)
    assert Path(state.file("load.log")).stat().st_size == 64 * 1024 - 3  # "word end" is not cut: whole words only
    assert tail(str(tmp_path / "none"), 5) == ""


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (100, "key sk-abcdefghijkl\nnext\n"),
        (25, "key sk-abcdefghijkl\nnext\n"),
        (24, "next\n"),
        (6, "next\n"),
        (5, "next\n"),
        (4, ""),
    ],
)
def test_no_line_is_shown_from_its_middle(tmp_path: Path, num_bytes: int, shown: str) -> None:
    """No line is shown from its middle, since half a key would not be recognised and masked."""
    log = tmp_path / "engine.log"
    log.write_text("key sk-abcdefghijkl\nnext\n")
    assert tail(str(log), num_bytes) == shown


def test_the_tail_of_a_long_line_begins_with_a_whole_word(tmp_path: Path) -> None:
    """The tail of a long line begins with a whole word, so that no part of a secret is shown."""
    log = tmp_path / "engine.log"
    log.write_text("key sk-abcdefghijkl is wrong")
    assert tail(str(log), 12) == "is wrong"
    assert tail(str(log), 10) == "is wrong"
    assert tail(str(log), 8) == "is wrong"
    assert tail(str(log), 7) == "wrong"
    assert tail(str(log), 3) == ""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("key sk-abcdefghijkl and hf_abcdefghij", "key *** and ***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("from postgresql://me:s3cret@host/db now", "from postgresql://me:***@host/db now"),
        ("GET /x?token=abc&a=1", "GET /x?token=***&a=1"),
        ("eyJhbGciOiJIUzI1NiJ9.e30.abc", "***"),
        ("a\x1b[31mred\u202e\x9b", "a[31mred"),
        ("tab\tstays, disk-full too", "tab\tstays, disk-full too"),
        ("x" * 5000, "x" * MAX_LINE),
    ],
)
def test_secrets_and_control_characters_are_taken_out(line: str, shown: str) -> None:
    """Secrets, and characters that move a terminal's cursor or reorder its text, are removed."""
    assert cleaned(f"{line}\nnext") == f"{shown}\nnext"
