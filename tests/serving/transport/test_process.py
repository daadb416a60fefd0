"""What an engine process sets before torch is imported."""

from __future__ import annotations

import os

import pytest

from mlflow_llm.serving.processors import processors
from mlflow_llm.serving.settings import EngineSettings
from mlflow_llm.serving.transport.process import OPENMP_SPINS, _set_threads

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the code under test sets is taken back
        monkeypatch.delenv(name)


def test_openmp_spins_for_microseconds() -> None:
    """By default OpenMP has a thread a core that is ours, and those that wait sleep soon."""
    _set_threads(EngineSettings())
    assert os.environ["OMP_NUM_THREADS"] == str(processors().threads)
    assert os.environ["GOMP_SPINCOUNT"] == str(OPENMP_SPINS)
    assert os.environ["KMP_BLOCKTIME"] == "0"


def test_what_the_caller_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy, a count of spins and a number of threads given in the environment stay; the setting wins over them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    _set_threads(EngineSettings())
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("7", "5")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    _set_threads(EngineSettings(threads=3))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("3", "3")
    assert "GOMP_SPINCOUNT" not in os.environ
