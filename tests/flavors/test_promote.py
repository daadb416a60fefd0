"""``mlflow-llm promote``: an alias of a real registry, moved if MLflow's scorers find the other version better."""

from __future__ import annotations

import gc
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SCORERS = '''
"""Scorers of a user."""

from mlflow.entities import Feedback
from mlflow.genai import scorer


def length(outputs):
    """Return the share of twelve characters."""
    return len(outputs) / 12


@scorer
def asked_for(outputs, expectations):
    return "yes" if len(outputs) >= expectations["least"] else "no"


@scorer
def two(inputs, outputs):
    return [Feedback(name="asked", value=len(inputs["messages"])), Feedback(name="said", value=len(outputs))]


@scorer
def broken(outputs):
    raise RuntimeError("no score today")


NOTHING = 3
'''
MODEL = "promoted"
Promote = Callable[..., Result]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> Iterator[Path]:
    """Register three versions of a model: answers of 4, of 8 and of 4 bytes, the third with a context of 64 tokens."""
    root = tmp_path_factory.mktemp("promote")
    with own_stores(empty_store(root, f"mlflow-{uuid.uuid4().hex}.db")):
        mlflow.create_experiment("tests", artifact_location=(root / "artifacts").as_uri())
        mlflow.set_experiment("tests")
        for length, context in ((4, 256), (8, 256), (4, 64)):
            defaults = {"max_tokens": length, "ignore_eos": True, "logit_bias": {"64": 100.0}}
            llm.log_model(llama_dir, name="m", registered_model_name=MODEL, defaults=defaults, max_model_len=context)
        yield root
    gc.collect()  # SQLite connections of the store are closed when they are collected


@pytest.fixture
def promote(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Promote]:
    """Run the command in a folder with a module of scorers and ``data.jsonl``; the alias ``champion`` is version 1."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    (tmp_path / "house_scorers.py").write_text(SCORERS)
    bodies = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(6)]
    rows = [{"inputs": body, "expectations": {"least": 6}} for body in bodies]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    MlflowClient().set_registered_model_alias(MODEL, "champion", "1")

    def run(version: str, *more: str) -> Result:
        words = ["promote", f"models:/{MODEL}/{version}", "--alias", "champion", "--if-better"]
        return CliRunner().invoke(cli, [*words, "--min-requests", "3", "-C", "in_process=true", *more])

    yield run
    sys.modules.pop("house_scorers", None)


def champion() -> str:
    return str(MlflowClient().get_model_version_by_alias(MODEL, "champion").version)


def test_a_better_version_is_promoted(promote: Promote) -> None:
    """A version with higher scores gets the alias, and the run of MLflow has scores, difference, decision and reason;
    each version's scores are in a nested run, at its logged model."""
    scorers = ("--scorer", "house_scorers:length", "--scorer", "house_scorers:asked_for")
    done = promote("2", "--data", "data.jsonl", *scorers, "--margin", "0.1", "--confidence", "0.9", "--json")
    assert done.exit_code == 0, done.output
    assert champion() == "2"
    said = json.loads(done.stdout)
    assert (said["decision"], said["previous"], said["candidate"], said["scored"]) == ("promoted", "1", "2", 6)
    run = mlflow.get_run(said["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["current"] == f"models:/{MODEL}/1"
    assert run.data.params["candidate"] == f"models:/{MODEL}/2"
    metrics = run.data.metrics
    assert metrics["by_scorer/length/current_score"] == pytest.approx(4 / 12)
    assert metrics["by_scorer/length/candidate_score"] == pytest.approx(8 / 12)
    assert metrics["by_scorer/asked_for/difference"] == 1
    assert metrics["difference"] == pytest.approx((1 / 3 + 1) / 2)
    assert (metrics["standard_error"], metrics["wins"], metrics["losses"]) == (0, 6, 0)
    assert run.data.tags["mlflow_llm.decision"] == "promoted"
    assert "at least the margin of 0.1" in run.data.tags["mlflow_llm.reason"]
    nested = mlflow.search_runs(
        experiment_ids=[run.info.experiment_id],
        filter_string=f"tags.`mlflow.parentRunId` = '{run.info.run_id}'",
        output_format="list",
    )
    assert {one.data.tags["mlflow_llm.version"]: one.data.metrics["length/mean"] for one in nested} == {
        f"models:/{MODEL}/1": pytest.approx(4 / 12),
        f"models:/{MODEL}/2": pytest.approx(8 / 12),
    }
    table = mlflow.load_table("pairs.json", run_ids=[run.info.run_id])
    assert list(table["request"]) == [f"line {i}" for i in range(1, 7)]
    assert [len(text) for text in table["candidate"]] == [8] * 6


def test_a_version_that_is_not_better(promote: Promote) -> None:
    """A version without higher scores leaves the alias where it is, with exit status 3 and the reason."""
    done = promote("3", "--data", "data.jsonl", "--scorer", "house_scorers:length", "--margin", "0.02")
    assert done.exit_code == 3, done.output
    assert champion() == "1"
    assert f"{MODEL}@champion stays at 1" in done.stdout
    assert "below the margin of 0.02" in done.stdout
    run = mlflow.get_run(done.stdout.split()[-1])
    assert run.data.tags["mlflow_llm.decision"] == "not_better"


def test_a_candidate_that_fails(promote: Promote, tmp_path: Path) -> None:
    """A candidate that refuses a request which the other version answers is not better, whatever its scores are."""
    rows = [{"prompt": "a" * 80}, {"custom_id": "b", "body": {"prompt": "b"}}, {"prompt": "c"}]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = promote("3", "--data", "plain.jsonl", "--scorer", "house_scorers:length", "--margin", "0.02")
    assert done.exit_code == 3, done.output
    assert champion() == "1"
    assert "failed at 1 requests that the current version answered" in done.stdout
    assert "line 1, candidate: 400: " in done.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--min-requests", "7"), "--min-requests: 6 requests were answered by both versions, fewer than 7"),
        (("--scorer", "house_scorers:broken"), "0 requests were scored for both versions, fewer than 3 (broken: no sc"),
    ],
)
def test_data_that_are_too_few(promote: Promote, more: tuple[str, ...], said: str) -> None:
    """Too few answers or scores are refused by name, and the run says so; the alias stays."""
    base = ("--scorer", "house_scorers:length", "--margin", "0.02", "--data", "data.jsonl")
    done = promote("2", *base, *more)
    assert done.exit_code == 1, done.output
    assert said in done.stderr
    assert champion() == "1"
    (run,) = mlflow.search_runs(filter_string="attributes.status = 'FAILED'", max_results=1, output_format="list")
    assert run.data.tags["mlflow_llm.decision"] == "refused"
    assert said in run.data.tags["mlflow_llm.reason"]


