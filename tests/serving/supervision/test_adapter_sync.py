"""A replica's engine has the adapters that are wanted of it, whatever happens to either."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import Overloaded
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.supervision import adapter_sync
from mlflow_llm.serving.supervision.adapter_sync import NO_ADAPTERS, AdapterSync, WantedAdapter, WantedAdapters
from mlflow_llm.serving.testing.instant_engine import InstantEngine


class Wanted:
    """The adapters that a supervisor wants, with their ``sync``."""

    def __init__(self) -> None:
        self.adapters = NO_ADAPTERS
        self.sync = AdapterSync(lambda: self.adapters)

    def want(self, withdrawn: tuple[str, ...] = (), **adapters: tuple[str, str]) -> None:
        self.adapters = WantedAdapters(
            adapters={name: WantedAdapter(path=path, revision=revision) for name, (path, revision) in adapters.items()},
            withdrawn=frozenset(withdrawn),
        )


@pytest.fixture
def engine(instant_bundle: Bundle) -> InstantEngine:
    return InstantEngine(instant_bundle, EngineSettings())


def paths_of(engine: InstantEngine) -> dict[str, str]:
    return {info.name: info.path for info in engine.adapters() if info.name != "pirate"}


def test_what_is_wanted_is_loaded_and_what_is_withdrawn_leaves(engine: InstantEngine, tmp_path: Path) -> None:
    """Wanted adapters are loaded and withdrawn ones unloaded; a new revision replaces the old, and others are left
    alone.
    """
    wanted, one, two = Wanted(), tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    assert not wanted.sync.sync(engine)
    wanted.want(a=(str(one), "1"), b=(str(two), "2"))
    assert wanted.sync.sync(engine)
    assert paths_of(engine) == {"a": str(one), "b": str(two)}
    assert not wanted.sync.sync(engine)
    wanted.want(withdrawn=("b", "c"), a=(str(two), "3"))
    assert wanted.sync.sync(engine)
    assert paths_of(engine) == {"a": str(two)}
    assert wanted.sync.loaded == {"a": "3"}
    assert "pirate" in {info.name for info in engine.adapters()}


def test_a_refusal_is_kept_until_another_revision(engine: InstantEngine, tmp_path: Path) -> None:
    """An adapter that the engine refuses does not hold others back, and the one it was to replace stays."""
    wanted = Wanted()
    wanted.want(a=(str(tmp_path), "1"))
    wanted.sync.sync(engine)
    wanted.want(a=(str(tmp_path / "gone"), "2"), b=(str(tmp_path), "3"))
    assert wanted.sync.sync(engine)
    assert wanted.sync.refused["a"][0] == "2"
    assert "a directory with a peft adapter" in wanted.sync.refused["a"][1]
    assert wanted.sync.loaded == {"a": "1", "b": "3"}
    assert paths_of(engine) == {"a": str(tmp_path), "b": str(tmp_path)}


def test_another_process_gets_them_anew(engine: InstantEngine, instant_bundle: Bundle, tmp_path: Path) -> None:
    """A restarted engine gets the wanted adapters before it takes requests again."""
    wanted = Wanted()
    wanted.want(a=(str(tmp_path), "1"))
    wanted.sync.sync(engine)
    successor = InstantEngine(instant_bundle, EngineSettings())
    wanted.sync.begin()
    assert wanted.sync.loaded == {}
    assert wanted.sync.sync(successor)
    assert paths_of(successor) == {"a": str(tmp_path)}


def test_a_full_engine_is_asked_again(engine: InstantEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that a full engine could not load is not refused but loaded at the next attempt."""
    wanted, real, full = Wanted(), engine.load_adapter, [Overloaded("full", retry_after=1.0)]

    def load_adapter(name: str, path: str, **more: bool) -> object:
        if full:
            raise full.pop()
        return real(name, path, **more)

    monkeypatch.setattr(engine, "load_adapter", load_adapter)
    monkeypatch.setattr(adapter_sync, "RETRY_SECONDS", 0.0)
    wanted.want(a=(str(tmp_path), "1"))
    assert not wanted.sync.sync(engine)
    assert (wanted.sync.loaded, wanted.sync.refused) == ({}, {})
    assert wanted.sync.sync(engine)
    assert wanted.sync.loaded == {"a": "1"}
