"""MLflow's prompt registry: its answers from a real store, its process, and a registry that is down."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from stores import empty_store, own_stores

from mlflow_llm.serving.control.mlflow_processes import prompt_registry
from mlflow_llm.serving.control.mlflow_processes.prompt_process import answer
from mlflow_llm.serving.control.mlflow_processes.prompt_registry import PromptRegistry, is_configured
from mlflow_llm.serving.interface.errors import Conflict, NotFound, Overloaded, RequestError, Unavailable

PATIENCE = 300.0
CHAT = [{"role": "system", "content": "Be {{ mood }}."}, {"role": "user", "content": "Hi {{who}}, {{who}}"}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    place = tmp_path / uuid.uuid4().hex  # never that of an earlier test, whose connections MLflow keeps by path
    place.mkdir()
    uri = empty_store(place)
    with own_stores(uri):
        yield uri
        for thread in threading.enumerate():  # MLflow links a saved prompt to its experiment beside the call
            if thread.name.startswith("link_prompt"):
                thread.join(PATIENCE)
                assert not thread.is_alive()


def ask(call: str, **arguments: Any) -> dict[str, Any]:
    return answer({"call": call, "arguments": arguments})


def test_prompts_are_saved_and_loaded(store: str) -> None:
    """Text and chat prompts come back with variables, settings and versions: the newest, by number, and by alias."""
    import mlflow

    assert ask("search", limit=5) == {"prompts": [], "more": False}
    saved = ask("save", name="greeting", template="Greet {{name}}.", commit_message="first")
    assert (saved["version"], saved["template"], saved["variables"]) == (1, "Greet {{name}}.", ["name"])
    settings = {"response_format": {"type": "object"}, "model_config": {"temperature": 0.3}}
    assert ask("save", name="greeting", template=CHAT, **settings)["version"] == 2
    mlflow.genai.set_prompt_alias("greeting", "production", 1)
    newest = ask("load", name="greeting")
    assert (newest["version"], newest["template"], newest["variables"]) == (2, CHAT, ["mood", "who"])
    assert {name: newest[name] for name in settings} == settings
    assert [(one["version"], one["commit_message"]) for one in newest["versions"]] == [(2, ""), (1, "first")]
    assert ask("load", name="greeting", version="1") == ask("load", name="greeting", version="production")
    ask("save", name="other", template="x")
    assert ask("search", words="REET", limit=5)["prompts"] == [{"name": "greeting", "description": "first"}]
    assert ask("search", limit=1)["more"]


@pytest.mark.parametrize(
    ("call", "arguments", "kind"),
    [
        ("load", {"name": "nothing"}, "missing"),
        ("load", {"name": "nothing", "version": "7"}, "missing"),
        ("save", {"name": "a/b", "template": "x"}, "invalid"),
        ("save", {"name": "a", "template": "x", "model_config": {"temperature": "hot"}}, "invalid"),
    ],
)
def test_what_mlflow_refuses_is_an_answer(store: str, call: str, arguments: dict[str, Any], kind: str) -> None:
    """An error of MLflow's has its words and its kind."""
    found = ask(call, **arguments)
    assert (found["kind"], bool(found["error"])) == (kind, True)


def test_a_process_asks_a_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds the store of the environment, and gets texts of any length and alphabet."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    template = "Grüße, \u4f60\u597d {{name}}\n" * 3000
    saved = PromptRegistry(timeout=PATIENCE).save({"name": "long", "template": template})
    assert (saved["template"], saved["variables"]) == (template, ["name"])


def test_a_registry_that_is_down_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a server is an error with its name, without MLflow's minutes of tries, and without passwords."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://user:secret@127.0.0.1:1/db")
    with pytest.raises(Unavailable, match=r"no MLflow server answers at postgresql://user:\*\*\*@127") as refusal:
        PromptRegistry(timeout=PATIENCE).search("", 1)
    assert refusal.value.retry_after


def test_a_registry_that_hangs_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not answer in time is killed, and the error has the time."""
    words = ["python", "-c", "import threading; threading.Event().wait()"]
    monkeypatch.setattr(prompt_registry.child, "python_command", lambda *_: words)
    with pytest.raises(Unavailable, match=r"within 0\.5 seconds"):
        PromptRegistry(timeout=0.5).search("", 1)


def test_a_process_that_dies_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is an error with the exit status."""
    monkeypatch.setattr(prompt_registry.child, "python_command", lambda *_: ["python", "-c", "raise SystemExit(3)"])
    with pytest.raises(Unavailable, match="exit status 3"):
        PromptRegistry(timeout=PATIENCE).search("", 1)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("missing", NotFound), ("invalid", RequestError), ("conflict", Conflict), ("unavailable", Unavailable)],
)
def test_each_kind_of_answer_has_its_error(kind: str, error: type[Exception]) -> None:
    """Refusals of a caller's values are 4xx, and only what is not the caller's fault is a 503."""
    registry = PromptRegistry(ask=lambda question, timeout: {"error": "words", "kind": kind})
    with pytest.raises(error, match="words"):
        registry.load("a", "")


def test_questions_wait_for_each_other_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question is asked at a time; beyond those that may wait, one is refused at once."""
    monkeypatch.setattr(prompt_registry, "MAX_QUESTIONS", 1)
    asked, go = threading.Event(), threading.Event()

    def hold(question: Mapping[str, Any], timeout: float) -> Any:
        asked.set()
        assert go.wait(PATIENCE)
        return {"prompts": [], "more": False}

    registry = PromptRegistry(ask=hold)
    first = threading.Thread(target=registry.search, args=("", 1))
    first.start()
    assert asked.wait(PATIENCE)
    with pytest.raises(Overloaded):
        registry.search("", 1)
    go.set()
    first.join(PATIENCE)
    assert not first.is_alive()
    assert registry.search("", 1) == {"prompts": [], "more": False}


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", ""])
def test_a_store_is_configured_by_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either variable names a registry; without both there is none, though MLflow would make one."""
    for one in prompt_registry.VARIABLES:
        monkeypatch.delenv(one, raising=False)
    if name:
        monkeypatch.setenv(name, f"sqlite:///{os.curdir}/x.db")
    assert is_configured() == bool(name)
