"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tiny_models import FAMILIES, make_model, save_bundle

from mlflow_llm.serving.bundle import Bundle

# A shell without job control, which is what runs many a CI, starts background commands with SIGINT ignored; every
# process of ours would inherit that, and the tests of Ctrl-C would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a server then does, too


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """A random Llama of two layers, to compare with."""
    return make_model(FAMILIES["llama"]())


@pytest.fixture(scope="session")
def tiny_bundle(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model on disk."""
    return save_bundle(tiny_llama, tmp_path_factory.mktemp("tiny_llama"))
