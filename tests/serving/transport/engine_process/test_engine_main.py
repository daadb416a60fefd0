"""The environment that an engine process sets before torch is imported."""

from __future__ import annotations

import os

import pytest

from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.system.cpus import available_cpus
from mlflow_llm.serving.transport.engine_process.main import set_threads


def test_threads_are_known_to_openmp_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP gets one thread per usable CPU; the environment takes precedence over that, and the setting over both."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the code under test sets
        monkeypatch.delenv(name)
    set_threads(EngineSettings())
    assert os.environ["OMP_NUM_THREADS"] == str(available_cpus().threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_threads(EngineSettings())
    assert os.environ["OMP_NUM_THREADS"] == "7"
    set_threads(EngineSettings(threads=3))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("3", "3")
