"""A replica's engine has the adapters that are wanted of it, whatever happens to either."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import AdapterInfo
from mlflow_llm.serving.interface.errors import LimitExceeded, Overloaded
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


class FullEngine(InstantEngine):
    """An engine with room for one adapter beside its model's own."""

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        if {"pirate", name} < {info.name for info in self.adapters()} | {name}:
            raise LimitExceeded("full", limit="adapter_memory", allowed=1, remaining=0)
        return super().load_adapter(name, path, replace=replace, pinned=pinned)


def test_where_there_is_no_room_the_old_content_goes_first(instant_bundle: Bundle, tmp_path: Path) -> None:
    """A content that does not fit beside the one that it replaces is loaded after it; another adapter is refused."""
    engine, wanted = FullEngine(instant_bundle, EngineSettings()), Wanted()
    wanted.adapters = WantedAdapters(adapters={"a@1": WantedAdapter(path=str(tmp_path), revision="1")})
    wanted.sync.sync(engine)
    both = {name: WantedAdapter(path=str(tmp_path), revision=name[-1]) for name in ("a@2", "a@1", "b@3")}
    wanted.adapters = WantedAdapters(adapters=both | {"a@1": WantedAdapter(path="/a", revision="1", is_old=True)})
    for _ in range(2):
        wanted.sync.sync(engine)
        wanted.adapters = WantedAdapters(adapters=wanted.adapters.adapters, withdrawn=frozenset({"c"}))
    assert paths_of(engine) == {"a@2": str(tmp_path)}
    assert wanted.sync.refused["b@3"][0] == "3"


def test_it_says_whether_anything_is_still_to_be_loaded(instant_bundle: Bundle, tmp_path: Path) -> None:
    """It is complete without adapters, with all of them and with a refusal, but not while one has to be tried again."""
    engine, wanted = InstantEngine(instant_bundle, EngineSettings()), Wanted()
    wanted.sync.begin()
    assert not wanted.sync.is_complete
    wanted.sync.sync(engine)
    assert wanted.sync.is_complete
    wanted.sync.begin()
    wanted.want(a=(str(tmp_path), "1"), b=(str(tmp_path / "gone"), "2"))
    wanted.sync.sync(engine)
    assert wanted.sync.is_complete