def test_a_dataset_of_mlflow(promote: Promote) -> None:
    """The requests may be a dataset of MLflow, by its name. Feedbacks of one scorer count each by its name, and with
    --dry-run the alias stays."""
    from mlflow.genai.datasets import create_dataset

    questions = [{"inputs": {"messages": [{"role": "user", "content": f"{i}"}]}} for i in range(3)]
    create_dataset(name="questions").merge_records(questions)
    done = promote("2", "--data", "questions", "--scorer", "house_scorers:two", "--margin", "1", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["decision"], champion()) == ("would_promote", "1")
    assert {name: one["difference"] for name, one in said["by_scorer"].items()} == {"asked": 0, "said": 4}


REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    ((), 2, "--if-better needs a --scorer"),
    (("--scorer", "house_scorers:length"), 2, "--if-better needs --margin"),
    (("--scorer", "house_scorers:length", "--margin", "0.1"), 2, "--if-better needs --endpoint or --data"),
    (("--scorer", "house_scorers:length", "--margin", "0"), 2, "--margin"),
    (("--scorer", "house_scorers:gone", "--margin", "1"), 2, "the module house_scorers has no 'gone'"),
    (("--scorer", "nowhere:x", "--margin", "1"), 2, "nowhere cannot be imported"),
    (("--scorer", "house_scorers:NOTHING", "--margin", "1"), 2, "it is a int, neither a scorer nor a function"),
    (("--scorer", "Politeness", "--margin", "1"), 2, "MLflow has no scorer of this name"),
    (("--scorer", "Safety", "--margin", "1"), 2, "name one with --judge"),
    (("--scorer", "RegexMatch", "--margin", "1"), 2, "it needs pattern; make it in a module of yours"),
    (("--scorer", "UserFrustration", "--judge", "endpoints:/a", "--margin", "1"), 2, "whole conversations"),
    (("--against", "2", "--scorer", "house_scorers:length", "--margin", "1"), 2, "it is the candidate itself"),
    (("--against", "9", "--scorer", "house_scorers:length", "--margin", "1"), 1, "has no version '9'"),
    (("--data", "gone.jsonl", "--scorer", "house_scorers:length", "--margin", "1"), 1, "there is no such file"),
    (("--data", "gone", "--scorer", "house_scorers:length", "--margin", "1"), 1, "no dataset of MLflow"),
]


@pytest.mark.parametrize(("more", "status", "said"), REFUSED)
def test_what_is_refused(promote: Promote, more: tuple[str, ...], status: int, said: str) -> None:
    """Options that are missing or wrong are refused by name before a model is loaded."""
    data = () if "--data" in more or "or --data" in said else ("--data", "data.jsonl")
    done = promote("2", *more, *data)
    assert done.exit_code == status, done.output
    assert said in done.stderr
    assert champion() == "1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: it is not JSON"),
        ("[]", "line 2: [] is not a JSON object"),
        ('{"inputs": {"prompt": "a"}, "expected": 1}', "line 2: 'expected' is not known"),
        ('{"inputs": 1}', "line 2: inputs: 1 is not a JSON object"),
        ('{"inputs": {"prompt": "a"}, "expectations": 1}', "line 2: expectations: 1 is not a JSON object"),
        ('{"input": "a"}', "line 2: it asks for no text"),
        ('{"prompt": "a", "stream": true}', "line 2: stream: True is not allowed"),
        ('{"inputs": {"question": "a"}}', "line 2: "),
    ],
)
def test_data_that_are_no_requests(promote: Promote, tmp_path: Path, line: str, said: str) -> None:
    """A line that is no request for a text is refused by its number, before a model is loaded."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    done = promote("2", "--data", "bad.jsonl", "--scorer", "house_scorers:length", "--margin", "1")
    assert done.exit_code == 1, done.output
    assert said in done.stderr


def test_an_alias_is_moved_without_an_evaluation(promote: Promote) -> None:
    """Without --if-better the alias is moved at once, forward or back, and options of an evaluation are refused."""

    def run(version: str, *more: str) -> Any:
        return CliRunner().invoke(cli, ["promote", f"models:/{MODEL}/{version}", "--alias", "champion", *more])

    assert "(not moved: --dry-run)" in run("2", "--dry-run").stdout
    assert champion() == "1"
    assert f"{MODEL}@champion: 1 → 2" in run("2").stdout
    assert champion() == "2"
    assert "is 2 already" in run("2").stdout
    assert run("1").exit_code == 0
    assert champion() == "1"
    assert "--margin goes with --if-better" in run("2", "--margin", "0.1").stderr
    assert "has no version '9'" in run("9").stderr
    assert "models:/NAME/VERSION" in run("").stderr
