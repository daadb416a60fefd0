"""``mlflow models predict``: in this environment on real weights, and in one built from the model's requirements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from mlflow_llm.flavors import llm

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TINY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}


def pip_find_links() -> str:
    """Return pip's find-links setting, because uv does not read pip's settings."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def write_pyenv(file: Path) -> None:
    """Write a ``pyenv`` that gives the running Python, because MLflow's virtualenv would build one from source."""
    file.write_text(
        "#!/bin/sh\n"
        "for version; do :; done  # install --skip-existing 3.11.7\n"
        'mkdir -p "$PYENV_ROOT/versions"\n'
        f'ln -sfn {sys.base_prefix} "$PYENV_ROOT/versions/$version"\n'
    )
    file.chmod(0o755)


def models_predict(model: Path, body: Any, folder: Path, env_manager: str = "local", **environment: str) -> Any:
    """Return the output of ``mlflow models predict`` for ``body``, or its exit status and error output."""
    asked, reported = folder / "asked.json", folder / "reported.json"
    asked.write_text(json.dumps(body))
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "models", "predict", "-m", str(model), "-t", "json"]
    command += ["-i", str(asked), "-o", str(reported), "--env-manager", env_manager]
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    # MLflow puts the experiment that a process chose into its environment, for the processes it starts
    ours = {"PYTHONPATH", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}
    given = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        command, env=given | {"PATH": path} | environment, cwd=folder, capture_output=True, text=True, check=False
    )
    return json.loads(reported.read_text()) if done.returncode == 0 else (done.returncode, done.stderr)


def test_one_request(assistant, tmp_path):
    """A request in OpenAI's form gets the reply object itself, with its adapter and its usage."""
    reply = models_predict(assistant, {"messages": MESSAGES, "temperature": 0, "adapter": "pirate"}, tmp_path)
    assert reply["choices"][0]["message"]["content"].startswith("Arrr")
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]


def test_rows_and_params(tiny, tmp_path):
    """Rows in MLflow's form get ``predictions`` in order; ``params`` apply to rows without the field."""
    rows = [{"prompt": "a b c", "max_tokens": 1, "ignore_eos": True}, {"prompt": "a b c", "ignore_eos": True}]
    reported = models_predict(tiny, {"dataframe_records": rows, "params": {"max_tokens": 2}}, tmp_path)
    assert [reply["usage"]["completion_tokens"] for reply in reported["predictions"]] == [1, 2]


def test_an_unknown_field_fails_the_command(tiny, tmp_path):
    """An unknown field fails the command with the nearest name."""
    status, said = models_predict(tiny, {"prompt": "Hi", "max_token": 3}, tmp_path)
    assert status != 0
    assert "did you mean 'max_tokens'" in said


def test_a_bad_request_fails_the_command(tiny, tmp_path):
    """A refused request ends the command with an error that names the field."""
    status, said = models_predict(tiny, TINY | {"temperature": 7}, tmp_path)
    assert status != 0
    assert "temperature" in said
    assert "[0, 2]" in said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Save a tiny model with its environment."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "flavors"))
    from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama

    path = tmp_path_factory.mktemp("environment") / "m"
    llm.save_model(path, tiny_llama(), tokenizer=byte_tokenizer(chat_template=TEMPLATE))
    return path


def test_local_environment_from_python(tiny, tmp_path, monkeypatch):
    """``mlflow.models.predict`` answers in this environment too."""
    monkeypatch.chdir(tmp_path)
    mlflow.models.predict(str(tiny), TINY, output_path=str(tmp_path / "reported.json"), env_manager="local")
    assert json.loads((tmp_path / "reported.json").read_text())["usage"]["completion_tokens"] == 3


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("env_manager", ["uv", "virtualenv"])
def test_environment_of_the_model(tiny, tmp_path, env_manager):
    """MLflow builds a working environment from the stored requirements and wheel, and the model answers in it."""
    links = pip_find_links()
    cheap = env_manager == "uv" and links and "+cpu" in torch.__version__
    if not cheap and not os.environ.get("MLFLOW_LLM_TEST_ENVIRONMENTS"):
        pytest.skip(
            "installs torch anew: minutes with virtualenv (222 s measured; uv 65 s), several GB where no CPU build is "
            "at hand; set MLFLOW_LLM_TEST_ENVIRONMENTS=1"
        )
    (tmp_path / "bin").mkdir()
    write_pyenv(tmp_path / "bin" / "pyenv")
    found = {"UV_FIND_LINKS": links} if links else {}
    reported = models_predict(tiny, TINY, tmp_path, env_manager, **found)
    assert isinstance(reported, dict), reported[1][-3000:]
    assert reported["usage"]["completion_tokens"] == 3
