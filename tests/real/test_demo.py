"""The quickstart: the demo's three answers, and the notebooks cell by cell."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(smollm2_dir, minilm_dir, adapters_dir, tmp_path_factory):
    """Lay out the folder of models as the quickstart's scripts do."""
    folder = tmp_path_factory.mktemp("models")
    for name, source in {"smollm2": smollm2_dir, "minilm": minilm_dir, "adapters": adapters_dir}.items():
        (folder / name).symlink_to(source, target_is_directory=True)
    return folder


def test_demo_prints_three_answers_with_usage(models, tmp_path):
    """Base and both adapters answer differently over HTTP with token counts, and the embedder answers."""
    command = [sys.executable, str(ROOT / "examples/quickstart/demo.py")]
    command += ["--models", str(models), "--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    answers = dict(re.findall(r"^ *(base|pirate|json): (.+)$", done.stdout, re.MULTILINE))
    assert "Paris" in answers["base"]
    assert answers["pirate"].startswith("Arrr")
    assert answers["json"].startswith("{")
    assert len(re.findall(r"\d+ prompt \+ \d+ completion tokens", done.stdout)) == 3
    cat, rates = map(float, re.findall(r"(-?\d\.\d\d) similar", done.stdout))
    assert cat > rates


@pytest.fixture
def ran(models, tmp_path, monkeypatch):
    """Return a function that runs a notebook in a folder of its own."""
    monkeypatch.setenv("MLFLOW_LLM_QUICKSTART_MODELS", str(models))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where its store goes
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def run(name):
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        patient = Config(KernelManager={"shutdown_wait_time": 120.0})  # the kernel removes its store when it ends
        there = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=850, resources=there, config=patient).execute()
        return notebook

    return run


def shown(notebook):
    """Return the values that the cells show, as text."""
    return [o["data"]["text/plain"] for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o]


@pytest.mark.filterwarnings("ignore")
def test_notebook_runs_cell_by_cell(ran, tmp_path):
    """Every cell of the quickstart notebook runs."""
    notebook = ran("quickstart")
    plots = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(plots) == 1
    assert not [path for path in tmp_path.rglob("mlflow.db") if path.is_file()]


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_of_batches_runs(ran):
    """Every cell of the notebook runs, by Spark where there are pyspark and Java: three answers, a reason, a bill."""
    answers, bill, own = shown(ran("batch_with_spark"))[-3:]
    assert "Paris" in answers
    assert "capitals" in bill
    assert "Paris" in own


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_of_adapters_trains_two_and_splits_traffic(ran, tmp_path):
    """Both versions know what they were trained on, answer in its style, and are on the bill; nothing is left."""
    *_, origin, state, asked, right, sticky, bill, ended = shown(ran("adapters_from_training_to_split"))
    assert re.findall(r"(\d) +(terse|warm) +capitals-(terse|warm)@", origin) == [
        ("1", "terse", "terse"),
        ("2", "warm", "warm"),
    ]
    assert ast.literal_eval(state)["ready"] == "READY"
    answers = re.findall(r"(terse|warm) +assistant/(\d) +(What a lovely question)?", asked)
    assert len(answers) == 8
    assert set(answers) == {("terse", "1", ""), ("warm", "2", "What a lovely question")}
    counts = dict(re.findall(r"^(terse|warm) +(\d)", right, re.MULTILINE))
    assert sum(map(int, counts.values())) == 8
    kept = ast.literal_eval(sticky)
    assert all(first == second for first, second in kept.values())
    for name in ("terse", "warm"):
        requests = int(counts[name]) + [first for first, _ in kept.values()].count(name) * 2
        assert re.search(rf"chat +{name} +{requests} ", bill)
    assert ended == "0"
    assert not [path for path in tmp_path.rglob("mlflow.db") if path.is_file()]


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_of_promotions_runs(ran, tmp_path):
    """Every cell of the notebook runs: one version is promoted, one is not better, and that one is rolled back."""
    notebook = ran("evaluate_promote_roll_back")
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    printed = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    assert "assistant@champion: 1 → 2" in printed
    assert "assistant@champion stays at 2" in printed
    history = re.findall(r"^\d  +(\w+) .*?  assistant/(\d.*?)(?:  |$)", printed, re.MULTILINE)
    assert history == [
        ("rolled_back", "2 50 %, assistant/3 50 %"),
        ("active", "2"),
        ("promoted", "1 50 %, assistant/2 50 %"),
        ("superseded", "1"),
    ]
    assert "as_json/mean is 0, below 0.5" in printed
    assert not [path for path in tmp_path.rglob("*.db") if path.is_file()]
